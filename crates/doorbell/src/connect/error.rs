//! Why two processes did not connect, with what each of them said.

use std::io;
use std::time::Duration;

use super::frame::VERSION;

/// A time as errors say it: `3.2 s`, `500 ms`.
pub(crate) fn brief(time: Duration) -> String {
    // What is rounded up to a second is said as that.
    match time.as_secs_f64() {
        s if s >= 0.9995 => format!("{s:.1} s"),
        s => format!("{:.0} ms", s * 1e3),
    }
}

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
    /// The host's name has no address.
    #[error(
        "cannot look up {host:?}: {source}; check the name (`getent hosts {host}`), or give the address"
    )]
    Name {
        /// The name.
        host: String,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error("cannot reach {address} within {after}: {source}; {remedy}", after = brief(*.after))]
    Unreachable {
        /// The address.
        address: String,
        /// How long it was tried.
        after: Duration,
        /// What the system said last.
        source: io::Error,
        /// What to look at.
        remedy: &'static str,
    },
    /// A step did not end in time.
    #[error("{peer} did not {step} within {after}; {remedy}", after = brief(*.after))]
    TimedOut {
        /// The other side's address.
        peer: String,
        /// What was waited for.
        step: &'static str,
        /// How long.
        after: Duration,
        /// What to look at.
        remedy: &'static str,
    },
    /// Not even the signs of life came that a connected process sends ten times a second.
    #[error(
        "{peer} has been silent for {silent}: look whether that process is stopped, its host is up, and the network between passes TCP",
        silent = brief(*.silent)
    )]
    Silent {
        /// The other side's address.
        peer: String,
        /// How long nothing came.
        silent: Duration,
    },
    /// The other side ended what was going on, and said why.
    #[error("{peer} ended the connection: {reason}")]
    Ended {
        /// The other side's address.
        peer: String,
        /// Its words.
        reason: String,
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
    /// It ends what was going on.
    Ended = 7,
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
            Self::Ended,
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
