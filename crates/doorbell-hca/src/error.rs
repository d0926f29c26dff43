//! What calls to the HCA can fail with: the object, the value, and what to do about it.
//! Faults of work requests are not here: they are answered with error CQEs (see [`crate::fault`]).

use std::time::Duration;

use doorbell_wire::{Cqn, Qpn};

/// An error of an HCA call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HcaError {
    /// A configuration that cannot work.
    #[error("HCA configuration: {what}")]
    BadConfig {
        /// Field, value, remedy.
        what: String,
    },
    /// A queue pair that cannot work.
    #[error("queue pair: {what}")]
    BadQp {
        /// Field, value, remedy.
        what: String,
    },
    /// A memory region that cannot work.
    #[error("memory region: {what}")]
    BadRegion {
        /// Field, value, remedy.
        what: String,
    },
    /// No key slot is free.
    #[error(
        "all {slots} memory key slots are taken: deregister regions, or raise HcaConfig::log_regions"
    )]
    NoKeys {
        /// Slots in the table.
        slots: u32,
    },
    /// No QP or CQ number, or doorbell word, is free.
    #[error("no free {what}: destroy some first")]
    Exhausted {
        /// What ran out.
        what: &'static str,
    },
    /// A CQ number is taken.
    #[error("CQ number {cqn} is in use by another CQ: take one from Hca::alloc_cqn")]
    CqnInUse {
        /// The number.
        cqn: Cqn,
    },
    /// No such QP.
    #[error("no queue pair has the number {qpn} in this HCA: check the number that the peer sent")]
    UnknownQp {
        /// The number.
        qpn: Qpn,
    },
    /// The QP is in the wrong state for the call.
    #[error("queue pair {qpn} is {state:?}, {call} needs {needs}")]
    WrongState {
        /// The QP.
        qpn: Qpn,
        /// Its state.
        state: crate::qp::QpState,
        /// What was called.
        call: &'static str,
        /// What that needs.
        needs: &'static str,
    },
    /// The engine did not answer in time; the request was withdrawn.
    #[error(
        "engine core {core} did not {what} within {waited:.1?}: drive it (caller-driven core) or look at Hca::health"
    )]
    TimedOut {
        /// The core.
        core: usize,
        /// What it was to do.
        what: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The engine core is gone.
    #[error(
        "engine core {core} is down ({reason}): its queue pairs are in error; destroy them and make a new HCA"
    )]
    EngineDown {
        /// The core.
        core: usize,
        /// Why.
        reason: String,
    },
    /// Memory could not be proved unused in time and is kept mapped for ever.
    #[error(
        "memory region {key} was revoked, but {who} may still use it after {waited:.1?}: the memory is kept (leaked)"
    )]
    StillInUse {
        /// The key.
        key: doorbell_wire::Key,
        /// Who did not answer.
        who: String,
        /// How long was waited.
        waited: Duration,
    },
    /// The registration was refused by whoever exports regions to peers.
    #[error("cannot export the memory region to peers: {reason}")]
    Export {
        /// Why.
        reason: String,
    },
    /// An RDMA device refused something.
    #[error(transparent)]
    Verbs(#[from] doorbell_verbs::VerbsError),
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// Short for a result with [`HcaError`].
pub type Result<T, E = HcaError> = core::result::Result<T, E>;
