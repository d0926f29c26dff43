//! Extension headers (volume 1, 9.3): what an opcode carries between the base header and the payload.

use core::fmt;

use super::{be32, be64};

/// RDMA extended transport header: where a WRITE goes, or what a READ asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address at the responder.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub len: u32,
}

impl Reth {
    pub(super) const LEN: usize = 16;

    pub(super) fn parse(bytes: &[u8]) -> Self {
        Self {
            va: be64(bytes, 0),
            rkey: be32(bytes, 8),
            len: be32(bytes, 12),
        }
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
    }
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Virtual address at the responder; a multiple of 8.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// COMPARE_SWAP: the new value. FETCH_ADD: what to add.
    pub swap_add: u64,
    /// COMPARE_SWAP: the value to compare with. FETCH_ADD: not used.
    pub compare: u64,
}

impl AtomicEth {
    pub(super) const LEN: usize = 28;

    pub(super) fn parse(bytes: &[u8]) -> Self {
        Self {
            va: be64(bytes, 0),
            rkey: be32(bytes, 8),
            swap_add: be64(bytes, 12),
            compare: be64(bytes, 20),
        }
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..20].copy_from_slice(&self.swap_add.to_be_bytes());
        out[20..28].copy_from_slice(&self.compare.to_be_bytes());
    }
}

/// Why a responder refuses (volume 1, table 46).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NakCode {
    /// A packet is missing: send again from the PSN of this NAK.
    PsnSequence,
    /// The request is malformed, or not allowed on this QP.
    InvalidRequest,
    /// The key does not cover the memory, or not with this access.
    RemoteAccess,
    /// The responder could not carry it out.
    RemoteOperational,
    /// The reliable datagram is invalid; not raised here.
    InvalidRd,
    /// A reserved code.
    Reserved(u8),
}

impl NakCode {
    const fn from_raw(code: u8) -> Self {
        match code {
            0 => Self::PsnSequence,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccess,
            3 => Self::RemoteOperational,
            4 => Self::InvalidRd,
            code => Self::Reserved(code),
        }
    }

    const fn raw(self) -> u8 {
        match self {
            Self::PsnSequence => 0,
            Self::InvalidRequest => 1,
            Self::RemoteAccess => 2,
            Self::RemoteOperational => 3,
            Self::InvalidRd => 4,
            Self::Reserved(code) => code & 0x1f,
        }
    }
}

impl fmt::Display for NakCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PsnSequence => f.write_str("PSN sequence error"),
            Self::InvalidRequest => f.write_str("invalid request"),
            Self::RemoteAccess => f.write_str("remote access error"),
            Self::RemoteOperational => f.write_str("remote operational error"),
            Self::InvalidRd => f.write_str("invalid RD request"),
            Self::Reserved(code) => write!(f, "reserved NAK code {code}"),
        }
    }
}

/// What an acknowledgement says: bits 7:5 of the syndrome, and the five below them (volume 1, 9.7.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AethKind {
    /// Everything up to the packet's PSN arrived. 31: no end-to-end credits.
    Ack {
        /// Encoded credit count.
        credit: u8,
    },
    /// No receive is posted: try again after the time of [`rnr_timer_ns`].
    RnrNak {
        /// Encoded time, five bits.
        timer: u8,
    },
    /// Refused.
    Nak(NakCode),
    /// Bits 7:5 are reserved (2), or the value is.
    Reserved(u8),
}

/// Acknowledge extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Acknowledged or not.
    pub kind: AethKind,
    /// Message sequence number: messages completed by the responder, 24 bits.
    pub msn: u32,
}

impl Aeth {
    pub(super) const LEN: usize = 4;
    /// "No credits are kept", the credit count that everybody here sends.
    pub const NO_CREDITS: u8 = 31;

    pub(super) fn parse(bytes: &[u8]) -> Self {
        let value = be32(bytes, 0);
        let low = (value >> 24 & 0x1f) as u8;
        Self {
            kind: match value >> 29 {
                0 => AethKind::Ack { credit: low },
                1 => AethKind::RnrNak { timer: low },
                3 => AethKind::Nak(NakCode::from_raw(low)),
                _ => AethKind::Reserved((value >> 24) as u8),
            },
            msn: value & 0xff_ffff,
        }
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        let syndrome = match self.kind {
            AethKind::Ack { credit } => credit & 0x1f,
            AethKind::RnrNak { timer } => 0x20 | timer & 0x1f,
            AethKind::Nak(code) => 0x60 | code.raw(),
            AethKind::Reserved(syndrome) => syndrome,
        };
        out[..4].copy_from_slice(&(u32::from(syndrome) << 24 | self.msn & 0xff_ffff).to_be_bytes());
    }
}

/// RNR NAK timer codes in units of 10 µs (volume 1, table 45).
const RNR_TIMER_10US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The time that an RNR NAK asks to wait, ns: 10 µs to 655.36 ms; code 0 is the longest.
pub const fn rnr_timer_ns(code: u8) -> u64 {
    RNR_TIMER_10US[(code & 0x1f) as usize] as u64 * 10_000
}

/// The shortest code that waits at least `ns`.
pub const fn rnr_timer_code(ns: u64) -> u8 {
    let mut code = 1;
    while code < 32 {
        if rnr_timer_ns(code) >= ns {
            return code;
        }
        code += 1;
    }
    0
}

/// The extension headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ext {
    /// None: the middle of a message, or a SEND.
    None,
    /// First or only packet of a WRITE, or a READ request.
    Reth(Reth),
    /// WRITE with immediate in one packet.
    RethImm(Reth, u32),
    /// The last packet of a message with immediate.
    Imm(u32),
    /// An acknowledgement, or the first or last packet of a READ's answer.
    Aeth(Aeth),
    /// The answer to an atomic: the value before it.
    AtomicAck(Aeth, u64),
    /// An atomic.
    Atomic(AtomicEth),
    /// A congestion notification: 16 reserved bytes.
    Cnp,
}

impl Ext {
    /// Bytes on the wire.
    pub const fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Reth(_) => Reth::LEN,
            Self::RethImm(..) => Reth::LEN + 4,
            Self::Imm(_) => 4,
            Self::Aeth(_) => Aeth::LEN,
            Self::AtomicAck(..) => Aeth::LEN + 8,
            Self::Atomic(_) => AtomicEth::LEN,
            Self::Cnp => 16,
        }
    }

    /// Is there none?
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The immediate, if there is one. Four bytes in their order on the wire, read as a big-endian number.
    pub const fn imm(&self) -> Option<u32> {
        match self {
            Self::Imm(imm) | Self::RethImm(_, imm) => Some(*imm),
            _ => None,
        }
    }

    /// The RDMA header, if there is one.
    pub const fn reth(&self) -> Option<&Reth> {
        match self {
            Self::Reth(reth) | Self::RethImm(reth, _) => Some(reth),
            _ => None,
        }
    }

    /// The acknowledgement, if there is one.
    pub const fn aeth(&self) -> Option<&Aeth> {
        match self {
            Self::Aeth(aeth) | Self::AtomicAck(aeth, _) => Some(aeth),
            _ => None,
        }
    }
}
