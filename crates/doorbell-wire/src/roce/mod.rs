//! RoCEv2 packets: InfiniBand transport headers behind UDP port 4791, and the checksum over them.
//!
//! What follows the UDP header is a *base transport header* ([`Bth`]), the extension headers that its opcode calls for ([`Ext`]), payload,
//! up to three bytes of padding, and the invariant CRC ([`icrc`]). [`Packet::parse`] reads everything before the CRC, [`Header::emit`] writes
//! everything before the payload. [`net`] has the headers below, for ports that make whole frames.
//!
//! Sources: InfiniBand Architecture Specification volume 1, chapter 9 (headers 9.2 and 9.3, PSN 9.7), annex A17 (RoCEv2). All fields are
//! big-endian on the wire, except the CRC, which goes least significant byte first.

mod bth;
mod ext;
pub mod icrc;
pub mod net;
mod opcode;
mod packet;
mod psn;

pub use bth::Bth;
pub use ext::{Aeth, AethKind, AtomicEth, Ext, NakCode, Reth, rnr_timer_code, rnr_timer_ns};
pub use opcode::{Kind, Opcode, Place, Transport};
pub use packet::{Header, MAX_HEADER, Packet, PacketError};
pub use psn::Psn;

/// The UDP destination port of RoCEv2 (annex A17.3).
pub const PORT: u16 = 4791;

/// The partition key that every Ethernet port has, full membership.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Bytes of the invariant CRC at the end of each packet.
pub const ICRC_LEN: usize = 4;

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
