//! Where engine threads run: CPUs that this process may use, near the GPU, a physical core each, within the cgroup's quota, and not where an
//! engine thread of another process runs: of two that spin on one CPU, each waits until the other has spun enough.
//! Reads sysfs and the cgroup once; what was chosen is explained in words, for `doorbell info`.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open};
use rustix::io::Errno;

use crate::config::{Affinity, Cores, HcaConfig};

/// The CPUs chosen.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Placement {
    /// One CPU per engine thread; empty if the threads are not bound.
    pub cpus: Vec<usize>,
    /// Why these.
    pub why: String,
}

/// What there is to choose from.
#[derive(Clone, Debug, Default, PartialEq)]
struct Host {
    /// CPUs this process may run on.
    allowed: Vec<usize>,
    /// CPU to (package, core): hardware threads of one physical core share it.
    core_of: BTreeMap<usize, (u32, u32)>,
    /// NUMA node to its CPUs.
    nodes: BTreeMap<u32, Vec<usize>>,
    /// CPUs' worth of time that the cgroup grants, if it limits it.
    quota: Option<f64>,
}

/// CPUs that nobody else who uses Doorbell takes while this lives.
#[derive(Debug, Default)]
pub(crate) struct Claims(Vec<OwnedFd>);

impl Claims {
    /// Claims a CPU by a lock on a file that is named for it; `false` if another HCA on this host, of whatever process, has it. Where locks
    /// cannot be had, every CPU counts as free.
    fn take(&mut self, cpu: usize) -> bool {
        let path = format!("/dev/shm/doorbell-cpu-{cpu}");
        // Another user's file can be opened, and locked, but not created again. Anybody may have put anything there: opening a pipe would wait for its other end.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let opened = open(&path, flags, Mode::empty()).or_else(|_| {
            let mode = Mode::RUSR | Mode::RGRP | Mode::ROTH;
            open(&path, flags | OFlags::CREATE, mode)
        });
        let Ok(file) = opened else { return true };
        if !fstat(&file).is_ok_and(|s| FileType::from_raw_mode(s.st_mode).is_file()) {
            return true;
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                self.0.push(file);
                true
            }
            Err(e) => e != Errno::WOULDBLOCK,
        }
    }
}

/// Where the engine threads go. The claims last as long as they run.
pub(crate) fn choose(config: &HcaConfig) -> (Placement, Claims) {
    let mut claims = Claims::default();
    let placement = choose_with(config, |cpu| claims.take(cpu));
    if placement.cpus.is_empty() {
        claims = Claims::default();
    }
    (placement, claims)
}

fn choose_with(config: &HcaConfig, free: impl FnMut(usize) -> bool) -> Placement {
    let Cores::Threads(threads) = config.cores else {
        return Placement {
            cpus: Vec::new(),
            why: "caller-driven: no engine threads".into(),
        };
    };
    match &config.affinity {
        Affinity::None => Placement {
            cpus: Vec::new(),
            why: "engine threads are not bound (asked for)".into(),
        },
        Affinity::Cpus(cpus) => Placement {
            cpus: (0..threads)
                .filter_map(|i| cpus.get(i % cpus.len().max(1)).copied())
                .collect(),
            why: format!("engine threads on CPUs {cpus:?} (asked for)"),
        },
        Affinity::Auto => plan(&Host::read(), threads, None, free),
        Affinity::Near { numa } => plan(&Host::read(), threads, Some(*numa), free),
    }
}

fn plan(
    host: &Host,
    threads: usize,
    numa: Option<u32>,
    mut free: impl FnMut(usize) -> bool,
) -> Placement {
    let mut why = Vec::new();
    let mut pool = host.allowed.clone();
    if let Some(node) = numa {
        let near: Vec<usize> = host
            .nodes
            .get(&node)
            .map(|cpus| pool.iter().copied().filter(|c| cpus.contains(c)).collect())
            .unwrap_or_default();
        if near.is_empty() {
            why.push(format!(
                "NUMA node {node} has no CPU that this process may use"
            ));
        } else {
            why.push(format!("NUMA node {node}"));
            pool = near;
        }
    }
    let quota = host.quota.unwrap_or(f64::INFINITY);
    // Binding is only for hosts with room: a bound spinner that shares its CPU with the poster would halve both, and the kernel would
    // not move either of them.
    let usable = (pool.len() as f64).min(quota);
    if (threads as f64) + 1.0 > usable {
        why.insert(0, format!(
            "engine threads are not bound: {threads} of them and at least one poster want more than the {} CPUs there are{}",
            pool.len(),
            host.quota.map(|q| format!(" (cgroup quota {q:.1})")).unwrap_or_default(),
        ));
        return Placement {
            cpus: Vec::new(),
            why: why.join("; "),
        };
    }
    // Highest first (interrupts and init live on the lowest), one hardware thread of each physical core before any second one.
    let mut seen = BTreeMap::new();
    let mut ranked: Vec<(usize, usize)> = pool
        .iter()
        .rev()
        .map(|&cpu| {
            let turn = seen
                .entry(
                    host.core_of
                        .get(&cpu)
                        .copied()
                        .unwrap_or((u32::MAX, cpu as u32)),
                )
                .or_insert(0usize);
            *turn += 1;
            (*turn, cpu)
        })
        .collect();
    ranked.sort_by_key(|&(turn, cpu)| (turn, usize::MAX - cpu));
    let order = ranked.iter().map(|&(_, cpu)| cpu);
    let cpus: Vec<usize> = order.filter(|&cpu| free(cpu)).take(threads).collect();
    if cpus.len() < threads {
        why.insert(
            0,
            format!(
                "engine threads are not bound: of {} CPUs only {} have no engine thread of another process",
                pool.len(),
                cpus.len()
            ),
        );
        return Placement {
            cpus: Vec::new(),
            why: why.join("; "),
        };
    }
    why.insert(
        0,
        format!(
            "engine threads on CPUs {cpus:?} of {} allowed, physical cores first",
            host.allowed.len()
        ),
    );
    if let Some(quota) = host.quota {
        why.push(format!("cgroup quota {quota:.1} CPUs"));
    }
    Placement {
        cpus,
        why: why.join("; "),
    }
}

impl Host {
    fn read() -> Self {
        let allowed = allowed_cpus();
        let cpu_dir = Path::new("/sys/devices/system/cpu");
        let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u32>().ok();
        let core_of = allowed
            .iter()
            .filter_map(|&cpu| {
                let topology = cpu_dir.join(format!("cpu{cpu}/topology"));
                Some((
                    cpu,
                    (
                        number(topology.join("physical_package_id"))?,
                        number(topology.join("core_id"))?,
                    ),
                ))
            })
            .collect();
        let nodes = fs::read_dir("/sys/devices/system/node")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let node = entry
                    .file_name()
                    .to_str()?
                    .strip_prefix("node")?
                    .parse()
                    .ok()?;
                let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
                Some((node, parse_list(&list)))
            })
            .collect();
        Self {
            allowed,
            core_of,
            nodes,
            quota: cgroup_quota(),
        }
    }
}

fn allowed_cpus() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// The tightest quota of this process's cgroup (version 2) and its parents, in CPUs.
fn cgroup_quota() -> Option<f64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own
        .lines()
        .find_map(|l| l.strip_prefix("0::"))?
        .trim_start_matches('/');
    let root = Path::new("/sys/fs/cgroup");
    let mut at = root.join(path);
    let mut tightest: Option<f64> = None;
    while at.starts_with(root) {
        if let Some(q) = fs::read_to_string(at.join("cpu.max"))
            .ok()
            .as_deref()
            .and_then(parse_cpu_max)
        {
            tightest = Some(tightest.map_or(q, |t| t.min(q)));
        }
        if !at.pop() {
            break;
        }
    }
    tightest
}

/// `"200000 100000"` is two CPUs; `"max 100000"` is no limit.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let quota: f64 = words.next()?.parse().ok()?;
    let period: f64 = words.next()?.parse().ok()?;
    (period > 0.0).then(|| quota / period)
}

/// `"0-3,8"` is 0, 1, 2, 3, 8.
fn parse_list(text: &str) -> Vec<usize> {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            Some(from.parse::<usize>().ok()?..=to.parse::<usize>().ok()?)
        })
        .flatten()
        .collect()
}

/// Binds the calling thread; a refusal is logged, not fatal.
pub(crate) fn bind_current_thread(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        tracing::warn!("CPU {cpu} does not exist; the engine thread stays unbound");
        return;
    }
    set.set(cpu);
    if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!("cannot bind an engine thread to CPU {cpu}: {e}; it stays unbound");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(cpus: usize, threads_per_core: usize) -> Host {
        Host {
            allowed: (0..cpus).collect(),
            core_of: (0..cpus)
                .map(|c| (c, (0, (c % (cpus / threads_per_core)) as u32)))
                .collect(),
            nodes: [
                (0, (0..cpus / 2).collect()),
                (1, (cpus / 2..cpus).collect()),
            ]
            .into(),
            quota: None,
        }
    }

    #[test]
    fn physical_cores_come_first() {
        let plan = plan(&host(8, 2), 3, None, |_| true);
        let mut cores: Vec<usize> = plan.cpus.iter().map(|c| c % 4).collect();
        cores.sort_unstable();
        cores.dedup();
        assert_eq!(cores.len(), 3, "{plan:?}");
    }

    #[test]
    fn near_the_gpu_if_possible() {
        let near = plan(&host(8, 1), 2, Some(0), |_| true);
        assert!(near.cpus.iter().all(|c| *c < 4), "{near:?}");
        let none = plan(&host(8, 1), 2, Some(7), |_| true);
        assert_eq!(none.cpus.len(), 2);
        assert!(none.why.contains("node 7"), "{none:?}");
    }

    #[test]
    fn scarce_cpus_are_not_bound() {
        assert!(plan(&host(2, 1), 2, None, |_| true).cpus.is_empty());
        let limited = Host {
            quota: Some(2.0),
            ..host(8, 1)
        };
        assert!(plan(&limited, 2, None, |_| true).cpus.is_empty());
        assert!(plan(&limited, 2, None, |_| true).why.contains("quota 2.0"));
        assert_eq!(plan(&limited, 1, None, |_| true).cpus.len(), 1);
    }

    #[test]
    fn no_two_hcas_take_one_cpu() {
        let second = plan(&host(8, 2), 2, None, |cpu| cpu < 6);
        assert_eq!(second.cpus, [5, 4], "{second:?}");
        let crowded = plan(&host(8, 2), 2, None, |cpu| cpu == 0);
        assert!(
            crowded.cpus.is_empty() && crowded.why.contains("only 1"),
            "{crowded:?}"
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "locks files")]
    fn a_claim_lasts_as_long_as_its_owner() {
        // No machine has so many.
        let cpu = 1 << 40 | std::process::id() as usize;
        let (mut one, mut two) = (Claims::default(), Claims::default());
        assert!(one.take(cpu));
        assert!(!two.take(cpu));
        drop(one);
        assert!(two.take(cpu));
        fs::remove_file(format!("/dev/shm/doorbell-cpu-{cpu}")).expect("it was made");
    }

    #[test]
    #[cfg_attr(miri, ignore = "makes a pipe")]
    fn what_is_no_file_is_nobodys_claim_and_keeps_nobody_waiting() {
        let cpu = 1 << 41 | std::process::id() as usize;
        let path = format!("/dev/shm/doorbell-cpu-{cpu}");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR).expect("a pipe");
        let (mut one, mut two) = (Claims::default(), Claims::default());
        let free = (one.take(cpu), two.take(cpu));
        fs::remove_file(path).expect("it was made");
        assert_eq!(free, (true, true));
    }

    #[test]
    fn kernel_formats() {
        assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_list(""), []);
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(1.5));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
    }
}
