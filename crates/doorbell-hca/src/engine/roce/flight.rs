//! WQEs of one QP that were handed to its connection and are not complete: where their bytes are, and what their CQEs need.
//! Complete in order; a WQE without packets (NOP, WAIT, DUMP) takes its place behind those before it.

use std::collections::VecDeque;

use doorbell_wire::{Ctrl, Local};

/// WQEs of one QP under way at most.
pub(super) const LIMIT: usize = 4096;
/// Inline payloads up to this size need no allocation.
const SMALL: usize = 48;

/// Where the bytes of a message are, or go to.
#[derive(Clone, Debug)]
pub(in crate::engine) enum Bytes {
    /// None.
    Nothing,
    /// One piece of local memory.
    One(Local),
    /// Several.
    Many(Box<[Local]>),
    /// In the WQE, copied from it: the ring's slot may be reused before they are sent again.
    Small(u8, [u8; SMALL]),
    /// The same, larger.
    Inline(Box<[u8]>),
}

impl Bytes {
    pub(super) fn inline(len: usize, bytes: impl Iterator<Item = u8>) -> Self {
        if len <= SMALL {
            let mut small = [0; SMALL];
            for (to, from) in small.iter_mut().zip(bytes) {
                *to = from;
            }
            Self::Small(len as u8, small)
        } else {
            Self::Inline(bytes.collect())
        }
    }

    /// The bytes of an inline payload.
    pub(super) fn as_inline(&self) -> Option<&[u8]> {
        match self {
            Self::Small(len, bytes) => bytes.get(..usize::from(*len)),
            Self::Inline(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Pieces of local memory.
    pub(super) fn pieces(&self) -> &[Local] {
        match self {
            Self::One(one) => core::slice::from_ref(one),
            Self::Many(many) => many,
            _ => &[],
        }
    }
}

/// A WQE under way.
#[derive(Clone, Debug)]
pub(in crate::engine) struct InFlight {
    /// Its first slot, which is also its message's token.
    pub(in crate::engine) at: u64,
    pub(in crate::engine) ctrl: Ctrl,
    pub(in crate::engine) byte_cnt: u32,
    pub(in crate::engine) bytes: Bytes,
    /// Nothing of it is sent.
    pub(in crate::engine) local: bool,
    /// Its bytes are sent, not what comes back.
    pub(in crate::engine) source: bool,
}

impl InFlight {
    /// One whose bytes others look after.
    #[inline(always)]
    pub(in crate::engine) fn elsewhere(at: u64, ctrl: Ctrl, byte_cnt: u32) -> Self {
        Self {
            at,
            ctrl,
            byte_cnt,
            bytes: Bytes::Nothing,
            local: false,
            source: true,
        }
    }
}

/// WQEs under way, oldest first.
#[derive(Debug, Default)]
pub(in crate::engine) struct Flight {
    queue: VecDeque<InFlight>,
}

impl Flight {
    #[inline]
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[inline]
    pub(in crate::engine) fn is_full(&self) -> bool {
        self.room() == 0
    }

    /// WQEs that may still be pushed.
    #[inline]
    pub(in crate::engine) fn room(&self) -> u64 {
        LIMIT.saturating_sub(self.queue.len()) as u64
    }

    /// First slot of the oldest.
    #[inline]
    pub(in crate::engine) fn oldest(&self) -> Option<u64> {
        self.queue.front().map(|f| f.at)
    }

    pub(super) fn front(&self) -> Option<&InFlight> {
        self.queue.front()
    }

    #[inline]
    pub(in crate::engine) fn push(&mut self, one: InFlight) {
        self.queue.push_back(one);
    }

    /// The message of this token, if it is under way.
    #[inline]
    pub(super) fn find(&self, token: u64) -> Option<&InFlight> {
        let at = self.queue.partition_point(|f| f.at < token);
        self.queue.get(at).filter(|f| f.at == token)
    }

    /// The first bytes in local memory that are to be sent from byte `offset` of that message, or of a later one, on: of which message, where
    /// (as far as its piece goes), and where in the message.
    pub(super) fn source_from(&self, token: u64, offset: u64) -> Option<(u64, (Local, u64))> {
        let first = self.queue.partition_point(|f| f.at < token);
        for one in self.queue.iter().skip(first).filter(|f| f.source) {
            let from = if one.at == token { offset } else { 0 };
            let mut start = 0;
            for piece in one.bytes.pieces() {
                let end = start + u64::from(piece.len);
                if from < end {
                    let skip = from.saturating_sub(start);
                    let part = Local {
                        len: (u64::from(piece.len) - skip) as u32,
                        addr: piece.addr.wrapping_add(skip),
                        ..*piece
                    };
                    return Some((one.at, (part, start + skip)));
                }
                start = end;
            }
        }
        None
    }

    /// The first message from `token` on whose bytes are sent.
    pub(in crate::engine) fn source_message(&self, token: u64) -> Option<&InFlight> {
        let first = self.queue.partition_point(|f| f.at < token);
        self.queue.iter().skip(first).find(|f| f.source)
    }

    /// Lets go of the oldest if it is complete: up to `through`, and what has no packets. Its slot, control segment and bytes.
    #[inline(always)]
    pub(super) fn pop_done(&mut self, through: Option<u64>) -> Option<(u64, Ctrl, u32)> {
        let front = self.queue.front()?;
        let done = front.local || through.is_some_and(|t| front.at <= t);
        // Only these are moved; the whole is several times as large.
        let said = (front.at, front.ctrl, front.byte_cnt);
        done.then(|| {
            self.queue.pop_front();
            said
        })
    }

    /// Those from slot `at` on are not under way after all.
    pub(in crate::engine) fn give_back(&mut self, at: u64) {
        let keep = self.queue.partition_point(|f| f.at < at);
        self.queue.truncate(keep);
    }

    pub(in crate::engine) fn clear(&mut self) {
        self.queue.clear();
    }
}
