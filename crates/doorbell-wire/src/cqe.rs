//! Completion queue entries: 64 bytes, of which pollers mostly read the last four.
//!
//! Layout (rdma-core `mlx5_cqe64`, `mlx5_err_cqe`): be32 immediate @36, be32 byte count @44, be32 `opcode << 24 | qpn` @56,
//! be16 WQE counter @60, signature @62, `kind << 4 | owner` @63; in an error CQE also vendor syndrome @54 and syndrome @55.
//! Whoever writes a CQE stores the last chunk, or at least its last word, after everything else is visible.

use crate::{Chunk, Qpn, Syndrome, Vendor};

/// What a CQE reports: the high four bits of its last byte (rdma-core `MLX5_CQE_*`).
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A send WQE completed (`MLX5_CQE_REQ`).
    Requester = 0,
    /// A receive was consumed by RDMA WRITE with immediate.
    ResponderWriteImm = 1,
    /// A receive was consumed by SEND.
    ResponderSend = 2,
    /// A receive was consumed by SEND with immediate.
    ResponderSendImm = 3,
    /// A receive was consumed by SEND with invalidate.
    ResponderSendInval = 4,
    /// The CQ was resized.
    Resize = 5,
    /// Signature error.
    SignatureError = 12,
    /// A send WQE failed: read it as [`ErrorCqe`].
    RequesterError = 13,
    /// A receive failed: read it as [`ErrorCqe`].
    ResponderError = 14,
    /// Not written by the device yet.
    Invalid = 15,
}

impl Kind {
    /// The kind of a four-bit code (higher bits are ignored); codes that mean nothing are `None`.
    #[inline(always)]
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code & 0xf {
            0 => Self::Requester,
            1 => Self::ResponderWriteImm,
            2 => Self::ResponderSend,
            3 => Self::ResponderSendImm,
            4 => Self::ResponderSendInval,
            5 => Self::Resize,
            12 => Self::SignatureError,
            13 => Self::RequesterError,
            14 => Self::ResponderError,
            15 => Self::Invalid,
            _ => return None,
        })
    }

    /// Requester or responder error.
    #[inline(always)]
    #[must_use]
    pub const fn is_error(self) -> bool {
        matches!(self, Self::RequesterError | Self::ResponderError)
    }
}

/// The owner bit of CQE number `index` in a CQ of `2^log_size` entries: it flips with every lap.
#[inline(always)]
#[must_use]
pub const fn owner(index: u64, log_size: u32) -> u8 {
    (index >> (log_size & 63)) as u8 & 1
}

/// The last byte of a CQE.
#[inline(always)]
#[must_use]
pub const fn op_own(kind: Kind, owner: u8) -> u8 {
    (kind as u8) << 4 | (owner & 1)
}

/// Bytes 60 to 63 of a CQE as one native word: what a poller loads and what a producer stores last.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CqeTail(pub u32);

impl CqeTail {
    /// A tail with signature 0.
    #[inline(always)]
    #[must_use]
    pub const fn new(wqe_counter: u16, kind: Kind, owner: u8) -> Self {
        Self(wqe_counter.swap_bytes() as u32 | (op_own(kind, owner) as u32) << 24)
    }

    /// What an entry holds before the device's first lap. Pollers of a per-slot CQ expect owner bit 1 there (0xf1), those of a collapsed
    /// CQ only look at the kind (0xf0).
    #[inline(always)]
    #[must_use]
    pub const fn initial(owner: u8) -> Self {
        Self::new(0, Kind::Invalid, owner)
    }

    /// The tail of a CQE's last chunk.
    #[inline(always)]
    #[must_use]
    pub const fn of(last: Chunk) -> Self {
        Self(last.word(3))
    }

    /// Index of the completed WQE's first slot, 16 bits.
    #[inline(always)]
    #[must_use]
    pub const fn wqe_counter(self) -> u16 {
        (self.0 as u16).swap_bytes()
    }

    /// The signature byte.
    #[inline(always)]
    #[must_use]
    pub const fn signature(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// The last byte: kind and owner.
    #[inline(always)]
    #[must_use]
    pub const fn op_own(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// The owner bit.
    #[inline(always)]
    #[must_use]
    pub const fn owner(self) -> u8 {
        self.op_own() & 1
    }

    /// The four-bit code of the kind.
    #[inline(always)]
    #[must_use]
    pub const fn code(self) -> u8 {
        self.op_own() >> 4
    }

    /// The kind, if the code means anything.
    #[inline(always)]
    #[must_use]
    pub const fn kind(self) -> Option<Kind> {
        Kind::from_code(self.code())
    }

    /// Whether the code is an error: requester (13) or responder (14).
    #[inline(always)]
    #[must_use]
    pub const fn is_error(self) -> bool {
        // 13 and 14 are neighbours, so one subtraction decides.
        self.code().wrapping_sub(Kind::RequesterError as u8) <= 1
    }

    /// Whether the entry has not been written by the device.
    #[inline(always)]
    #[must_use]
    pub const fn is_invalid(self) -> bool {
        self.code() == Kind::Invalid as u8
    }
}

impl core::fmt::Debug for CqeTail {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "CqeTail {{ counter: {}, code: {}, owner: {} }}",
            self.wqe_counter(),
            self.code(),
            self.owner()
        )
    }
}

/// The CQE of a send WQE that succeeded. `opcode` is the WQE's opcode byte, `byte_cnt` the bytes moved.
#[inline(always)]
#[must_use]
pub const fn ok_chunks(
    qpn: Qpn,
    opcode: u8,
    wqe_counter: u16,
    owner: u8,
    byte_cnt: u32,
) -> [Chunk; 4] {
    let tail = CqeTail::new(wqe_counter, Kind::Requester, owner);
    build(0, byte_cnt, 0, qpn, opcode, tail)
}

/// The CQE of a receive. `wqe_counter` is the receive's index; `kind` one of the responder kinds; `imm` is 0 for those without.
#[inline(always)]
#[must_use]
pub const fn recv_chunks(
    kind: Kind,
    qpn: Qpn,
    wqe_counter: u16,
    owner: u8,
    byte_cnt: u32,
    imm: u32,
) -> [Chunk; 4] {
    build(
        imm,
        byte_cnt,
        0,
        qpn,
        0,
        CqeTail::new(wqe_counter, kind, owner),
    )
}

/// An error CQE. `kind` says whose side failed: [`Kind::RequesterError`] or [`Kind::ResponderError`]; `opcode` is the failed WQE's opcode byte.
#[inline(always)]
#[must_use]
pub const fn error_chunks(
    kind: Kind,
    qpn: Qpn,
    opcode: u8,
    wqe_counter: u16,
    owner: u8,
    syndrome: Syndrome,
    vendor: Vendor,
) -> [Chunk; 4] {
    let why = (vendor.0 as u32) << 8 | syndrome.0 as u32;
    build(
        0,
        0,
        why,
        qpn,
        opcode,
        CqeTail::new(wqe_counter, kind, owner),
    )
}

/// `why` is the be32 at byte 52: in an error CQE `vendor << 8 | syndrome`, else the low half of a timestamp that we do not have.
#[inline(always)]
const fn build(
    imm: u32,
    byte_cnt: u32,
    why: u32,
    qpn: Qpn,
    opcode: u8,
    tail: CqeTail,
) -> [Chunk; 4] {
    let sop_qpn = (opcode as u32) << 24 | qpn.get();
    [
        Chunk::ZERO,
        Chunk::ZERO,
        Chunk::from_be32(0, imm, 0, byte_cnt),
        Chunk::from_words(0, why.swap_bytes(), sop_qpn.swap_bytes(), tail.0),
    ]
}

/// A CQE read back. Reading cannot fail; whether the entry is new is the caller's question to [`CqeTail`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cqe {
    /// Kind and owner, counter.
    pub tail: CqeTail,
    /// QP number.
    pub qpn: Qpn,
    /// Opcode byte of the completed send WQE (0 for receives).
    pub opcode: u8,
    /// Bytes moved.
    pub byte_cnt: u32,
    /// Immediate data, where the kind has one.
    pub imm: u32,
}

impl Cqe {
    /// Reads 64 bytes.
    #[inline(always)]
    #[must_use]
    pub const fn parse(chunks: &[Chunk; 4]) -> Self {
        let sop_qpn = chunks[3].be32(2);
        Self {
            tail: CqeTail::of(chunks[3]),
            qpn: Qpn::truncate(sop_qpn),
            opcode: (sop_qpn >> 24) as u8,
            byte_cnt: chunks[2].be32(3),
            imm: chunks[2].be32(1),
        }
    }
}

/// An error CQE read back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ErrorCqe {
    /// Whose side failed, and the owner bit; the counter is the failed WQE's index.
    pub tail: CqeTail,
    /// QP number.
    pub qpn: Qpn,
    /// Opcode byte of the failed WQE.
    pub opcode: u8,
    /// What failed.
    pub syndrome: Syndrome,
    /// Why, in the device's own terms.
    pub vendor: Vendor,
}

impl ErrorCqe {
    /// `None` unless the entry is an error.
    #[inline(always)]
    #[must_use]
    pub const fn parse(chunks: &[Chunk; 4]) -> Option<Self> {
        Self::parse_last(chunks[3])
    }

    /// [`ErrorCqe::parse`] from the last 16 bytes, which hold everything: one 16-byte load.
    #[inline(always)]
    #[must_use]
    pub const fn parse_last(last: Chunk) -> Option<Self> {
        let tail = CqeTail::of(last);
        if !tail.is_error() {
            return None;
        }
        let (why, sop_qpn) = (last.be32(1), last.be32(2));
        Some(Self {
            tail,
            qpn: Qpn::truncate(sop_qpn),
            opcode: (sop_qpn >> 24) as u8,
            syndrome: Syndrome(why as u8),
            vendor: Vendor((why >> 8) as u8),
        })
    }
}
