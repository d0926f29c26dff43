//! The mailbox of a session: which QPs of this side are connected to the peer, and requests that only the
//! owner of the target may execute (a receive WQE to consume or to fill). Behind the slots lies a chunk of payload
//! for each request, since only the sender's engine reads the memory of a SEND and only the owner's writes that of a receive.
//!
//! Each side makes one sealed memfd and writes it ([`Mailbox`]); the peer maps it ([`MailboxView`]) and answers
//! in place. One slot per QP: a line that says who it is, and a ring of requests with one producer (the core of
//! that QP) and one consumer (the core of the QP it is connected to). A reader trusts nothing it finds.

use std::{
    mem::size_of,
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use super::{
    error::{Refusal, RefusalCode, Result, ShmError},
    proto::{MAGIC, VERSION},
    region::{Mapping, SharedRegion},
};
use crate::raw::Shared;

/// Requests of one QP that may be unanswered at a time.
pub(crate) const RING: u32 = 16;

/// Bytes of payload that go with a request, at most.
pub(crate) const CHUNK: usize = 4096;

/// Largest `slot_bits`: 65,536 QPs in one session.
pub(crate) const MAX_SLOT_BITS: u32 = 16;

#[repr(C, align(64))]
struct Header {
    magic: [u8; 8],
    version: u32,
    slot_bits: u32,
}

#[repr(C, align(64))]
struct Attention {
    /// Grows with every request of any ring, so that a consumer looks at one word and not at every ring.
    posted: AtomicU64,
    /// Grows whenever a QP comes or goes, so that nobody searches for one in vain twice.
    changed: AtomicU64,
}

#[repr(C, align(64))]
struct Slot {
    /// Odd: the QP is ready. Even: nobody, or changing.
    seq: AtomicU64,
    qpn: AtomicU32,
    pd: AtomicU32,
    peer_qpn: AtomicU32,
    /// Number of the first request of this life of the slot.
    first: AtomicU32,
    /// [`RECEIVES`].
    flags: AtomicU32,
    ring: [Entry; RING as usize],
}

#[repr(C, align(64))]
struct Entry {
    /// `2n + 1`: request `n` waits. `2n + 2`: it is answered.
    state: AtomicU64,
    opcode: AtomicU32,
    key: AtomicU32,
    addr: AtomicU64,
    len_imm: AtomicU64,
    operands: [AtomicU64; 2],
    status: AtomicU32,
    result: AtomicU64,
}

const _: () = assert!(
    size_of::<Header>() == 64
        && size_of::<Entry>() == 64
        && size_of::<Slot>() == 64 * (1 + RING as usize)
);

/// The QP has a receive queue.
const RECEIVES: u32 = 1;

/// A QP as its slot shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotQp {
    /// Number.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// The QP of the other side that it is connected to.
    pub peer_qpn: u32,
    /// It has a receive queue.
    pub receives: bool,
}

/// What one engine asks of the other. All fields are the sender's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Request {
    /// mlx5 opcode of the WQE.
    pub opcode: u32,
    /// rkey.
    pub key: u32,
    /// Remote address; where in its message a part of a SEND is.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Immediate.
    pub imm: u32,
    /// Of an atomic: (add, boundary) or (swap, compare). Of a part of a SEND: the message's bytes.
    pub operands: [u64; 2],
}

/// What came of a [`Request`]. Status 0 is success; others are the vendor syndrome of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    /// 0, or why not.
    pub status: u32,
    /// The value before an atomic.
    pub result: u64,
}

fn bytes_of(slot_bits: u32) -> usize {
    size_of::<Header>()
        + size_of::<Attention>()
        + ((size_of::<Slot>() + RING as usize * CHUNK) << slot_bits)
}

/// The typed view over the bytes, on both sides.
struct Layout {
    base: *const u8,
    mask: u32,
}

// SAFETY: the pointer leads to atomics in a mapping that lives in the same value as this view.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    /// # Safety
    /// `base` is page-aligned and mapped for `bytes_of(slot_bits)` bytes as long as this value lives.
    unsafe fn new(base: *const u8, slot_bits: u32) -> Self {
        Self {
            base,
            mask: (1 << slot_bits) - 1,
        }
    }

    fn attention(&self) -> &Attention {
        // SAFETY: second line of the mapping, which `new` was promised; only atomics lie there.
        unsafe { &*self.base.add(size_of::<Header>()).cast::<Attention>() }
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> &Slot {
        let offset = size_of::<Header>()
            + size_of::<Attention>()
            + (index & self.mask) as usize * size_of::<Slot>();
        // SAFETY: the index is masked to the slots that `new` was promised to be mapped.
        unsafe { &*self.base.add(offset).cast::<Slot>() }
    }

    /// The payload of request `n` of a slot.
    fn chunk(&self, index: u32, n: u32) -> Shared<u8> {
        let slots = self.mask as usize + 1;
        let number = (index & self.mask) as usize * RING as usize + (n % RING) as usize;
        let offset = size_of::<Header>()
            + size_of::<Attention>()
            + slots * size_of::<Slot>()
            + number * CHUNK;
        // SAFETY: chunks lie behind the slots, one for each of their requests, all of which `new` was promised to be mapped; a mapping does
        // not begin at address zero.
        unsafe { Shared::new(NonNull::new_unchecked(self.base.add(offset).cast_mut())) }
    }

    /// The QP of a slot with the sequence number under which it was read.
    fn read(&self, index: u32) -> Option<(u64, SlotQp, u32)> {
        let slot = self.slot(index);
        let seq = slot.seq.load(Ordering::Acquire);
        let qp = SlotQp {
            qpn: slot.qpn.load(Ordering::Relaxed),
            pd: slot.pd.load(Ordering::Relaxed),
            peer_qpn: slot.peer_qpn.load(Ordering::Relaxed),
            receives: slot.flags.load(Ordering::Relaxed) & RECEIVES != 0,
        };
        let first = slot.first.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        (seq & 1 == 1 && slot.seq.load(Ordering::Relaxed) == seq).then_some((seq, qp, first))
    }
}

/// This side's mailbox.
pub(crate) struct Mailbox {
    region: SharedRegion,
    layout: Layout,
    write: Mutex<()>,
}

impl Mailbox {
    /// Room for `2^slot_bits` QPs.
    ///
    /// # Errors
    /// [`ShmError::Limit`] above 2^[`MAX_SLOT_BITS`], [`ShmError::Os`] without memory.
    pub(crate) fn new(slot_bits: u32) -> Result<Self> {
        if slot_bits > MAX_SLOT_BITS {
            return Err(ShmError::Limit {
                what: "QPs of a session",
                limit: 1 << MAX_SLOT_BITS,
                remedy: "ask for fewer slots",
            });
        }
        let region = SharedRegion::new(bytes_of(slot_bits))?;
        let base = region.ptr().as_ptr();
        // SAFETY: a fresh, page-aligned mapping that no peer has yet.
        unsafe {
            base.cast::<Header>().write(Header {
                magic: MAGIC,
                version: u32::from(VERSION),
                slot_bits,
            })
        };
        // SAFETY: mapped for at least that many bytes; the region lives in the same value.
        let layout = unsafe { Layout::new(base, slot_bits) };
        Ok(Self {
            region,
            layout,
            write: Mutex::new(()),
        })
    }

    pub(crate) fn region(&self) -> &SharedRegion {
        &self.region
    }

    /// Shows a QP to the peer as ready. Returns its slot and the number of its first request.
    ///
    /// # Errors
    /// [`ShmError::InUse`] when the QP has a slot, [`ShmError::Limit`] when all are taken.
    fn open(&self, qp: SlotQp) -> Result<(u32, u32)> {
        let _one_writer = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = None;
        for probe in 0..=self.layout.mask {
            let index = qp.qpn.wrapping_add(probe) & self.layout.mask;
            match self.layout.read(index) {
                None if free.is_none() => free = Some(index),
                Some((_, other, _)) if other.qpn == qp.qpn => {
                    return Err(ShmError::InUse {
                        what: "QP",
                        value: format!("{:#x}", qp.qpn),
                        remedy: "it is connected to this peer; reset it first",
                    });
                }
                // The first free slot, unless the QP is found further on; nearly always the first probe.
                _ if free.is_some() && probe >= 64 => break,
                _ => {}
            }
        }
        let limit = self.layout.mask as usize + 1;
        let index = free.ok_or(ShmError::Limit {
            what: "QPs connected to one peer",
            limit,
            remedy: "raise ShmConfig::slot_bits",
        })?;
        let slot = self.layout.slot(index);
        let seq = slot.seq.load(Ordering::Relaxed);
        // A new life starts one ring further on: no entry of the old life can be taken for one of the new.
        let first = slot.first.load(Ordering::Relaxed).wrapping_add(RING);
        fence(Ordering::Release);
        slot.qpn.store(qp.qpn, Ordering::Relaxed);
        slot.pd.store(qp.pd, Ordering::Relaxed);
        slot.peer_qpn.store(qp.peer_qpn, Ordering::Relaxed);
        slot.first.store(first, Ordering::Relaxed);
        let flags = if qp.receives { RECEIVES } else { 0 };
        slot.flags.store(flags, Ordering::Relaxed);
        slot.seq.store(seq.wrapping_add(1), Ordering::Release);
        self.layout
            .attention()
            .changed
            .fetch_add(1, Ordering::Release);
        Ok((index, first))
    }

    fn close(&self, index: u32, next: u32) {
        let _one_writer = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = self.layout.slot(index);
        let seq = slot.seq.load(Ordering::Relaxed);
        if seq & 1 == 1 {
            slot.seq.store(seq.wrapping_add(1), Ordering::SeqCst);
            fence(Ordering::Release);
            slot.first.store(next, Ordering::Relaxed);
            self.layout
                .attention()
                .changed
                .fetch_add(1, Ordering::Release);
        }
    }
}

/// A QP shown to the peer, and the sending end of its ring. Dropping it withdraws the QP: requests of the
/// peer that target it fail from then on.
pub(crate) struct Outbox {
    mailbox: Arc<Mailbox>,
    slot: u32,
    next: u32,
    oldest: u32,
}

impl Outbox {
    /// Shows `qp` to the peer as ready.
    ///
    /// # Errors
    /// When it is shown already, or every slot is taken.
    pub(crate) fn open(mailbox: &Arc<Mailbox>, qp: SlotQp) -> Result<Self> {
        let (slot, first) = mailbox.open(qp)?;
        Ok(Self {
            mailbox: Arc::clone(mailbox),
            slot,
            next: first,
            oldest: first,
        })
    }

    /// Is there room for a request?
    pub(crate) fn has_room(&self) -> bool {
        self.next.wrapping_sub(self.oldest) < RING
    }

    /// Where the payload of the next request goes, if there is room for one.
    pub(crate) fn chunk(&self) -> Shared<u8> {
        self.mailbox.layout.chunk(self.slot, self.next)
    }

    /// Sends a request; `None` when [`RING`] requests are unanswered. The number is for [`Outbox::answer`].
    pub(crate) fn send(&mut self, request: &Request) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        let n = self.next;
        let e = &self.mailbox.layout.slot(self.slot).ring[(n % RING) as usize];
        e.opcode.store(request.opcode, Ordering::Relaxed);
        e.key.store(request.key, Ordering::Relaxed);
        e.addr.store(request.addr, Ordering::Relaxed);
        e.len_imm.store(
            u64::from(request.len) << 32 | u64::from(request.imm),
            Ordering::Relaxed,
        );
        for (word, value) in e.operands.iter().zip(request.operands) {
            word.store(value, Ordering::Relaxed);
        }
        e.status.store(0, Ordering::Relaxed);
        // Release: payload written before this request is visible to whoever takes it.
        e.state.store(2 * u64::from(n) + 1, Ordering::Release);
        self.mailbox
            .layout
            .attention()
            .posted
            .fetch_add(1, Ordering::Release);
        self.next = n.wrapping_add(1);
        Some(n)
    }

    /// The answer to the oldest unanswered request, once it is there.
    pub(crate) fn answer(&mut self) -> Option<(u32, Answer)> {
        if self.next == self.oldest {
            return None;
        }
        let n = self.oldest;
        let e = &self.mailbox.layout.slot(self.slot).ring[(n % RING) as usize];
        if e.state.load(Ordering::Acquire) != 2 * u64::from(n) + 2 {
            return None;
        }
        self.oldest = n.wrapping_add(1);
        Some((
            n,
            Answer {
                status: e.status.load(Ordering::Relaxed),
                result: e.result.load(Ordering::Relaxed),
            },
        ))
    }

    /// What the target said about the oldest unanswered request ([`Inbox::hint`]); 0: nothing.
    pub(crate) fn hint(&self) -> u32 {
        self.mailbox.layout.slot(self.slot).ring[(self.oldest % RING) as usize]
            .status
            .load(Ordering::Relaxed)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.mailbox.close(self.slot, self.next);
    }
}

/// The peer's mailbox.
pub(crate) struct MailboxView {
    _map: Mapping,
    layout: Layout,
}

impl MailboxView {
    /// Checks the header (read once) against the size of the mapping.
    ///
    /// # Errors
    /// [`RefusalCode::Layout`] when it is not one of ours.
    pub(crate) fn new(map: Mapping) -> Result<Self, Refusal> {
        // SAFETY: a mapping is page-aligned and at least one page long; the peer may write at any time, so the
        // header is read as a volatile copy of plain integers, for which every bit pattern is valid.
        let header: Header = unsafe { map.ptr().as_ptr().cast::<Header>().read_volatile() };
        let layout = |text: String| Refusal::new(RefusalCode::Layout, text);
        if header.magic != MAGIC || header.version != u32::from(VERSION) {
            return Err(layout(format!(
                "mailbox begins with \"{}\" version {}, this side reads \"{}\" version {VERSION}",
                header.magic.escape_ascii(),
                header.version,
                MAGIC.escape_ascii()
            )));
        }
        if header.slot_bits > MAX_SLOT_BITS || bytes_of(header.slot_bits) > map.len() {
            return Err(layout(format!(
                "mailbox of 2^{} slots does not fit in {} bytes",
                header.slot_bits,
                map.len()
            )));
        }
        // SAFETY: checked against the mapping, which is sealed and lives in the same value.
        let layout = unsafe { Layout::new(map.ptr().as_ptr(), header.slot_bits) };
        Ok(Self { _map: map, layout })
    }

    /// A word that grows with every request of the peer. Read it before looking for requests: when it has not
    /// changed since the last time, there are none.
    #[inline(always)]
    pub(crate) fn attention(&self) -> u64 {
        self.layout.attention().posted.load(Ordering::Acquire)
    }

    /// A word that changes whenever a QP of the peer comes or goes. Read it before [`MailboxView::find`].
    pub(crate) fn changes(&self) -> u64 {
        self.layout.attention().changed.load(Ordering::Acquire)
    }

    /// Finds the peer's QP `qpn`, if it is ready.
    pub(crate) fn find(self: &Arc<Self>, qpn: u32) -> Option<TargetQp> {
        (0..=self.layout.mask).find_map(|probe| {
            let slot = qpn.wrapping_add(probe) & self.layout.mask;
            let (seq, qp, first) = self.layout.read(slot)?;
            (qp.qpn == qpn).then(|| TargetQp {
                view: Arc::clone(self),
                slot,
                seq,
                qp,
                first,
            })
        })
    }
}

/// A QP of the peer, as it was found.
#[derive(Clone)]
pub(crate) struct TargetQp {
    view: Arc<MailboxView>,
    slot: u32,
    seq: u64,
    qp: SlotQp,
    first: u32,
}

impl TargetQp {
    /// Who it is.
    pub(crate) fn qp(&self) -> SlotQp {
        self.qp
    }

    /// Is the QP still ready, and connected as it was found? One load of a line that rarely changes.
    #[inline(always)]
    pub(crate) fn is_ready(&self) -> bool {
        self.view.layout.slot(self.slot).seq.load(Ordering::Acquire) == self.seq
    }

    /// The receiving end of its ring. Take it once.
    pub(crate) fn inbox(&self) -> Inbox {
        Inbox {
            target: self.clone(),
            next: self.first,
            oldest: self.first,
        }
    }
}

/// The receiving end of the ring of a QP of the peer.
pub(crate) struct Inbox {
    target: TargetQp,
    /// The request to be looked at.
    next: u32,
    /// The oldest that has not been answered.
    oldest: u32,
}

impl Inbox {
    fn entry(&self, n: u32) -> &Entry {
        &self.target.view.layout.slot(self.target.slot).ring[(n % RING) as usize]
    }

    /// The next request, if one waits; it stays until [`Inbox::accept`].
    pub(crate) fn request(&self) -> Option<Request> {
        let e = self.entry(self.next);
        if e.state.load(Ordering::Acquire) != 2 * u64::from(self.next) + 1 {
            return None;
        }
        let len_imm = e.len_imm.load(Ordering::Relaxed);
        Some(Request {
            opcode: e.opcode.load(Ordering::Relaxed),
            key: e.key.load(Ordering::Relaxed),
            addr: e.addr.load(Ordering::Relaxed),
            len: (len_imm >> 32) as u32,
            imm: len_imm as u32,
            operands: [
                e.operands[0].load(Ordering::Relaxed),
                e.operands[1].load(Ordering::Relaxed),
            ],
        })
    }

    /// Its payload, as long as it is not answered.
    pub(crate) fn chunk(&self) -> Shared<u8> {
        self.target.view.layout.chunk(self.target.slot, self.next)
    }

    /// Takes the request that [`Inbox::request`] showed; the next may be looked at.
    pub(crate) fn accept(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Tells the sender why its next request still waits ([`Outbox::hint`]).
    pub(crate) fn hint(&self, status: u32) {
        self.entry(self.next)
            .status
            .store(status, Ordering::Relaxed);
    }

    /// Answers the oldest request that was taken and not answered.
    pub(crate) fn reply(&mut self, answer: Answer) {
        if self.oldest == self.next {
            return;
        }
        let waiting = 2 * u64::from(self.oldest) + 1;
        let e = self.entry(self.oldest);
        e.status.store(answer.status, Ordering::Relaxed);
        e.result.store(answer.result, Ordering::Relaxed);
        // Not a plain store: the slot may have begun a new life meanwhile.
        let _ =
            e.state
                .compare_exchange(waiting, waiting + 1, Ordering::Release, Ordering::Relaxed);
        self.oldest = self.oldest.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests;
