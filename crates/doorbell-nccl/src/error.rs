//! What can go wrong in the plug-in, and which of NCCL's result codes says so.

use crate::abi::Status;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `ncclSuccess`.
pub const SUCCESS: Status = 0;
/// `ncclSystemError`.
pub const SYSTEM_ERROR: Status = 2;
/// `ncclInternalError`.
pub const INTERNAL_ERROR: Status = 3;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: Status = 4;
/// `ncclInvalidUsage`.
pub const INVALID_USAGE: Status = 5;
/// `ncclRemoteError`.
pub const REMOTE_ERROR: Status = 6;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device, its memory or its queue pairs.
    #[error(transparent)]
    Doorbell(#[from] doorbell::Error),
    /// What NCCL passed.
    #[error("{call}: {object} is {value}: {remedy}")]
    Argument {
        /// The entry of the table.
        call: &'static str,
        /// The argument.
        object: &'static str,
        /// What it was.
        value: String,
        /// What it may be.
        remedy: &'static str,
    },
    /// A rank's handle that is none of this release.
    #[error(
        "handle of rank {rank}: {found}, this release writes {expected}: load the same libnccl-gin-doorbell.so on every host"
    )]
    Handle {
        /// Whose.
        rank: usize,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A step that all ranks take together failed on the way.
    #[error("{step}, rank {rank} of {ranks}: {source}")]
    Collective {
        /// The step.
        step: &'static str,
        /// This rank.
        rank: usize,
        /// How many there are.
        ranks: usize,
        /// Which rank did not come, or how it was lost.
        source: doorbell::BootstrapError,
    },
    /// Another rank could not take the step.
    #[error("{step}: rank {rank} could not do its part: {reason}")]
    Peer {
        /// The step.
        step: &'static str,
        /// Which rank.
        rank: usize,
        /// Its own words.
        reason: String,
    },
    /// Another rank is in another step.
    #[error(
        "rank {rank} is in {theirs} while this rank is in {ours}: every rank must make the same calls in the same order"
    )]
    Order {
        /// Which rank.
        rank: usize,
        /// What it does.
        theirs: String,
        /// What this rank does.
        ours: &'static str,
    },
    /// A rank that cannot be reached by the link that was chosen.
    #[error("rank {rank} cannot be reached over {link}: {reason}")]
    Link {
        /// Which rank.
        rank: usize,
        /// The link.
        link: &'static str,
        /// Why.
        reason: String,
    },
    /// A request of NCCL's proxy that could not be posted, or failed.
    #[error("{call}: a request to rank {rank}: {source}")]
    Request {
        /// The entry of the table.
        call: &'static str,
        /// To whom.
        rank: usize,
        /// What the queue pair says.
        source: doorbell::device_api::Error,
    },
    /// A variable that cannot be used.
    #[error("{name}={value:?} cannot be used: {remedy}")]
    Variable {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        remedy: &'static str,
    },
    /// A release of NCCL that has other structures.
    #[error(
        "NCCL {}.{}.{} loads libnccl-net-doorbell.so, which is for 2.28.7 to 2.29.7: from 2.30.7 on set NCCL_GIN_PLUGIN to libnccl-gin-doorbell.so, and no NCCL_NET_PLUGIN",
        found / 10_000, found / 100 % 100, found % 100
    )]
    Release {
        /// As `ncclGetVersion` has it.
        found: u32,
    },
    /// A release of NCCL that does not say which it is.
    #[error(
        "which NCCL loads libnccl-net-doorbell.so cannot be told (is it linked into the program?), and other releases than 2.28.7 to 2.29.7 have other structures: \
         if it is one of them set DOORBELL_NCCL_RELEASE to it (2.28.9)"
    )]
    UnknownRelease,
    /// The network part of the object for older releases was asked to carry something.
    #[error(
        "{call}: libnccl-net-doorbell.so is for ranks of one host, which NCCL must connect by P2P or shared memory: unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; \
         for several hosts use NCCL 2.30.7 or later"
    )]
    NoNetwork {
        /// The entry of the table.
        call: &'static str,
    },
    /// A fault of this plug-in.
    #[error("a fault of this plug-in in {call}: {reason}; please report it")]
    Panic {
        /// The entry of the table.
        call: &'static str,
        /// What the panic said.
        reason: String,
    },
}

impl Error {
    /// NCCL's code for it.
    pub fn status(&self) -> Status {
        match self {
            Self::Argument { .. } => INVALID_ARGUMENT,
            Self::Doorbell(doorbell::Error::Setting { .. }) => INVALID_USAGE,
            Self::Variable { .. }
            | Self::Order { .. }
            | Self::Handle { .. }
            | Self::Release { .. }
            | Self::UnknownRelease
            | Self::NoNetwork { .. } => INVALID_USAGE,
            Self::Collective { .. }
            | Self::Peer { .. }
            | Self::Link { .. }
            | Self::Request { .. } => REMOTE_ERROR,
            Self::Panic { .. } => INTERNAL_ERROR,
            _ => SYSTEM_ERROR,
        }
    }
}

/// A request of NCCL's proxy failed.
pub(crate) fn posted(
    call: &'static str,
    rank: usize,
    source: doorbell::device_api::Error,
) -> Error {
    Error::Request { call, rank, source }
}
