//! NCCL's GPU-initiated networking (GIN) over Doorbell, with no NIC: `libnccl-gin-doorbell.so`.
//!
//! NCCL loads the shared object (`NCCL_GIN_PLUGIN`) and calls it through a table of functions ([`v14`]). The plug-in gives unmodified
//! NCCL device code the mlx5 queues that it writes on a ConnectX (type GDAKI), and Doorbell's software HCA executes them.
//!
//! The order of calls: `init`, `devices`, `getProperties`; then, together with all other ranks, `listen`, `connect` (module `comm`),
//! `regMrSym` for each window (`window`) and `createContext` (`context`). A thread for each GPU watches over it (`node`);
//! `queryLastError` says what it saw. [`abi`] declares what NCCL declares.

pub mod abi;
mod beats;
mod comm;
mod context;
mod entry;
mod error;
mod handle;
mod health;
mod log;
mod maps;
mod memfd;
mod node;
mod pulse;
mod qps;
mod rma;
pub mod rma_v14;
mod settings;
mod shadow;
pub mod v11;
pub mod v14;
mod window;

pub use error::{
    Error, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, Result, SUCCESS,
    SYSTEM_ERROR,
};
pub use handle::Handle;
pub use settings::check_variable;
