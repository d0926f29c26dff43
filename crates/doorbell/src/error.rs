//! The one error type of this crate.
//!
//! Every variant names the object, the value that was found and what to do about it. Errors of the layers below are
//! passed through unchanged, since they say the same for themselves.

use std::fmt;
use std::time::Duration;

use doorbell_device::layout::{ErrorKind, ErrorWord};
use doorbell_wire::{Syndrome, Vendor};

use crate::bootstrap::BootstrapError;
use crate::config::Source;
use crate::connect::{ConnectError, brief};
use crate::endpoint::EndpointError;
use crate::qp::QpState;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that cannot be used.
    #[error("{name}={value:?} (from the {source}) cannot be used: {remedy}", source = .origin)]
    Setting {
        /// The setting, or its variable.
        name: &'static str,
        /// What was given.
        value: String,
        /// Where it came from.
        origin: Source,
        /// What may be given.
        remedy: String,
    },
    /// An argument that cannot be used.
    #[error("{object}: {value} cannot be used: {remedy}")]
    Argument {
        /// What it was for.
        object: &'static str,
        /// What was given.
        value: String,
        /// What may be given.
        remedy: &'static str,
    },
    /// The GPU, its memory or a kernel.
    #[error(transparent)]
    Gpu(#[from] doorbell_gpu::GpuError),
    /// The software HCA.
    #[error("software HCA: {0}")]
    Hca(#[from] doorbell_hca::HcaError),
    /// The shared memory link.
    #[error("shared memory link: {0}")]
    Shm(#[from] doorbell_hca::shm::ShmError),
    /// The exchange between ranks.
    #[error("bootstrap: {0}")]
    Bootstrap(#[from] BootstrapError),
    /// The exchange between two hosts.
    #[error("connecting: {0}")]
    Connect(#[from] ConnectError),
    /// A peer's description of itself.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A QP that is not in the state the call needs.
    #[error("QP {qpn:#08x} is {state}: {remedy}")]
    State {
        /// QP number.
        qpn: u32,
        /// The state found.
        state: QpState,
        /// What to do.
        remedy: &'static str,
    },
    /// A QP failed.
    #[error("QP {qpn:#08x}: {fault}")]
    Qp {
        /// QP number.
        qpn: u32,
        /// What happened.
        fault: QpFault,
    },
    /// A wait ended without what it waited for.
    #[error("{what} did not happen within {after}: {remedy}", after = brief(*.after))]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The time it had.
        after: Duration,
        /// What to look at.
        remedy: &'static str,
    },
    /// The trace could not be written.
    #[error("writing the trace {}: {source}; name another file", path.display())]
    Trace {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// What this provider, GPU or platform cannot do.
    #[error("{what} is not possible here: {remedy}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why a QP failed: the first error, kept until the QP is reset. The kernel that used the QP sees the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpFault {
    word: ErrorWord,
}

impl QpFault {
    pub(crate) fn new(word: ErrorWord) -> Self {
        Self { word }
    }

    pub(crate) fn from_word(word: ErrorWord) -> Option<Self> {
        (word != ErrorWord::NONE).then_some(Self { word })
    }

    /// What kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.word.kind()
    }

    /// mlx5 syndrome of the first error CQE.
    pub fn syndrome(&self) -> Syndrome {
        Syndrome(self.word.syndrome())
    }

    /// Vendor syndrome of the first error CQE; Doorbell's own table is in ARCHITECTURE.md.
    pub fn vendor(&self) -> Vendor {
        Vendor(self.word.vendor())
    }

    /// Opcode byte of the WQE that failed.
    pub fn opcode(&self) -> u8 {
        self.word.opcode()
    }

    /// Index of the WQE that failed, modulo 2^16.
    pub fn wqe_index(&self) -> u16 {
        self.word.wqe_index()
    }

    /// The raw word, as device code reads it.
    pub fn word(&self) -> ErrorWord {
        self.word
    }
}

impl fmt::Display for QpFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            ErrorKind::EngineDown => f.write_str("its engine is gone; open the device again"),
            ErrorKind::Closed => f.write_str("it was closed by its owner"),
            _ => {
                let opcode = self.opcode();
                write!(f, "WQE {}", self.wqe_index())?;
                match doorbell_wire::Opcode::try_from(opcode) {
                    // What a queue pair that fails as a whole says of the next WQE, posted or not, is no NOP either.
                    Ok(doorbell_wire::Opcode::Nop) => {}
                    Ok(known) => write!(f, " ({known:?})")?,
                    Err(_) => write!(f, " (opcode {opcode:#04x})")?,
                }
                write!(f, " failed: {}", self.syndrome())?;
                if self.vendor() != Vendor::NONE {
                    write!(f, ", vendor syndrome {}", self.vendor())?;
                }
                f.write_str("; reset and reconnect the queue pair")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_says_which_wqe_and_what_to_do() {
        let word =
            ErrorWord::completion(Syndrome::REMOTE_ACCESS.0, Vendor::BAD_RKEY.0, 0x08, 65535);
        let text = QpFault::from_word(word).unwrap().to_string();
        assert!(
            text.contains("65535") && text.contains("RdmaWrite") && text.contains("reset"),
            "{text}"
        );
        let word = ErrorWord::completion(Syndrome::LOCAL_QP_OP.0, Vendor::BAD_OPCODE.0, 0xee, 1);
        assert!(
            QpFault::from_word(word)
                .unwrap()
                .to_string()
                .contains("0xee")
        );
        assert_eq!(QpFault::from_word(ErrorWord::NONE), None);
        let down = QpFault::from_word(ErrorWord::state(ErrorKind::EngineDown)).unwrap();
        assert!(down.to_string().contains("engine"));
    }
}
