//! Packets on their way out, in a batch that owns its buffer.

use doorbell_wire::roce::ICRC_LEN;

use crate::icrc::{FlowCrc, LIGHT};
use crate::path::{Path, TAIL};
use crate::sys::Piece;

/// Bytes of a send batch. More than a train of the longest packets, small enough for a second-level cache.
const SEND_BYTES: usize = 256 << 10;
/// Packets of a send batch.
const SEND_PACKETS: usize = 512;

/// Packets on their way out.
///
/// ```no_run
/// # fn f(port: &mut dyn doorbell_port::Port, batch: &mut doorbell_port::SendBatch, path: &doorbell_port::Path, packet: &[u8]) -> doorbell_port::Result<()> {
/// if let Some(space) = batch.space(path) {
///     space[..packet.len()].copy_from_slice(packet);
///     batch.commit(path, packet.len());
/// }
/// port.send(batch)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct SendBatch {
    buffer: Box<[u8]>,
    used: usize,
    packets: Vec<Slot>,
    trains: Vec<Train>,
    /// Trains that were sent.
    sent: usize,
    flow: Option<(u32, FlowCrc)>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    at: u32,
    /// With ICRC.
    len: u16,
    id: u16,
    /// The end of the payload lies elsewhere: the buffer has what is before it, and the ICRC.
    lent: Option<Lent>,
}

/// Payload that lies in memory of the batch's user until it is sent.
#[derive(Clone, Copy, Debug)]
struct Lent {
    at: *const u8,
    len: u16,
}

// SAFETY: it is read only under the promise of `SendBatch::commit_lent`, which holds for the batch wherever that is.
unsafe impl Send for Lent {}
// SAFETY: as above; it is never written through.
unsafe impl Sync for Lent {}

impl Lent {
    /// The payload.
    ///
    /// # Safety
    /// The promise of [`SendBatch::commit_lent`] still holds: the packet waits in its batch.
    unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: readable, by the promise. Others may store there meanwhile, as they may into whatever a NIC reads: every byte is then an old or a
        // new one, and nothing but a checksum and a copy is made of them.
        unsafe { std::slice::from_raw_parts(self.at, usize::from(self.len)) }
    }
}

impl Slot {
    /// Bytes in the buffer before the ICRC.
    fn own(&self) -> usize {
        usize::from(self.len) - ICRC_LEN - self.lent.map_or(0, |l| usize::from(l.len))
    }
}

/// Packets of one size and path, behind each other in the buffer; the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Train {
    pub(crate) path: Path,
    /// Bytes of each packet but the last, with ICRC.
    pub(crate) segment: u16,
    pub(crate) count: u16,
    first: u32,
    at: u32,
    bytes: u32,
    closed: bool,
    /// Some of its payload lies elsewhere.
    lent: bool,
    /// What a light train of several packets ends with.
    tail: [u8; TAIL],
}

impl Train {
    /// Bytes of its packets.
    pub(crate) fn len(&self) -> usize {
        self.bytes as usize
    }

    /// Pieces of memory that it is in, at most.
    pub(crate) fn pieces(&self) -> usize {
        let packets = if self.lent {
            2 * usize::from(self.count) + 1
        } else {
            1
        };
        packets + usize::from(self.has_tail())
    }

    /// Are its packets glued together by us, not by the kernel?
    pub(crate) fn has_tail(&self) -> bool {
        self.path.light && self.count > 1
    }

    /// Bytes that two copies of its packets need, the space for the last included.
    pub(crate) fn bytes_twice(&self) -> usize {
        2 * self.bytes as usize + self.path.mtu() + ICRC_LEN
    }
}

/// A packet of a [`SendBatch`], complete.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Where it goes.
    pub path: &'a Path,
    /// IPv4 identification that its ICRC was computed for.
    pub id: u16,
    /// Base header to padding.
    pub bytes: &'a [u8],
    /// The ICRC as sent.
    pub icrc: [u8; 4],
    whole: &'a [u8],
}

impl<'a> Outgoing<'a> {
    /// The packet and its ICRC in one piece.
    pub fn with_icrc(&self) -> &'a [u8] {
        self.whole
    }
}

impl Default for SendBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl SendBatch {
    /// An empty batch (256 KiB, 512 packets).
    pub fn new() -> Self {
        Self {
            buffer: vec![0; SEND_BYTES].into_boxed_slice(),
            used: 0,
            packets: Vec::with_capacity(SEND_PACKETS),
            trains: Vec::with_capacity(SEND_PACKETS),
            sent: 0,
            flow: None,
        }
    }

    /// Room for one packet (base header to padding) to `path`, as long as the path takes. `None`: full, send first.
    #[inline]
    pub fn space(&mut self, path: &Path) -> Option<&mut [u8]> {
        let want = path.mtu() + ICRC_LEN;
        if self.packets.len() == SEND_PACKETS {
            return None;
        }
        self.buffer
            .get_mut(self.used..self.used + want)
            .map(|space| &mut space[..want - ICRC_LEN])
    }

    /// Takes the packet of `len` bytes that was written to [`SendBatch::space`], and computes its ICRC.
    ///
    /// # Panics
    /// If `len` is more than the space was.
    #[inline]
    pub fn commit(&mut self, path: &Path, len: usize) {
        self.commit_xor(path, len, 0);
    }

    /// As [`SendBatch::commit`], with an ICRC that is wrong by `damage`.
    #[inline]
    pub fn commit_xor(&mut self, path: &Path, len: usize, damage: u32) {
        self.add(path, len, None, damage);
    }

    /// Takes a packet whose first `len` bytes were written to [`SendBatch::space`], and whose other `payload` bytes lie at `at`: they are read here, for
    /// the ICRC (unless the path is [light](Path::light)), and once more while the packet is sent. If somebody changes them in between, the packet arrives damaged, and is lost. Only for a port that
    /// [`lends`](crate::Port::lends).
    ///
    /// # Panics
    /// If the packet is longer than the space was, or has no payload.
    ///
    /// # Safety
    /// `payload` bytes from `at` are readable until the next [`Port::send`](crate::Port::send) with this batch has returned, or
    /// [`SendBatch::clear`].
    #[inline]
    pub unsafe fn commit_lent(&mut self, path: &Path, len: usize, at: *const u8, payload: usize) {
        assert!(
            payload != 0 && payload <= path.mtu(),
            "no payload, or more than a packet's"
        );
        let lent = Lent {
            at,
            len: payload as u16,
        };
        self.add(path, len, Some(lent), 0);
    }

    #[inline]
    fn add(&mut self, path: &Path, own: usize, lent: Option<Lent>, damage: u32) {
        let len = own + lent.map_or(0, |l| usize::from(l.len));
        assert!(
            len <= path.mtu() && self.packets.len() < SEND_PACKETS,
            "a packet of {len} bytes was committed that had no space"
        );
        let whole = len + ICRC_LEN;
        let at = self.used;
        let id = match self.trains.last_mut() {
            Some(train)
                if !train.closed
                    && train.path.key == path.key
                    && whole <= usize::from(train.segment)
                    // Light trains are told from single packets by their length.
                    && (!path.light || (whole | usize::from(train.segment)).is_multiple_of(4))
                    && train.count < path.train
                    && train.bytes + whole as u32 <= path.most =>
            {
                train.count += 1;
                train.bytes += whole as u32;
                train.lent |= lent.is_some();
                // Only the last may be shorter.
                train.closed = whole < usize::from(train.segment);
                match path.light {
                    true => 0,
                    false => train.count - 1,
                }
            }
            _ => {
                self.trains.push(Train {
                    path: *path,
                    segment: whole as u16,
                    count: 1,
                    first: self.packets.len() as u32,
                    at: at as u32,
                    bytes: whole as u32,
                    closed: false,
                    lent: lent.is_some(),
                    tail: (whole as u16).to_le_bytes(),
                });
                0
            }
        };
        if self.flow.as_ref().is_none_or(|(key, _)| *key != path.key) {
            self.flow = Some((path.key, FlowCrc::new(path.local, path.peer)));
        }
        let (packet, rest) = self.buffer[at..].split_at_mut(own);
        if let Some((_, flow)) = &mut self.flow {
            let crc = match lent {
                _ if path.light && len > LIGHT => flow.compute_base(id, len, packet),
                None => flow.compute(id, packet),
                // SAFETY: promised by `commit_lent`, which is where it comes from.
                Some(lent) => flow.compute_two(id, packet, unsafe { lent.bytes() }),
            };
            rest[..ICRC_LEN].copy_from_slice(&(crc ^ damage).to_le_bytes());
        }
        self.packets.push(Slot {
            at: at as u32,
            len: whole as u16,
            id,
            lent,
        });
        self.used = at + own + ICRC_LEN;
    }

    /// Copies a packet in. `false`: full, send first.
    pub fn push(&mut self, path: &Path, packet: &[u8]) -> bool {
        let Some(space) = self.space(path) else {
            return false;
        };
        space[..packet.len()].copy_from_slice(packet);
        self.commit(path, packet.len());
        true
    }

    /// Packets that wait to be sent.
    #[inline]
    pub fn len(&self) -> usize {
        match self.trains.get(self.sent) {
            Some(train) => self.packets.len() - train.first as usize,
            None => 0,
        }
    }

    /// Nothing waits to be sent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.sent == self.trains.len()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.used = 0;
        self.packets.clear();
        self.trains.clear();
        self.sent = 0;
    }

    /// The packets that wait to be sent.
    ///
    /// # Panics
    /// If one came by [`SendBatch::commit_lent`].
    pub fn iter(&self) -> impl Iterator<Item = Outgoing<'_>> {
        self.trains[self.sent..]
            .iter()
            .flat_map(|t| self.packets_of(t))
    }

    pub(crate) fn packets_of<'a>(&'a self, train: &'a Train) -> impl Iterator<Item = Outgoing<'a>> {
        assert!(
            !train.lent,
            "a packet in pieces came to a port that does not lend"
        );
        self.slots_of(train).iter().map(move |slot| {
            let whole = &self.buffer[slot.at as usize..][..usize::from(slot.len)];
            let (bytes, icrc) = whole.split_at(whole.len() - ICRC_LEN);
            let mut crc = [0; 4];
            crc.copy_from_slice(icrc);
            Outgoing {
                path: &train.path,
                id: slot.id,
                bytes,
                icrc: crc,
                whole,
            }
        })
    }

    fn slots_of(&self, train: &Train) -> &[Slot] {
        &self.packets[train.first as usize..][..usize::from(train.count)]
    }

    /// Is there room for `packets` packets of together `bytes`?
    pub(crate) fn has_room(&self, bytes: usize, packets: usize) -> bool {
        self.used + bytes <= SEND_BYTES && self.packets.len() + packets <= SEND_PACKETS
    }

    /// The trains that wait to be sent.
    pub(crate) fn waiting(&self) -> &[Train] {
        &self.trains[self.sent..]
    }

    /// All bytes of a train, in as many pieces as it is.
    pub(crate) fn pieces_of<'a>(&'a self, train: &'a Train) -> impl Iterator<Item = Piece<'a>> {
        let all = Piece::new(match train.lent {
            false => &self.buffer[train.at as usize..][..train.len()],
            true => &[],
        });
        let slots = if train.lent {
            self.slots_of(train)
        } else {
            &[]
        };
        // Each: the ICRC of the packet before and what is there of this one (they are neighbours in the buffer), then what is not.
        let mut from = train.at as usize;
        let pieces = slots.iter().flat_map(move |slot| {
            let end = slot.at as usize + slot.own();
            let own = Piece::new(&self.buffer[from..end]);
            from = end;
            // SAFETY: the train waits in this batch, so the promise of `commit_lent` holds.
            let lent = slot.lent.map(|l| Piece::new(unsafe { l.bytes() }));
            [Some(own), lent].into_iter().flatten()
        });
        let last = slots.last().map(|slot| {
            let at = slot.at as usize + slot.own();
            Piece::new(&self.buffer[at..at + ICRC_LEN])
        });
        (!train.lent)
            .then_some(all)
            .into_iter()
            .chain(pieces)
            .chain(last)
            .chain(train.has_tail().then(|| Piece::new(&train.tail)))
    }

    /// The bytes of a train that lies in one piece, or that `small` has room for.
    #[inline]
    pub(crate) fn in_one<'a>(&'a self, train: &Train, small: &'a mut [u8]) -> Option<&'a [u8]> {
        let packets = match train.lent {
            false => &self.buffer[train.at as usize..][..train.len()],
            true => return None,
        };
        if !train.has_tail() {
            return Some(packets);
        }
        let (front, rest) = small.split_at_mut_checked(packets.len())?;
        front.copy_from_slice(packets);
        rest.get_mut(..TAIL)?.copy_from_slice(&train.tail);
        small.get(..packets.len() + TAIL)
    }

    /// Copies what is lent: whoever lent it may take it back when this returns.
    #[cold]
    pub(crate) fn keep(&mut self) {
        let waiting = &mut self.trains[self.sent..];
        if waiting.iter().all(|t| !t.lent) {
            return;
        }
        let mut buffer = Vec::with_capacity(SEND_BYTES);
        for train in waiting {
            train.at = buffer.len() as u32;
            train.lent = false;
            for slot in &mut self.packets[train.first as usize..][..usize::from(train.count)] {
                let (at, own) = (slot.at as usize, slot.own());
                slot.at = buffer.len() as u32;
                buffer.extend_from_slice(&self.buffer[at..at + own]);
                if let Some(lent) = slot.lent.take() {
                    // SAFETY: the packet waits in this batch, so the promise of `commit_lent` holds.
                    buffer.extend_from_slice(unsafe { lent.bytes() });
                }
                buffer.extend_from_slice(&self.buffer[at + own..at + own + ICRC_LEN]);
            }
        }
        self.used = buffer.len();
        buffer.resize(self.used.max(SEND_BYTES), 0);
        self.buffer = buffer.into_boxed_slice();
    }

    /// The first `trains` trains are dealt with.
    pub(crate) fn consume(&mut self, trains: usize) {
        self.sent += trains;
        if self.is_empty() {
            self.clear();
        }
    }

    /// Takes the first waiting train apart: its packets become packets without company, with ICRCs for identification 0.
    pub(crate) fn take_apart(&mut self) {
        self.keep();
        let Some(train) = self.trains.get(self.sent).copied() else {
            return;
        };
        let mut flow = FlowCrc::new(train.path.local, train.path.peer);
        let mut path = train.path;
        path.train = 1;
        let mut single = Vec::with_capacity(usize::from(train.count));
        for n in 0..u32::from(train.count) {
            let slot = &mut self.packets[(train.first + n) as usize];
            let whole = &mut self.buffer[slot.at as usize..][..usize::from(slot.len)];
            let (bytes, icrc) = whole.split_at_mut(usize::from(slot.len) - ICRC_LEN);
            // What was damaged on purpose stays damaged: the difference goes along.
            let mut crc = |id| match path.light && bytes.len() > LIGHT {
                true => flow.compute_base(id, bytes.len(), bytes),
                false => flow.compute(id, bytes),
            };
            let was = crc(slot.id);
            let mut stored = [0; 4];
            stored.copy_from_slice(icrc);
            let damage = was ^ u32::from_le_bytes(stored);
            let now = crc(0) ^ damage;
            icrc.copy_from_slice(&now.to_le_bytes());
            slot.id = 0;
            single.push(Train {
                path,
                segment: slot.len,
                count: 1,
                first: train.first + n,
                at: slot.at,
                bytes: u32::from(slot.len),
                closed: true,
                lent: false,
                tail: [0; TAIL],
            });
        }
        self.trains.splice(self.sent..=self.sent, single);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::path::PathRequest;

    fn path(train: u16) -> Path {
        let addr: SocketAddr = "127.0.0.1:4791".parse().unwrap();
        let request = PathRequest {
            trains: true,
            ..PathRequest::new(addr)
        };
        Path::new(&request, addr, 4140, train)
    }

    /// The same packets, copied into a batch and lent to another.
    fn both(train: u16, payload: &[u8]) -> (SendBatch, SendBatch) {
        let path = path(train);
        let (mut copied, mut lent) = (SendBatch::new(), SendBatch::new());
        for n in 0..100 {
            let head = [n as u8; 28];
            let head = &head[..if n % 8 == 0 { 28 } else { 12 }];
            assert!(copied.push(&path, &[head, payload].concat()));
            lent.space(&path).unwrap()[..head.len()].copy_from_slice(head);
            // SAFETY: the payload outlives the batch, but in the test below, which says so.
            unsafe { lent.commit_lent(&path, head.len(), payload.as_ptr(), payload.len()) };
        }
        (copied, lent)
    }

    #[test]
    fn what_was_lent_is_kept_when_the_kernel_has_no_room() {
        for train in [1, 64] {
            let payload: Vec<u8> = (0..2048).map(|i| (i * 7) as u8).collect();
            let (copied, mut lent) = both(train, &payload);
            let first = lent.trains[0].count;
            lent.consume(1);
            lent.keep();
            // Taken back.
            drop(payload);
            assert_eq!(lent.len(), 100 - usize::from(first));
            let later = copied.iter().skip(usize::from(first));
            assert!(
                lent.iter()
                    .zip(later)
                    .all(|(a, b)| a.with_icrc() == b.with_icrc())
            );
            let path = path(train);
            assert!(lent.push(&path, &[9; 40]));
            assert_eq!(lent.iter().last().unwrap().bytes, [9; 40]);
        }
    }

    #[test]
    fn trains_with_lent_payload_come_apart() {
        let payload = [0x5a; 1024];
        let (mut copied, mut lent) = both(64, &payload);
        copied.take_apart();
        lent.take_apart();
        assert!(lent.trains[0].count == 1 && lent.trains.len() == copied.trains.len());
        assert!(
            lent.iter()
                .zip(copied.iter())
                .all(|(a, b)| (a.id, a.with_icrc()) == (b.id, b.with_icrc()))
        );
    }
}
