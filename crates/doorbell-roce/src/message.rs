//! What is posted, and what becomes of it.

use crate::memory::LocalFault;

/// An operation with what the packets need of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// RDMA WRITE, perhaps with immediate.
    Write {
        /// Address at the responder.
        va: u64,
        /// Key.
        rkey: u32,
        /// The immediate.
        imm: Option<u32>,
    },
    /// SEND, perhaps with immediate.
    Send {
        /// The immediate.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// Address at the responder.
        va: u64,
        /// Key.
        rkey: u32,
    },
    /// FETCH_ADD of 8 bytes.
    FetchAdd {
        /// Address at the responder; a multiple of 8.
        va: u64,
        /// Key.
        rkey: u32,
        /// What to add.
        add: u64,
    },
    /// COMPARE_SWAP of 8 bytes.
    CompareSwap {
        /// Address at the responder; a multiple of 8.
        va: u64,
        /// Key.
        rkey: u32,
        /// The value to compare with.
        compare: u64,
        /// The new value.
        swap: u64,
    },
}

impl Op {
    /// Does it consume a receive at the responder?
    pub const fn is_received(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { imm: Some(_), .. })
    }

    /// Does the responder answer it with data?
    pub const fn is_read_like(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. }
        )
    }
}

/// A work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The caller's name for it, growing from message to message; memory and events use it.
    pub token: u64,
    /// What to do.
    pub op: Op,
    /// Bytes, up to 2^31; 8 for atomics.
    pub len: u32,
    /// Wait until every READ and atomic before it has been answered.
    pub fence: bool,
    /// Ask the receiver for an event.
    pub solicited: bool,
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// No room now; there will be when earlier messages are complete.
    #[error(
        "as many messages or packets are under way as the connection takes; wait for completions"
    )]
    Full,
    /// The connection has failed.
    #[error("the connection has failed; reset and connect it again")]
    Failed,
    /// UC has no READs and atomics, and an RC connection may have been made with none.
    #[error("this connection carries no READs and atomics (UC, or max_rd_atomic 0)")]
    Unsupported,
    /// A length that no message has.
    #[error("a message of {0} bytes: at most 2^31, and 8 for an atomic")]
    Length(u32),
}

/// Why a message failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The peer did not answer within the time-outs.
    Retry,
    /// The peer had no receive posted for too long.
    RnrRetry,
    /// Refused: key, range, access, protection domain.
    RemoteAccess,
    /// Refused: malformed, or not allowed there.
    RemoteInvalid,
    /// It failed at the peer.
    RemoteOperational,
    /// The answer does not fit the request.
    BadResponse,
    /// Local memory.
    Local(LocalFault),
    /// An earlier message failed; this one may or may not have been carried out, once at most.
    Flushed,
}

/// Something to tell the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Every message up to and including this token is complete.
    Done {
        /// The newest.
        through: u64,
    },
    /// A message failed, and with it the connection. The messages after it follow as [`Failure::Flushed`].
    Failed {
        /// Which.
        token: u64,
        /// Why.
        failure: Failure,
    },
    /// The responder refused a request and has stopped.
    Stopped,
}
