//! Why two processes did not connect, with what each of them said.

use std::io;
use std::time::Duration;

use super::frame::VERSION;

/// What can go wrong between dialling and a connection that both sides agreed on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// An address that is none.
    #[error("address {value:?}: {remedy}")]
    Address {
        /// The text that was given.
        value: String,
        /// What may be given.
        remedy: String,
    },
    /// The socket could not be opened.
    #[error(
        "cannot listen on {address}: {source}; choose another address or end whoever listens there"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error(
        "cannot reach {address} within {after:?}: {source}; is `doorbell serve` running there, and does the firewall let TCP to that port pass?"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// How long it was tried.
        after: Duration,
        /// What the system said last.
        source: io::Error,
    },
    /// A step did not end in time.
    #[error("{peer} did not {step} within {after:?}; look whether it is stopped or overloaded")]
    TimedOut {
        /// The other side's address.
        peer: String,
        /// What was waited for.
        step: &'static str,
        /// How long.
        after: Duration,
    },
    /// The connection ended.
    #[error("lost {peer} while waiting for it to {step}: {reason}")]
    Lost {
        /// The other side's address.
        peer: String,
        /// What was waited for.
        step: &'static str,
        /// How it showed.
        reason: String,
    },
    /// What arrived is none of this protocol.
    #[error("{peer} sent {found}, expected {expected}; is it a Doorbell?")]
    Protocol {
        /// The other side's address.
        peer: String,
        /// What arrived.
        found: String,
        /// What should have.
        expected: String,
    },
    /// The other side speaks another version.
    #[error(
        "{peer} speaks version {theirs} of the exchange, this release ({release}) version {VERSION}; run the same release on both hosts"
    )]
    Version {
        /// The other side's address.
        peer: String,
        /// Its version.
        theirs: u16,
        /// This side's release.
        release: &'static str,
    },
    /// The other side does not want to be connected.
    #[error("{peer} refused: {refusal}")]
    Refused {
        /// The other side's address.
        peer: String,
        /// Its words.
        refusal: Refusal,
    },
    /// This side does not want to be connected.
    #[error("refused {peer}: {refusal}")]
    Refusing {
        /// The other side's address.
        peer: String,
        /// Why.
        refusal: Refusal,
    },
    /// A message above the limit.
    #[error("a message of {len} bytes: at most {max}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The limit.
        max: usize,
    },
}

/// What a refusal is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum RefusalKind {
    /// Another reason; the text says which.
    Other = 0,
    /// Another version of the exchange.
    Version = 1,
    /// Another job.
    Job = 2,
    /// Other parameters of the test.
    Purpose = 3,
    /// No link that both sides have.
    Link = 4,
    /// As many connections as the other side serves.
    Busy = 5,
    /// Something that could not be read.
    Protocol = 6,
}

impl RefusalKind {
    pub(super) fn parse(raw: u16) -> Self {
        [
            Self::Version,
            Self::Job,
            Self::Purpose,
            Self::Link,
            Self::Busy,
            Self::Protocol,
        ]
        .into_iter()
        .find(|k| *k as u16 == raw)
        .unwrap_or(Self::Other)
    }
}

/// Why one side does not want the connection, in words that the other side prints. They name both sides' values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// What it is about.
    pub kind: RefusalKind,
    /// The words.
    pub text: String,
}

impl Refusal {
    /// A refusal.
    pub fn new(kind: RefusalKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }
}
