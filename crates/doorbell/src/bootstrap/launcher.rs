//! Rank, size and meeting place as launchers tell them: `mpirun`, `srun`, `torchrun`, or variables set by hand.
//!
//! A launcher sets environment variables in every process it starts. Ranks of one host meet at a Unix socket named after the
//! job; ranks of several hosts at a TCP address, which follows from what the launcher says, or is given as
//! `DOORBELL_RENDEZVOUS` or by the program.
//!
//! | launcher | rank and size | several hosts meet at |
//! |---|---|---|
//! | by hand | `DOORBELL_RANK`, `DOORBELL_WORLD` | `DOORBELL_RENDEZVOUS` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | the host of `mpirun`, if rank 0 runs there |
//! | MPICH, and others that speak PMI | `PMI_RANK`, `PMI_SIZE` | `DOORBELL_RENDEZVOUS` |
//! | torchrun | `RANK`, `WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` (one more if torchrun's own store is there) |
//! | srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | the first host of the step |

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::{Bootstrap, BootstrapError, Rendezvous, Result};
use crate::config::NO_TEXT;

/// Ports that are derived from a job's name: below those that systems hand out by themselves.
const PORTS: std::ops::Range<u16> = 15_000..32_000;
/// Longest part of a job's name in a socket's name.
const MAX_JOB: usize = 48;

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `DOORBELL_RANK` and `DOORBELL_WORLD`.
    ByHand,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpirun` or another that speaks PMI.
    Pmi,
    /// `torchrun`, or its variables.
    Torchrun,
    /// Slurm's `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ByHand => "DOORBELL_RANK",
            Self::OpenMpi => "mpirun (Open MPI)",
            Self::Pmi => "mpirun (PMI)",
            Self::Torchrun => "torchrun",
            Self::Slurm => "srun",
        })
    }
}

/// This process's place in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Who says so.
    pub launcher: Launcher,
    /// This process's rank, from 0.
    pub rank: u32,
    /// Number of ranks, at least 2.
    pub world: u32,
    /// Rank among those of this host, if known.
    pub local_rank: Option<u32>,
    /// Whether all ranks are on this host.
    pub one_host: bool,
    /// Names the job on this host.
    pub job: String,
    /// Where the ranks meet.
    pub rendezvous: Rendezvous,
}

/// The environment, or a test's.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What a launcher says, before it is known where to meet.
struct Told {
    launcher: Launcher,
    rank: u32,
    world: u32,
    local_rank: Option<u32>,
    local_world: Option<u32>,
    job: String,
    /// Where ranks of several hosts meet.
    far: Option<Rendezvous>,
}

impl Launched {
    /// What the environment says; `None` if nobody launched this process as one of several. `rendezvous`, or else
    /// `DOORBELL_RENDEZVOUS`, decides where to meet.
    pub fn detect(rendezvous: Option<&Rendezvous>) -> Result<Option<Self>> {
        let parent = rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get());
        Self::detect_in(rendezvous, parent, &|name| {
            std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
        })
    }

    fn detect_in(
        rendezvous: Option<&Rendezvous>,
        parent: i32,
        lookup: Lookup<'_>,
    ) -> Result<Option<Self>> {
        let vars = Vars { lookup, parent };
        // A mistake here is one whoever started this process.
        let chosen = match (rendezvous, vars.get("DOORBELL_RENDEZVOUS")) {
            (Some(at), _) => Some(at.clone()),
            (None, Some(text)) => match text.parse() {
                Ok(at) if !text.contains(NO_TEXT) => Some(at),
                _ => {
                    return Err(BootstrapError::Variable {
                        name: "DOORBELL_RENDEZVOUS",
                        value: text,
                        remedy: "give tcp:HOST:PORT, HOST being rank 0's, or unix:PATH",
                    });
                }
            },
            (None, None) => None,
        };
        if let Some(value) = vars.get("DOORBELL_JOB").filter(|job| job.contains(NO_TEXT)) {
            return Err(BootstrapError::Variable {
                name: "DOORBELL_JOB",
                value,
                remedy: "give a name of ASCII letters, digits, -, _ and .",
            });
        }
        let told = [by_hand, open_mpi, pmi, torchrun, slurm]
            .into_iter()
            .find_map(|ask| ask(&vars).transpose())
            .transpose()?;
        let Some(told) = told else {
            for half in halves(&vars) {
                tracing::warn!("{half}: this process goes on by itself");
            }
            return Ok(None);
        };
        if told.rank >= told.world {
            return Err(BootstrapError::Rank {
                rank: told.rank,
                world: told.world,
            });
        }
        if told.world == 1 {
            return Ok(None);
        }
        let one_host = told.local_world == Some(told.world);
        let rendezvous = match (chosen, told.far) {
            (Some(at), _) => at,
            (None, _) if one_host => Rendezvous::Unix(socket(&told.job)),
            (None, Some(at)) => at,
            (None, None) => {
                return Err(BootstrapError::NoRendezvous {
                    launcher: told.launcher,
                });
            }
        };
        Ok(Some(Self {
            launcher: told.launcher,
            rank: told.rank,
            world: told.world,
            local_rank: told.local_rank,
            one_host,
            job: told.job,
            rendezvous,
        }))
    }

    /// The rank alone, as the environment has it; nothing is met.
    pub(crate) fn rank_in(lookup: Lookup<'_>) -> Result<Option<u32>> {
        let vars = Vars { lookup, parent: 0 };
        // Who only wants to be named needs no more than this. Other launchers' variables may be anything.
        let by_name = vars.number("DOORBELL_RANK")?;
        Ok(by_name.or_else(|| {
            [open_mpi, pmi, torchrun, slurm]
                .into_iter()
                .find_map(|ask| ask(&vars).ok().flatten())
                .map(|told| told.rank)
        }))
    }

    /// Meets the other ranks.
    pub fn join(&self, timeout: Duration) -> Result<Bootstrap> {
        Bootstrap::join(&self.rendezvous, self.rank, self.world, timeout)
    }
}

impl fmt::Display for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} of {} by {}, meeting at {}",
            self.rank, self.world, self.launcher, self.rendezvous
        )
    }
}

struct Vars<'a> {
    lookup: Lookup<'a>,
    parent: i32,
}

impl Vars<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|v| !v.is_empty())
    }

    /// A number, if the variable is there; an error if it is none.
    fn number<T: FromStr>(&self, name: &'static str) -> Result<Option<T>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(BootstrapError::Variable {
                name,
                value,
                remedy: "it is not a number: give the launcher's own, or unset it",
            }),
        }
    }

    /// Rank and size, if both are there.
    fn place(&self, rank: &'static str, world: &'static str) -> Result<Option<(u32, u32)>> {
        Ok(self.number(rank)?.zip(self.number(world)?))
    }

    /// Ranks that one launcher started on this host have the same parent.
    fn job(&self, from: &str, id: Option<String>) -> String {
        let id = id.unwrap_or_else(|| format!("p{}", self.parent));
        let mut job = format!("{from}-{id}");
        job.retain(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        job.truncate(MAX_JOB);
        job
    }
}

/// Variables that are no job by themselves, and what they lack. A rank alone may be by hand, and is in Slurm's batch scripts: it names a process.
fn halves(vars: &Vars<'_>) -> Vec<String> {
    const GROUPS: [&[&str]; 3] = [
        &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        &["PMI_RANK", "PMI_SIZE"],
        &["RANK", "WORLD_SIZE", "MASTER_ADDR"],
    ];
    let groups = GROUPS.iter().filter_map(|group| {
        let (set, lacks): (Vec<&str>, Vec<&str>) =
            group.iter().partition(|name| vars.get(name).is_some());
        // One of torchrun's three is often set for something else.
        let enough = set.len() + 1 == group.len();
        enough.then(|| {
            format!(
                "{} is set without {}",
                set.join(" and "),
                lacks.join(" and ")
            )
        })
    });
    let world = "DOORBELL_WORLD is set without DOORBELL_RANK";
    let alone = vars.get("DOORBELL_WORLD").is_some() && vars.get("DOORBELL_RANK").is_none();
    groups.chain(alone.then(|| world.to_owned())).collect()
}

fn by_hand(vars: &Vars<'_>) -> Result<Option<Told>> {
    let name = "DOORBELL_WORLD";
    if vars.number::<u32>(name)? == Some(0) {
        return Err(BootstrapError::Variable {
            name,
            value: "0".to_owned(),
            remedy: "give the number of ranks, from 1",
        });
    }
    let Some((rank, world)) = vars.place("DOORBELL_RANK", name)? else {
        return Ok(None);
    };
    Ok(Some(Told {
        launcher: Launcher::ByHand,
        rank,
        world,
        local_rank: None,
        local_world: None,
        job: vars.job("job", vars.get("DOORBELL_JOB")),
        far: None,
    }))
}

fn open_mpi(vars: &Vars<'_>) -> Result<Option<Told>> {
    let Some((rank, world)) = vars.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")? else {
        return Ok(None);
    };
    let id = vars
        .get("PMIX_NAMESPACE")
        .or_else(|| vars.get("OMPI_MCA_ess_base_jobid"));
    let job = vars.job("ompi", id);
    // `JOBID;tcp://ADDR[,ADDR…]:PORT[;tcp6://…]`: where mpirun itself listens.
    let host = vars.get("OMPI_MCA_orte_hnp_uri").and_then(|uri| {
        let (_, rest) = uri.split_once("tcp://")?;
        let end = rest.find([',', ':', ';'])?;
        Some(rest[..end].to_owned()).filter(|h| !h.is_empty())
    });
    Ok(Some(Told {
        launcher: Launcher::OpenMpi,
        rank,
        world,
        local_rank: vars.number("OMPI_COMM_WORLD_LOCAL_RANK")?,
        local_world: vars.number("OMPI_COMM_WORLD_LOCAL_SIZE")?,
        far: host.map(|h| Rendezvous::Tcp(format!("{h}:{}", port_of(&job)))),
        job,
    }))
}

fn pmi(vars: &Vars<'_>) -> Result<Option<Told>> {
    let Some((rank, world)) = vars.place("PMI_RANK", "PMI_SIZE")? else {
        return Ok(None);
    };
    // srun speaks PMI too, and says more itself.
    let by_slurm = vars.get("SLURM_PROCID") == Some(rank.to_string())
        && vars.get("SLURM_STEP_NUM_TASKS") == Some(world.to_string());
    if by_slurm {
        return slurm(vars);
    }
    Ok(Some(Told {
        launcher: Launcher::Pmi,
        rank,
        world,
        local_rank: vars.number("MPI_LOCALRANKID")?,
        local_world: vars.number("MPI_LOCALNRANKS")?,
        job: vars.job("pmi", None),
        far: None,
    }))
}

fn torchrun(vars: &Vars<'_>) -> Result<Option<Told>> {
    let Some(host) = vars.get("MASTER_ADDR") else {
        return Ok(None);
    };
    let Some((rank, world)) = vars.place("RANK", "WORLD_SIZE")? else {
        return Ok(None);
    };
    let port: Option<u16> = vars.number("MASTER_PORT")?;
    let id = vars.get("TORCHELASTIC_RUN_ID").unwrap_or_default();
    // The agent's own store listens at MASTER_PORT.
    let taken = vars.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    let store = port.and_then(|p| p.checked_add(taken.into()));
    let host = match host.parse::<std::net::Ipv6Addr>() {
        Ok(v6) => format!("[{v6}]"),
        Err(_) => host,
    };
    Ok(Some(Told {
        launcher: Launcher::Torchrun,
        rank,
        world,
        local_rank: vars.number("LOCAL_RANK")?,
        local_world: vars.number("LOCAL_WORLD_SIZE")?,
        job: vars.job("torch", port.map(|p| format!("{id}-{p}"))),
        far: store.map(|port| Rendezvous::Tcp(format!("{host}:{port}"))),
    }))
}

fn slurm(vars: &Vars<'_>) -> Result<Option<Told>> {
    // A batch script has a SLURM_PROCID too; only a step has a size.
    let Some((rank, world)) = vars.place("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")? else {
        return Ok(None);
    };
    let nodes: Option<u32> = vars.number("SLURM_STEP_NUM_NODES")?;
    let id = vars
        .get("SLURM_JOB_ID")
        .map(|job| format!("{job}.{}", vars.get("SLURM_STEP_ID").unwrap_or_default()));
    let job = vars.job("slurm", id);
    let first = vars
        .get("SLURM_STEP_NODELIST")
        .or_else(|| vars.get("SLURM_JOB_NODELIST"))
        .and_then(|list| first_host(&list));
    Ok(Some(Told {
        launcher: Launcher::Slurm,
        rank,
        world,
        local_rank: vars.number("SLURM_LOCALID")?,
        local_world: nodes.filter(|&n| n == 1).map(|_| world),
        far: first.map(|h| Rendezvous::Tcp(format!("{h}:{}", port_of(&job)))),
        job,
    }))
}

/// The first host of a Slurm list such as `gpu[03-07,9],login`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let at = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..at]);
        match rest[at..].strip_prefix('[') {
            None => break,
            Some(inside) => {
                let (numbers, after) = inside.split_once(']')?;
                host.push_str(numbers.split([',', '-']).next()?);
                rest = after;
            }
        }
    }
    Some(host).filter(|h| !h.is_empty())
}

/// A port that all ranks derive alike.
fn port_of(job: &str) -> u16 {
    // FNV-1a: small, and the same in every release.
    let hash = job.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    PORTS.start + (hash % u32::from(PORTS.end - PORTS.start)) as u16
}

/// The socket of a job: in a directory of this user if there is one.
fn socket(job: &str) -> PathBuf {
    let dir = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|d| d.is_absolute() && d.as_os_str().len() < 40 && d.is_dir())
        .unwrap_or_else(|| PathBuf::from("/tmp"));
    let user = rustix::process::geteuid().as_raw();
    dir.join(format!("doorbell-{user}-{job}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(vars: &[(&str, &str)]) -> Result<Option<Launched>> {
        Launched::detect_in(None, 77, &|name| {
            let found = vars.iter().find(|(k, _)| *k == name);
            found.map(|(_, v)| (*v).to_owned())
        })
    }

    fn found(vars: &[(&str, &str)]) -> Launched {
        detect(vars).unwrap().expect("a launcher")
    }

    fn tcp(launched: &Launched) -> &str {
        match &launched.rendezvous {
            Rendezvous::Tcp(at) => at,
            other => panic!("{other}"),
        }
    }

    const OMPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("PMIX_NAMESPACE", "351338497"),
        (
            "OMPI_MCA_orte_hnp_uri",
            "351338496.0;tcp://192.0.2.2,198.51.100.1:47051;tcp6://[fd00::2]:44125",
        ),
    ];

    fn with<'a>(
        base: &[(&'a str, &'a str)],
        more: &[(&'a str, &'a str)],
    ) -> Vec<(&'a str, &'a str)> {
        more.iter().chain(base).copied().collect()
    }

    #[test]
    fn half_a_job_is_named() {
        let halves_of = |set: &[&str]| {
            halves(&Vars {
                lookup: &|name| set.contains(&name).then(|| "1".to_owned()),
                parent: 0,
            })
        };
        assert_eq!(
            halves_of(&["PMI_SIZE"]),
            ["PMI_SIZE is set without PMI_RANK"]
        );
        assert_eq!(
            halves_of(&["DOORBELL_WORLD"]),
            ["DOORBELL_WORLD is set without DOORBELL_RANK"]
        );
        assert_eq!(
            halves_of(&["RANK", "WORLD_SIZE"]),
            ["RANK and WORLD_SIZE is set without MASTER_ADDR"]
        );
        for nothing in [&["RANK"][..], &["DOORBELL_RANK"], &["SLURM_PROCID"], &[]] {
            assert!(halves_of(nothing).is_empty(), "{nothing:?}");
        }
    }

    #[test]
    fn open_mpi_on_one_host_and_on_several() {
        let one = found(&with(&OMPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]));
        assert_eq!((one.rank, one.world, one.local_rank), (1, 4, Some(1)));
        assert_eq!((one.launcher, one.one_host), (Launcher::OpenMpi, true));
        let at = one.rendezvous.to_string();
        assert!(
            at.starts_with("unix:/") && at.ends_with("ompi-351338497"),
            "{at}"
        );
        let two = found(&with(&OMPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]));
        assert!(!two.one_host);
        let (host, port) = tcp(&two).split_once(':').unwrap();
        assert_eq!(host, "192.0.2.2");
        assert!(PORTS.contains(&port.parse().unwrap()), "{port}");
    }

    #[test]
    fn mpich_meets_by_its_parent_and_needs_a_place_on_several_hosts() {
        let base = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
        ];
        let one = found(&with(&base, &[("MPI_LOCALNRANKS", "2")]));
        assert!(one.rendezvous.to_string().ends_with("pmi-p77"), "{one}");
        let error = detect(&with(&base, &[("MPI_LOCALNRANKS", "1")])).unwrap_err();
        assert!(error.to_string().contains("DOORBELL_RENDEZVOUS"), "{error}");
        let at = ("DOORBELL_RENDEZVOUS", "tcp:head:9000");
        let two = found(&with(&base, &[("MPI_LOCALNRANKS", "1"), at]));
        assert_eq!(tcp(&two), "head:9000");
    }

    #[test]
    fn torchrun_leaves_its_own_store_alone() {
        let base = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "3"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
        ];
        assert_eq!(tcp(&found(&base)), "10.0.0.1:29500");
        let agent = [
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("LOCAL_WORLD_SIZE", "4"),
        ];
        assert_eq!(tcp(&found(&with(&base, &agent))), "10.0.0.1:29501");
        let one = found(&with(&base, &[("LOCAL_WORLD_SIZE", "8")]));
        let at = one.rendezvous.to_string();
        assert!(at.ends_with("torch-none-29500"), "{at}");
        let v6 = found(&with(&base, &[("MASTER_ADDR", "fd00::1")]));
        assert_eq!(tcp(&v6), "[fd00::1]:29500");
        // Variables that only look like it.
        assert_eq!(detect(&base[..3]).unwrap(), None);
    }

    #[test]
    fn slurm_steps_but_not_batch_scripts() {
        let script = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "4242"),
        ];
        assert_eq!(detect(&script).unwrap(), None);
        let step = with(
            &script,
            &[
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("SLURM_STEP_ID", "1"),
                ("SLURM_LOCALID", "0"),
                ("SLURM_STEP_NODELIST", "gpu[03-07,9],login"),
            ],
        );
        let two = found(&with(&step, &[("SLURM_STEP_NUM_NODES", "2")]));
        assert!(tcp(&two).starts_with("gpu03:"), "{two}");
        let one = found(&with(&step, &[("SLURM_STEP_NUM_NODES", "1")]));
        let at = one.rendezvous.to_string();
        assert!(at.ends_with("slurm-4242.1"), "{at}");
        // The same port everywhere, another one for another step.
        let later = found(&with(
            &step,
            &[("SLURM_STEP_ID", "2"), ("SLURM_STEP_NUM_NODES", "2")],
        ));
        assert_ne!(tcp(&two), tcp(&later));
        let pmi = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("SLURM_STEP_NUM_NODES", "2"),
        ];
        assert_eq!(found(&with(&step, &pmi)).launcher, Launcher::Slurm);
    }

    #[test]
    fn first_hosts() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b", Some("a")),
            ("n[1-3]", Some("n1")),
            ("n[007,9]x,y", Some("n007x")),
            ("r[1-2]n[05-06]", Some("r1n05")),
            ("n[1", None),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        let error = detect(&[("DOORBELL_RANK", "x"), ("DOORBELL_WORLD", "2")]).unwrap_err();
        assert!(error.to_string().contains("DOORBELL_RANK"), "{error}");
        // Also where it alone is set.
        let error = detect(&[("DOORBELL_WORLD", "0")]).unwrap_err();
        assert!(error.to_string().contains("from 1"), "{error}");
        let error = detect(&[("DOORBELL_RANK", "2"), ("DOORBELL_WORLD", "2")]).unwrap_err();
        assert!(matches!(error, BootstrapError::Rank { .. }), "{error}");
        let hand = [
            ("DOORBELL_RANK", "1"),
            ("DOORBELL_WORLD", "2"),
            ("DOORBELL_RENDEZVOUS", "nowhere"),
        ];
        assert!(matches!(
            detect(&hand),
            Err(BootstrapError::Variable { .. })
        ));
        assert!(matches!(
            detect(&hand[..2]),
            Err(BootstrapError::NoRendezvous { .. })
        ));
        assert_eq!(detect(&[]).unwrap(), None);
        let alone = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
        assert_eq!(detect(&alone).unwrap(), None);
    }

    #[test]
    fn a_name_with_anything_in_it_makes_a_plain_socket() {
        let vars = with(
            &OMPI,
            &[
                (
                    "PMIX_NAMESPACE",
                    "../../etc/passwd \u{1f600} prterun-host-4711@1",
                ),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ],
        );
        let job = found(&vars).job;
        assert!(job.len() <= MAX_JOB && !job.contains('/'), "{job}");
    }
}
