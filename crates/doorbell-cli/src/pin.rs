//! Binding this process to a CPU, for figures that compare cores with cores.

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds this thread, and all that it starts from now on, to one CPU.
pub(crate) fn to(cpu: usize) -> Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        bail!(
            "--pin {cpu}: there are at most {} CPUs; choose one that this process may use",
            CpuSet::MAX_CPU
        );
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| {
        format!("binding to CPU {cpu}: choose one that this process may use, with --pin")
    })
}

/// The CPUs that this process may use.
pub(crate) fn allowed() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect(),
        Err(_) => Vec::new(),
    }
}
