//! What two engines say to each other over SRD: a head of 80 bytes, and behind it a part of a SEND or the results of an answer.
//!
//! ```text
//!  0 kind   1 version   2 flags    3 width, or an answer's syndrome and (byte 44) vendor syndrome
//!  4 token (4)                     the number that the receiver expects of this connection
//!  8 sequence (8)                  of the request; of an answer: the first that it answers
//! 16 address (8)   24 key (4)   28 immediate (4)   32 bytes of the message (4)   36 where this part is in it (4)
//! 40 bytes, or results, behind the head (4)   48 operands (4 x 8)
//! ```
//! All little-endian. Both sides are Doorbells of one endpoint version; a head of another version ends the connection.

use doorbell_wire::{Syndrome, Vendor, Width};

use crate::verbs::HEAD;

/// The version of this format.
const VERSION: u8 = 1;
/// There is an immediate.
const IMMEDIATE: u8 = 1;
/// The request behind the results failed.
const FAILED: u8 = 2;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// The first: this side can answer.
    Hello = 1,
    /// A part of a SEND.
    Send = 2,
    /// The end of a WRITE with immediate.
    Immediate = 3,
    /// Operands: what to add, and where carries end.
    Add = 4,
    /// Operands: the new value, the one compared with, and the masks of both.
    Swap = 5,
    /// Requests were carried out, in order.
    Answer = 6,
}

impl Kind {
    fn parse(raw: u8) -> Option<Self> {
        [
            Self::Hello,
            Self::Send,
            Self::Immediate,
            Self::Add,
            Self::Swap,
            Self::Answer,
        ]
        .into_iter()
        .find(|k| *k as u8 == raw)
    }
}

/// A head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) token: u32,
    pub(super) seq: u64,
    pub(super) addr: u64,
    pub(super) rkey: u32,
    pub(super) imm: Option<u32>,
    pub(super) total: u32,
    pub(super) offset: u32,
    pub(super) count: u32,
    pub(super) width: Width,
    pub(super) operands: [u64; 4],
    /// Of an answer: what became of the request behind those that succeeded.
    pub(super) failed: Option<(Syndrome, Vendor)>,
}

impl Head {
    pub(super) fn new(kind: Kind, token: u32, seq: u64) -> Self {
        Self {
            kind,
            token,
            seq,
            addr: 0,
            rkey: 0,
            imm: None,
            total: 0,
            offset: 0,
            count: 0,
            width: Width::Eight,
            operands: [0; 4],
            failed: None,
        }
    }

    pub(super) fn encode(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let imm = if self.imm.is_some() { IMMEDIATE } else { 0 };
        let failed = if self.failed.is_some() { FAILED } else { 0 };
        let (syndrome, vendor) = self.failed.unwrap_or((Syndrome(0), Vendor(0)));
        let third = match self.kind {
            Kind::Answer => syndrome.0,
            _ => self.width.bytes() as u8,
        };
        put(0, &[self.kind as u8, VERSION, imm | failed, third]);
        put(4, &self.token.to_le_bytes());
        put(8, &self.seq.to_le_bytes());
        put(16, &self.addr.to_le_bytes());
        put(24, &self.rkey.to_le_bytes());
        put(28, &self.imm.unwrap_or(0).to_le_bytes());
        put(32, &self.total.to_le_bytes());
        put(36, &self.offset.to_le_bytes());
        put(40, &self.count.to_le_bytes());
        put(44, &[vendor.0]);
        for (i, operand) in self.operands.iter().enumerate() {
            put(48 + 8 * i, &operand.to_le_bytes());
        }
        out
    }

    /// Reads one, and what is behind it. `None`: it is none of this version.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let u32_at = |at: usize| {
            let bytes = head[at..].first_chunk::<4>().copied();
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let u64_at = |at: usize| {
            let bytes = head[at..].first_chunk::<8>().copied();
            u64::from_le_bytes(bytes.unwrap_or_default())
        };
        let kind = Kind::parse(head[0]).filter(|_| head[1] == VERSION)?;
        let flags = head[2];
        let answer = kind == Kind::Answer;
        let width = match head[3] {
            _ if answer => Width::Eight,
            4 => Width::Four,
            8 => Width::Eight,
            _ => return None,
        };
        let failed = answer && flags & FAILED != 0;
        Some((
            Self {
                kind,
                token: u32_at(4),
                seq: u64_at(8),
                addr: u64_at(16),
                rkey: u32_at(24),
                imm: (flags & IMMEDIATE != 0).then(|| u32_at(28)),
                total: u32_at(32),
                offset: u32_at(36),
                count: u32_at(40),
                width,
                operands: core::array::from_fn(|i| u64_at(48 + 8 * i)),
                failed: failed.then_some((Syndrome(head[3]), Vendor(head[44]))),
            },
            rest,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_as_they_were_and_others_do_not() {
        let mut head = Head::new(Kind::Swap, 0xabcdef, 1 << 40);
        (head.addr, head.rkey, head.width) = (0x1234_5678_9abc_def0, 7, Width::Four);
        (head.imm, head.total, head.offset, head.count) = (Some(9), 10_000, 4096, 4096);
        head.operands = [1, u64::MAX, 3, 4];
        let mut bytes = head.encode().to_vec();
        bytes.extend_from_slice(b"tail");
        assert_eq!(Head::parse(&bytes), Some((head, &b"tail"[..])));
        let mut answer = Head::new(Kind::Answer, 1, 2);
        answer.failed = Some((Syndrome::REMOTE_ACCESS, Vendor::BAD_RKEY));
        answer.count = 3;
        let parsed = Head::parse(&answer.encode()).map(|(h, _)| h);
        assert_eq!(parsed, Some(answer));
        for (at, value) in [(0, 0), (0, 7), (1, 2), (3, 5)] {
            let mut bad = head.encode();
            bad[at] = value;
            assert_eq!(Head::parse(&bad), None, "byte {at}");
        }
        assert_eq!(Head::parse(&[0; HEAD - 1]), None);
    }
}
