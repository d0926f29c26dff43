//! Captures: every packet as a full Ethernet frame in a pcapng file that Wireshark dissects.
//!
//! A UDP socket shows neither frame nor IP header, so they are made up again: addresses and ports are true, hardware addresses are
//! invented from the IP addresses, and the IPv4 identification is the one that the ICRC was made with.
//!
//! A disk that is full ends the capture and nothing else: the file ends with a whole packet, a warning says why, and
//! [`PortCounters::capture_lost`] counts the packets that are not in it.
//! Format: <https://datatracker.ietf.org/doc/draft-ietf-opsawg-pcapng/>.

use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path as FilePath, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use doorbell_wire::roce::net::{
    ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ethernet, Ipv4, Ipv6, PROTOCOL_UDP, Udp, checksum,
};
use doorbell_wire::roce::{Bth, ICRC_LEN};

use super::pass_on;
use crate::Port;
use crate::arrived::RecvBatch;
use crate::batch::SendBatch;
use crate::counters::PortCounters;
use crate::describe::Description;
use crate::error::{PortError, Result};
use crate::icrc::FlowCrc;

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
const OPTION_COMMENT: u16 = 1;
const OPTION_APPLICATION: u16 = 4;
const OPTION_NAME: u16 = 2;
const OPTION_RESOLUTION: u16 = 9;
const OPTION_FLAGS: u16 = 2;

/// Bytes that are gathered before they are written.
const GATHER: usize = 256 << 10;

/// A port that writes what is sent and received to a file.
#[derive(Debug)]
pub struct Pcapng<P> {
    inner: P,
    /// `None`: the capture has ended.
    file: Option<File>,
    name: PathBuf,
    /// Whole blocks that are in the file, in bytes, and those that are to follow.
    written: u64,
    waiting: Vec<u8>,
    block: Vec<u8>,
    frame: Vec<u8>,
    /// Calls that found nothing since something was written.
    idle: u32,
    lost: u64,
}

/// A packet to be written.
struct Frame<'a> {
    src: SocketAddr,
    dst: SocketAddr,
    tos: u8,
    id: u16,
    bytes: &'a [u8],
    icrc: [u8; ICRC_LEN],
}

impl<P: Port> Pcapng<P> {
    /// Wraps a port; makes the file, or empties it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(inner: P, name: &FilePath) -> Result<Self> {
        let file = crate::output::create(name).map_err(|e| {
            let name = name.display();
            PortError::system(
                format!("making the capture file (give one that can be written) {name}"),
                e,
            )
        })?;
        let mut this = Self {
            file: Some(file),
            name: name.to_owned(),
            written: 0,
            waiting: Vec::with_capacity(GATHER + (16 << 10)),
            block: Vec::with_capacity(8 << 10),
            frame: Vec::with_capacity(8 << 10),
            idle: 0,
            lost: 0,
            inner,
        };
        let process = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let comment = format!("process {} ({})", std::process::id(), process.trim());
        this.block.extend_from_slice(&0x1a2b_3c4du32.to_le_bytes());
        this.block.extend_from_slice(&[1, 0, 0, 0]);
        this.block.extend_from_slice(&u64::MAX.to_le_bytes());
        this.option(
            OPTION_APPLICATION,
            concat!("doorbell ", env!("CARGO_PKG_VERSION")).as_bytes(),
        );
        this.option(OPTION_COMMENT, comment.as_bytes());
        this.option(0, &[]);
        let title = this.inner.describe().title;
        this.add_block(SECTION);
        // Ethernet, no limit of length, times in nanoseconds.
        this.block.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        this.option(OPTION_NAME, title.as_bytes());
        this.option(OPTION_RESOLUTION, &[9]);
        this.option(0, &[]);
        this.add_block(INTERFACE);
        this.put().map_err(|e| {
            PortError::system(format!("writing the capture file {}", name.display()), e)
        })?;
        Ok(this)
    }

    fn option(&mut self, kind: u16, value: &[u8]) {
        self.block.extend_from_slice(&kind.to_le_bytes());
        self.block
            .extend_from_slice(&(value.len() as u16).to_le_bytes());
        self.block.extend_from_slice(value);
        self.pad();
    }

    fn pad(&mut self) {
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    /// Ends the block that was made up.
    fn add_block(&mut self, kind: u32) {
        let len = (self.block.len() as u32 + 12).to_le_bytes();
        self.waiting.extend_from_slice(&kind.to_le_bytes());
        self.waiting.extend_from_slice(&len);
        self.waiting.append(&mut self.block);
        self.waiting.extend_from_slice(&len);
        self.idle = 0;
    }

    fn write(&mut self, time: u64, sent: bool, packet: &Frame<'_>) {
        if self.file.is_none() {
            self.lost += 1;
            return;
        }
        self.frame.clear();
        make_frame(&mut self.frame, packet);
        let len = (self.frame.len() as u32).to_le_bytes();
        self.block.extend_from_slice(&[0; 4]);
        self.block
            .extend_from_slice(&((time >> 32) as u32).to_le_bytes());
        self.block.extend_from_slice(&(time as u32).to_le_bytes());
        self.block.extend_from_slice(&len);
        self.block.extend_from_slice(&len);
        self.block.extend_from_slice(&self.frame);
        self.pad();
        self.option(OPTION_FLAGS, &(1 + u32::from(sent)).to_le_bytes());
        if let Some(base) = packet.bytes.first_chunk() {
            let comment = format!(
                "process {} {} queue pair {:#08x}",
                std::process::id(),
                if sent { "sent to" } else { "received for" },
                Bth::parse(base).dest_qp
            );
            self.option(OPTION_COMMENT, comment.as_bytes());
        }
        self.option(0, &[]);
        self.add_block(PACKET);
        if self.waiting.len() >= GATHER {
            self.flush();
        }
    }
}

impl<P> Pcapng<P> {
    /// Writes what was gathered.
    fn put(&mut self) -> std::io::Result<()> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.write_all(&self.waiting)?;
        self.written += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }

    /// As [`Self::put`]; if it fails, the capture ends.
    fn flush(&mut self) {
        let Err(error) = self.put() else { return };
        let Some(file) = self.file.take() else { return };
        // A part of what was gathered may be in the file: the whole blocks of it stay. Pipes and devices have no length.
        let there = file.metadata().map_or(0, |m| m.len());
        let (mut end, mut rest) = (self.written, &self.waiting[..]);
        while let Some([kind, len]) = two_words(rest) {
            rest = &rest[len as usize..];
            end += u64::from(len);
            match end <= there {
                true => self.written = end,
                false => self.lost += u64::from(kind == PACKET),
            }
        }
        let _ = file.set_len(self.written);
        self.waiting = Vec::new();
        tracing::warn!(
            "the capture {} has ended, the transfer goes on: {error}; make room, or capture less (--iters, --secs)",
            self.name.display()
        );
    }
}

impl<P> Drop for Pcapng<P> {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Kind and length of the block at the beginning.
fn two_words(bytes: &[u8]) -> Option<[u32; 2]> {
    let words = bytes.first_chunk::<8>()?.as_chunks::<4>().0;
    Some([u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1])])
}

/// Ethernet, IP and UDP headers around a packet.
fn make_frame(frame: &mut Vec<u8>, packet: &Frame<'_>) {
    let udp_payload = (packet.bytes.len() + ICRC_LEN) as u16;
    let mac = |ip: IpAddr| {
        let tail = match ip {
            IpAddr::V4(v4) => v4.octets(),
            IpAddr::V6(v6) => {
                let o = v6.octets();
                [o[12], o[13], o[14], o[15]]
            }
        };
        [2, 0, tail[0], tail[1], tail[2], tail[3]]
    };
    let ethernet = |ethertype| Ethernet {
        dst: mac(packet.dst.ip()),
        src: mac(packet.src.ip()),
        ethertype,
    };
    let mut udp = Udp {
        src: packet.src.port(),
        dst: packet.dst.port(),
        checksum: 0,
    };
    match (packet.src.ip(), packet.dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            frame.extend_from_slice(&ethernet(ETHERTYPE_IPV4).emit());
            let ip = Ipv4 {
                tos: packet.tos,
                id: packet.id,
                src: src.octets(),
                dst: dst.octets(),
                ..Ipv4::default()
            };
            frame.extend_from_slice(&ip.emit(udp_payload + 8));
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            frame.extend_from_slice(&ethernet(ETHERTYPE_IPV6).emit());
            let ip = Ipv6 {
                traffic_class: packet.tos,
                next_header: PROTOCOL_UDP,
                src: src.octets(),
                dst: dst.octets(),
                ..Ipv6::default()
            };
            frame.extend_from_slice(&ip.emit(udp_payload + 8));
            // Over IPv6 a dissector wants a UDP checksum.
            let mut sum = ip.pseudo_sum(u32::from(udp_payload) + 8);
            let mut whole = udp.emit(udp_payload).to_vec();
            whole.extend_from_slice(packet.bytes);
            whole.extend_from_slice(&packet.icrc);
            sum = u32::from(checksum(sum, &whole));
            udp.checksum = if sum == 0 { 0xffff } else { sum as u16 };
        }
        // A port has one family.
        _ => return,
    }
    frame.extend_from_slice(&udp.emit(udp_payload));
    frame.extend_from_slice(packet.bytes);
    frame.extend_from_slice(&packet.icrc);
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as u64)
}

impl<P: Port> Port for Pcapng<P> {
    pass_on!();

    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        // The time before sending, so that an answer never stands before its question.
        let time = now();
        let waiting: Vec<_> = batch
            .iter()
            .map(|p| (*p.path, p.id, p.bytes.to_vec(), p.icrc))
            .collect();
        let sent = self.inner.send(batch)?;
        for (path, id, bytes, icrc) in waiting.into_iter().take(sent) {
            let frame = Frame {
                src: path.local,
                dst: path.peer,
                tos: path.tos,
                id,
                bytes: &bytes,
                icrc,
            };
            self.write(time, true, &frame);
        }
        Ok(sent)
    }

    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        let came = self.inner.recv(batch)?;
        if came == 0 {
            // Whoever looks at the file while it grows should see the end of a burst.
            self.idle = self.idle.saturating_add(1);
            if self.idle == 64 && !self.waiting.is_empty() {
                self.flush();
            }
            return Ok(0);
        }
        let time = now();
        let local = self.inner.local_addr();
        for packet in batch.iter() {
            let dst = SocketAddr::new(packet.dst, local.port());
            let icrc = FlowCrc::new(packet.src, dst).compute(packet.id, packet.bytes);
            let frame = Frame {
                src: packet.src,
                dst,
                tos: packet.tos,
                id: packet.id,
                bytes: packet.bytes,
                icrc: icrc.to_le_bytes(),
            };
            self.write(time, false, &frame);
        }
        Ok(came)
    }

    fn next_due(&self) -> Option<std::time::Instant> {
        self.inner.next_due()
    }

    fn counters(&self) -> PortCounters {
        let mut counters = self.inner.counters();
        counters.capture_lost += self.lost;
        counters
    }

    fn describe(&self) -> Description {
        let mut description = self.inner.describe();
        description.choices.push((
            "capture",
            format!(
                "{} (pcapng, whole frames, both directions)",
                self.name.display()
            ),
        ));
        description
    }
}
