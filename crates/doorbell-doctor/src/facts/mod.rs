//! Reads everything; judges nothing. One file a subject, all over [`View`].

mod adapters;
mod bus;
pub(crate) mod driver;
mod host;
mod ids;
mod libraries;
mod nics;
mod pythons;

use std::collections::BTreeMap;

use crate::report::{
    Container, Distance, Driver, Gpu, Limits, Machine, Memory, Nic, Software, Unseen,
};
use crate::tree::{Tree, View};

pub(crate) use libraries::{Found, Kind};

/// All that was read.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) machine: Machine,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) nics: Vec<Nic>,
    pub(crate) distances: Vec<Distance>,
    pub(crate) driver: Option<Driver>,
    pub(crate) memory: Memory,
    pub(crate) limits: Limits,
    pub(crate) container: Container,
    pub(crate) software: Vec<Software>,
    pub(crate) found: Vec<Found>,
    /// NCCL's plug-ins: (file, symbols).
    pub(crate) plugins: Vec<(String, Vec<String>)>,
    pub(crate) unseen: Vec<Unseen>,
    pub(crate) environment: BTreeMap<String, String>,
}

impl Facts {
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.environment.get(name).map(String::as_str)
    }

    /// Where a library of the system is.
    pub(crate) fn software(&self, name: &str) -> Option<&Software> {
        self.software
            .iter()
            .find(|s| s.name == name && s.path.is_some())
    }
}

pub(crate) fn gather(tree: &dyn Tree) -> Facts {
    let view = View(tree);
    let environment = view.environment();
    let machine = host::machine(view);
    let gpus = bus::gpus(view);
    let nics = nics::nics(view);
    let mut unseen = Vec::new();
    let distances = bus::distances(view, &gpus, &nics, &mut unseen);
    let folders = libraries::folders(view, &environment);
    let software = libraries::software(view, &folders);
    let driver = driver::driver(view, &software);
    let memory = driver::memory(view, driver.as_ref(), &gpus, &machine);
    Facts {
        limits: host::limits(view),
        container: host::container(view),
        found: libraries::found(view, &folders, &environment),
        plugins: libraries::nccl_plugins(view, &folders, &software, &environment),
        machine,
        gpus,
        nics,
        distances,
        driver,
        memory,
        software,
        unseen,
        environment,
    }
}

/// The libraries alone.
pub(crate) fn installed(tree: &dyn Tree) -> Vec<Found> {
    let view = View(tree);
    let environment = view.environment();
    let folders = libraries::folders(view, &environment);
    libraries::found(view, &folders, &environment)
}

/// Network controllers and what makes RDMA devices of them.
pub(crate) fn rdma_system(tree: &dyn Tree) -> crate::report::RdmaSystem {
    adapters::rdma_system(View(tree))
}
