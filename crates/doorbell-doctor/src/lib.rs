//! Which GPU-initiated path will the libraries of this node take, and why not a better one?
//!
//! [`examine`] reads a [`Tree`] (the running machine, a folder that somebody captured, or a one-file
//! [`manifest`](tree::Manifest)) and gives a [`Report`]: GPUs, NICs, distances, driver options, limits, installed
//! NCCL, NVSHMEM, UCX, NIXL and DOCA, and for each of them every path with its gates. Nothing is
//! run, loaded or opened for writing, and no root is needed: what only root could see is listed.
//!
//! ```
//! use doorbell_doctor::{examine, screen, tree::Manifest};
//! let machine = Manifest::parse("/proc/sys/kernel/osrelease: 6.8.0\n").unwrap();
//! let report = examine(&machine);
//! assert!(report.gpus.is_empty());
//! println!("{}", screen(&report, 80, false));
//! ```
//!
//! `facts` reads, `rules` judges (one file a library, each gate with its source), `report` is the
//! JSON schema, `screen` the text for people.

mod elf;
mod error;
mod facts;
mod report;
mod rules;
mod screen;
pub mod tree;

pub use error::Error;
pub use report::{
    Adapter, Container, Distance, Driver, Gate, GateState, Gpu, Here, Library, Limits, Machine,
    Memory, Nic, Path, PathState, RdmaSystem, Report, SCHEMA, Software, Unseen, Variable, Verdict,
    Who,
};
pub use rules::NcclFound;
pub use screen::screen;
pub use tree::Tree;

/// Installations of NCCL behind `tree`: version and place, and whether each loads a GIN plug-in that exports `exports`. The same judgment as in
/// [`examine`], without looking at the machine.
pub fn nccl_with_plugin(tree: &dyn Tree, exports: &[&str]) -> Vec<NcclFound> {
    rules::nccl_with_plugin(facts::installed(tree), exports)
}

/// Network controllers on the PCI bus behind `tree`, driven or not, and what of the RDMA software is there: for who finds no RDMA device.
pub fn rdma_system(tree: &dyn Tree) -> RdmaSystem {
    facts::rdma_system(tree)
}

/// Reads the machine behind `tree` and judges its libraries.
pub fn examine(tree: &dyn Tree) -> Report {
    let facts = facts::gather(tree);
    rules::judge(facts)
}
