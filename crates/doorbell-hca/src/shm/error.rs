//! What can go wrong between two processes of one host.
//!
//! Each error names the object, the value that was found and what to do about it. A [`Refusal`] is
//! the part that travels: it is sent to the peer before the socket closes, so both sides know why.

use std::{io, time::Duration};

use super::proto::{MAGIC, VERSION};

/// Why a peer was turned away. The numbers are on the wire: append, never renumber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum RefusalCode {
    /// The first message does not begin with our magic.
    Magic = 1,
    /// Magic right, version not ours.
    Version = 2,
    /// `SO_PEERCRED` says another user.
    Credentials = 3,
    /// A message that cannot be parsed.
    Garbage = 4,
    /// A message that may not come at this point.
    OutOfOrder = 5,
    /// The number or kind of descriptors is not what the message says.
    Descriptors = 6,
    /// A descriptor that is not a memfd sealed against shrinking and growing.
    NotSealed = 7,
    /// A descriptor whose size differs from what the message says.
    Size = 8,
    /// More of something than one session may have.
    Limit = 9,
    /// A step was not answered in time.
    Deadline = 10,
    /// The shared header (key table, mailbox) is not one of ours.
    Layout = 11,
    /// We cannot take part now (no memory, no descriptors, closing).
    Busy = 12,
    /// A descriptor or handle that this process cannot map.
    Map = 13,
}

impl RefusalCode {
    pub(crate) fn from_u32(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Magic,
            2 => Self::Version,
            3 => Self::Credentials,
            4 => Self::Garbage,
            5 => Self::OutOfOrder,
            6 => Self::Descriptors,
            7 => Self::NotSealed,
            8 => Self::Size,
            9 => Self::Limit,
            10 => Self::Deadline,
            11 => Self::Layout,
            12 => Self::Busy,
            13 => Self::Map,
            _ => return None,
        })
    }
}

/// A refusal with what was found and what was wanted, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code:?}: {text}")]
pub struct Refusal {
    /// The class of the refusal.
    pub code: RefusalCode,
    /// Found, wanted and remedy. At most [`Refusal::MAX_TEXT`] bytes reach the peer.
    pub text: String,
}

impl Refusal {
    /// Bytes of text that a refusal message carries.
    pub const MAX_TEXT: usize = 240;

    pub(crate) fn new(code: RefusalCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }

    pub(crate) fn magic(found: &[u8]) -> Self {
        let found: String = found
            .iter()
            .take(8)
            .flat_map(|b| b.escape_ascii())
            .map(char::from)
            .collect();
        let ours = MAGIC.escape_ascii();
        Self::new(
            RefusalCode::Magic,
            format!(
                "message begins with \"{found}\", a Doorbell session begins with \"{ours}\" version {VERSION}; is another program on this socket?"
            ),
        )
    }

    pub(crate) fn version(found: u16) -> Self {
        let ours = MAGIC.escape_ascii();
        Self::new(
            RefusalCode::Version,
            format!(
                "\"{ours}\" version {found} met version {VERSION}; run the same Doorbell release on both sides"
            ),
        )
    }
}

/// Why a peer is no longer reachable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Gone {
    /// The peer said goodbye.
    #[error("the peer closed the session")]
    Closed,
    /// The socket ended without goodbye, or the process has exited.
    #[error("the peer process died (socket closed without goodbye)")]
    Died,
    /// This side closed the session.
    #[error("this side closed the session")]
    ClosedHere,
    /// This side turned the peer away.
    #[error("refused the peer: {0}")]
    Refused(Refusal),
    /// The peer turned this side away.
    #[error("the peer refused this side: {0}")]
    RefusedByPeer(Refusal),
    /// The peer did not answer a step in time.
    #[error("the peer did not answer {step} within {after:.1?}")]
    Late {
        /// The step that was waited for.
        step: &'static str,
        /// The time it had.
        after: Duration,
    },
    /// The socket failed.
    #[error("session socket: {0}")]
    Socket(String),
}

/// An error of the shared memory link.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A system call failed.
    #[error("{what} ({object}): {source}")]
    Os {
        /// The call.
        what: &'static str,
        /// On what.
        object: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A size that cannot be shared.
    #[error("shared region of {len} bytes: {why}")]
    Length {
        /// The length asked for.
        len: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A descriptor that must not be mapped.
    #[error("descriptor: {0}")]
    Descriptor(Refusal),
    /// The session ended.
    #[error("shared memory peer: {0}")]
    Gone(Gone),
    /// A wait ended before its answer came.
    #[error("{what} did not finish within {after:.1?}{}", because(why))]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// The time it had.
        after: Duration,
        /// What went wrong meanwhile, if it is known.
        why: Option<String>,
    },
    /// More of something than there is room for.
    #[error("{what}: limit of {limit} reached; {remedy}")]
    Limit {
        /// The object.
        what: &'static str,
        /// The limit.
        limit: usize,
        /// What to do.
        remedy: &'static str,
    },
    /// Something with that name or number exists already.
    #[error("{what} {value} is in use; {remedy}")]
    InUse {
        /// The object.
        what: &'static str,
        /// Its name or number.
        value: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Nothing with that name or number exists.
    #[error("{what} {value} is not known")]
    Unknown {
        /// The object.
        what: &'static str,
        /// Its name or number.
        value: String,
    },
    /// An address that no Unix socket can have.
    #[error("socket address \"{0}\": {1}")]
    Address(String, &'static str),
    /// The control thread of this HCA has ended.
    #[error("the shared memory control thread of this HCA is down")]
    Down,
}

fn because(why: &Option<String>) -> String {
    why.as_ref().map_or_else(String::new, |w| format!(": {w}"))
}

impl ShmError {
    pub(crate) fn os(
        what: &'static str,
        object: impl Into<String>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::Os {
            what,
            object: object.into(),
            source: crate::limits::told(source.into()),
        }
    }
}

/// Result of this module.
pub type Result<T, E = ShmError> = std::result::Result<T, E>;
