//! Verdicts: for each installed library its paths, best first, each with the gates it has to pass.
//!
//! `gates` has the conditions that several libraries share; one file a library says which of them
//! a path needs, in the library's own order, with the place where that is written.

mod doca;
mod gates;
mod here;
mod nccl;
mod nixl;
mod nvshmem;
mod ucx;

use crate::facts::{Facts, Found, Kind};
use crate::report::{
    Gate, GateState, Library, Path, PathState, Report, SCHEMA, Variable, Verdict, Who,
};

pub use nccl::NcclFound;

/// See [`crate::nccl_with_plugin`].
pub(crate) fn nccl_with_plugin(found: Vec<Found>, exports: &[&str]) -> Vec<NcclFound> {
    let all = found.into_iter().filter(|f| f.kind == Kind::Nccl);
    all.map(|found| nccl::with_plugin(found, exports)).collect()
}

pub(crate) fn judge(facts: Facts) -> Report {
    let libraries: Vec<Library> = facts
        .found
        .iter()
        .map(|found| match found.kind {
            Kind::Nccl => nccl::judge(&facts, found),
            Kind::Nvshmem => nvshmem::judge(&facts, found),
            Kind::Ucx => ucx::judge(&facts, found),
            Kind::Nixl => nixl::judge(&facts, found),
            Kind::Doca => doca::judge(&facts, found),
        })
        .collect();
    let verdict = if libraries.is_empty() {
        Verdict::NothingInstalled
    } else if libraries.iter().all(|l| l.who == Who::Native) {
        Verdict::Native
    } else {
        Verdict::FallsBack
    };
    let doorbell = here::judge(&facts);
    Report {
        schema: SCHEMA,
        verdict,
        doorbell,
        libraries,
        machine: facts.machine,
        gpus: facts.gpus,
        nics: facts.nics,
        distances: facts.distances,
        driver: facts.driver,
        memory: facts.memory,
        limits: facts.limits,
        container: facts.container,
        software: facts.software,
        unseen: facts.unseen,
        environment: facts.environment,
    }
}

/// A path before it is known which one is taken.
pub(super) fn path(name: &'static str, who: Who, gates: Vec<Gate>) -> Path {
    let failed = |setting: bool| {
        gates
            .iter()
            .any(|g| g.state == GateState::Fail && g.setting == setting)
    };
    let state = if failed(false) {
        PathState::Blocked
    } else if failed(true) {
        PathState::Setting
    } else {
        PathState::Open
    };
    Path {
        name,
        who,
        state,
        gates,
    }
}

/// The library with the first open path taken.
pub(super) fn library(name: &'static str, found: &Found, mut paths: Vec<Path>) -> Library {
    let taken = paths.iter_mut().find(|p| p.state == PathState::Open);
    let (takes, who) = match taken {
        Some(path) => {
            path.state = PathState::Taken;
            (Some(path.name), path.who)
        }
        None => (None, Who::Nobody),
    };
    Library {
        name,
        version: found.version.clone(),
        source: found.source,
        path: found.path.clone(),
        takes,
        who,
        could: paths
            .iter()
            .filter(|p| p.state == PathState::Setting && p.who > who)
            .map(|p| p.name)
            .collect(),
        paths,
        notes: Vec::new(),
        variables: Vec::new(),
    }
}

/// Which copy of a library PyTorch loads: the one of its own wheels, whatever the system has.
pub(super) fn torch_note(facts: &Facts, found: &Found) -> Option<String> {
    if let Some(torch) = &found.torch {
        return Some(format!("PyTorch {torch} beside it loads this one."));
    }
    let wheel = facts
        .found
        .iter()
        .find(|other| other.kind == found.kind && other.torch.is_some())?;
    (found.source == "system").then(|| {
        format!(
            "PyTorch {} loads the wheel's {} instead; programs that link with this one get this one.",
            wheel.torch.as_deref().unwrap_or_default(),
            wheel.version.as_deref().unwrap_or("copy")
        )
    })
}

/// Variables with their values here.
pub(super) fn variables(facts: &Facts, list: &[(&'static str, &'static str)]) -> Vec<Variable> {
    list.iter()
        .map(|&(name, effect)| Variable {
            name,
            value: facts.variable(name).map(str::to_owned),
            effect,
        })
        .collect()
}

/// `2.30.7` compares as (2, 30, 7).
pub(super) fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().ok());
    Some((
        numbers.next()??,
        numbers.next()??,
        numbers.next().flatten().unwrap_or(0),
    ))
}
