//! Settings: what they are, where each value came from, and why.
//!
//! An argument wins over a `DOORBELL_*` variable, which wins over the default. [`Config`] holds the arguments,
//! [`Config::resolve`] adds the rest, and [`Settings::explain`] lists the outcome for `doorbell info`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use doorbell_gpu::GpuSelect;

use crate::connect::PATH_MTUS;
use crate::faults::{self, Script};
use crate::qp::Handler;
use crate::{Error, Launched};

mod values;

pub use values::{HcaCores, OnError, Recorder, Source};

/// One line of [`Settings::explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Short name.
    pub name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// The value in force, as it would be written.
    pub value: String,
    /// Where it came from.
    pub source: Source,
    /// What it decides, and why this value if nobody chose it.
    pub why: String,
}

/// What the program asks for; `None` leaves the setting to the environment and then to the default.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Which GPU runs kernels (`DOORBELL_GPU`: `auto`, `host`, `cuda`, `cuda:N`).
    pub gpu: Option<GpuSelect>,
    /// Who runs the software HCA (`DOORBELL_HCA_CORES`: a number, or `caller`).
    pub hca_cores: Option<HcaCores>,
    /// How a QP is rung unless its builder says otherwise (`DOORBELL_HANDLER`: `record`, `only`, `producer`).
    pub handler: Option<Handler>,
    /// Slots of a send queue unless its builder says otherwise (`DOORBELL_DEPTH`): a power of two, 1 to 32768.
    pub depth: Option<u32>,
    /// How long destroying something waits for it to fall quiet before it is leaked (`DOORBELL_QUIESCE_MS`).
    pub quiesce: Option<Duration>,
    /// Run host kernels as emulated 32-lane warps, slowly (`DOORBELL_HOST_WARP`: `1` or `32`).
    pub emulate_warp: Option<bool>,
    /// What happens to foreign kernels on a failed QP (`DOORBELL_ON_ERROR`: `report` or `release`).
    pub on_error: Option<OnError>,
    /// What the flight recorder keeps (`DOORBELL_RECORD`: `on`, `off`, or events of a queue pair).
    pub record: Option<Recorder>,
    /// Write a trace for Perfetto here when the device is closed (`DOORBELL_TRACE`); `%p` stands for the process.
    pub trace: Option<PathBuf>,
    /// Through which port RoCE packets go (`DOORBELL_ROCE`): `udp` (at the address of the default route),
    /// `udp://ADDR[:PORT]`, `raw:IFNAME`, `dgram:LOCAL,REMOTE`.
    pub roce: Option<String>,
    /// Which RDMA device carries queue pairs that are connected over verbs (`DOORBELL_VERBS`): `DEVICE[:PORT][?gid=N]`, or `auto`.
    pub verbs: Option<String>,
    /// Payload of a packet over RoCE and verbs at most (`DOORBELL_ROCE_MTU`): 256, 512, 1024, 2048 or 4096; what fits the port unless
    /// said otherwise.
    pub roce_mtu: Option<u16>,
    /// Code of the time without acknowledgement after which a RoCE QP repeats (`DOORBELL_ROCE_TIMEOUT`): 4.096 µs times
    /// two to this power, 1 to 31.
    pub roce_timeout: Option<u8>,
    /// How often it repeats before it gives up (`DOORBELL_ROCE_RETRY`): 0 to 7.
    pub roce_retry: Option<u8>,
    /// What is put around the RoCE port, for who looks for faults.
    pub roce_wrap: RoceWrap,
    /// How long another process may stand still before it is no peer any more, by whatever link: set by who knows how long a job bears it. Else 5 s over
    /// shared memory, and over RoCE what `roce_timeout` and `roce_retry` say.
    pub patience: Option<Duration>,
    /// Faults to play (`DOORBELL_FAULT`): rules, or `@FILE`; see [`crate::faults`].
    pub fault: Option<String>,
    /// Which process of several this is, for rules with `rank=`; else as the launcher's variables say, else 0.
    pub rank: Option<u32>,
    /// What takes the place of the usual defaults.
    pub otherwise: Otherwise,
}

/// Defaults of a program that knows better than Doorbell's own: variables win over them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Otherwise {
    /// Of [`Config::hca_cores`].
    pub hca_cores: Option<HcaCores>,
    /// Of [`Config::roce`].
    pub roce: Option<String>,
    /// Of [`Config::verbs`].
    pub verbs: Option<String>,
}

/// What is put around a RoCE port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoceWrap {
    /// Every packet is written to this pcapng file, which Wireshark dissects.
    pub pcap: Option<PathBuf>,
    /// Faults to inject, as `loss=0.01,dup=0.01,reorder=0.01,delay=…,corrupt=…,seed=N`.
    pub fault: Option<String>,
    /// Every packet is logged, at level `info`.
    pub trace: bool,
}

/// The settings in force.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which GPU was asked for.
    pub gpu: GpuSelect,
    /// Who runs the software HCA.
    pub hca_cores: HcaCores,
    /// How QPs are rung by default.
    pub handler: Handler,
    /// Slots of a send queue by default.
    pub depth: u32,
    /// Deadline of destruction.
    pub quiesce: Duration,
    /// Whether host kernels run as emulated warps.
    pub emulate_warp: bool,
    /// What happens to foreign kernels on a failed QP.
    pub on_error: OnError,
    /// What the flight recorder keeps.
    pub record: Recorder,
    /// Where a trace goes when the device is closed.
    pub trace: Option<PathBuf>,
    /// Through which port RoCE packets go.
    pub roce: String,
    /// Which RDMA device carries queue pairs that are connected over verbs.
    pub verbs: String,
    /// Payload of a RoCE packet at most; `None`: what fits the port.
    pub roce_mtu: Option<u16>,
    /// Code of the time after which a RoCE QP repeats; 0: it never gives up, as [`patience`](Config::patience) may ask for.
    pub roce_timeout: u8,
    /// How often it repeats.
    pub roce_retry: u8,
    /// What is put around the RoCE port.
    pub roce_wrap: RoceWrap,
    /// How long a process of this host may stand still.
    pub patience: Duration,
    /// Rank in its job, if it has one.
    pub rank: Option<u32>,
    /// Faults to play; rules for another rank are not.
    pub fault: Script,
    explained: Vec<Setting>,
}

impl Settings {
    /// Why a setting that a variable has cannot be used after all, which showed when it was; `None` if it is no variable's.
    pub(crate) fn variable_fails(&self, name: &str, why: impl fmt::Display) -> Option<Error> {
        let line = self.explained.iter().find(|l| l.name == name)?;
        (line.source == Source::Variable).then(|| Error::Setting {
            name: line.variable,
            value: line.value.clone(),
            origin: line.source,
            remedy: format!("{why}; give another, or unset it"),
        })
    }

    /// Where this process's trace goes.
    pub(crate) fn trace_file(&self) -> Option<PathBuf> {
        self.trace.as_deref().map(for_this_process)
    }

    /// Looks whether the trace that is asked for could be written: that is when all is over, and what cannot be is to be known before anything begins.
    ///
    /// # Errors
    /// What the system says, with the variable's name if it was one.
    pub fn check_trace(&self) -> crate::Result<()> {
        let Some(path) = self.trace_file() else {
            return Ok(());
        };
        let checked = crate::report::trace::check(&path);
        checked.map_err(|e| self.variable_fails("trace", &e).unwrap_or(e))
    }

    /// Every setting with its value, where that came from, and why.
    pub fn explain(&self) -> &[Setting] {
        &self.explained
    }
}

/// Why a queue pair repeats for longer than it otherwise does.
const PATIENT: &str = "the job bears a peer that stands still for so long";

/// The code of a RoCE time-out that lasts so long with seven repetitions; `None` if the usual one does. 0, without end, where none does: the longest ones
/// repeat after minutes, and so long would a lost packet be missed.
fn patient_code(time: Duration) -> Option<u8> {
    let lasts = |code: &u8| Duration::from_nanos(8 * (4096 << code)) >= time;
    let code = (17..=31).find(lasts).unwrap_or(0);
    (code != 17).then_some(code)
}

/// What stands for what is no Unicode, as it is shown: names of files have it for nothing else.
pub(crate) const NO_TEXT: char = char::REPLACEMENT_CHARACTER;

/// Parses what a variable says, or explains what it may say.
fn depth(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(n) if n.is_power_of_two() && n <= doorbell_device::layout::MAX_DEPTH => Ok(n),
        _ => Err("give a power of two from 1 to 32768".to_owned()),
    }
}

fn millis(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(n @ 1..=3_600_000) => Ok(Duration::from_millis(n)),
        _ => Err("give milliseconds, from 1 to 3600000".to_owned()),
    }
}

fn warp(text: &str) -> Result<bool, String> {
    match text {
        "1" => Ok(false),
        "32" => Ok(true),
        _ => Err("give 1 (fast) or 32 (emulated warps)".to_owned()),
    }
}

fn mtu(text: &str) -> Result<Option<u16>, String> {
    match text.parse() {
        _ if text == "auto" => Ok(None),
        Ok(mtu) if PATH_MTUS.contains(&mtu) => Ok(Some(mtu)),
        _ => Err("give 256, 512, 1024, 2048 or 4096, or auto".to_owned()),
    }
}

fn small(from: u8, to: u8) -> impl Fn(&str) -> Result<u8, String> {
    move |text| match text.parse() {
        Ok(n) if (from..=to).contains(&n) => Ok(n),
        _ => Err(format!("give a number from {from} to {to}")),
    }
}

/// A file name in which `%p` is the process, so that those of a job do not write over each other.
pub(crate) fn for_this_process(path: &std::path::Path) -> PathBuf {
    match path.to_str() {
        Some(text) => PathBuf::from(text.replace("%p", &std::process::id().to_string())),
        None => path.to_owned(),
    }
}

struct Resolver<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    lines: Vec<Setting>,
}

impl Resolver<'_> {
    /// `print` writes the value the way `parse` reads it.
    fn pick<T: Clone>(
        &mut self,
        (name, variable, why): (&'static str, &'static str, &str),
        argument: Option<T>,
        default: (T, &str),
        parse: impl Fn(&str) -> Result<T, String>,
        print: impl Fn(T) -> String,
    ) -> Result<T, Error> {
        let found = (self.lookup)(variable).filter(|v| !v.is_empty());
        let (value, source, because) = match (argument, found) {
            (Some(value), _) => {
                // Arguments obey the same rules as variables: what parses back is what is allowed.
                parse(&print(value.clone())).map_err(|remedy| Error::Setting {
                    name,
                    value: print(value.clone()),
                    origin: Source::Argument,
                    remedy,
                })?;
                (value, Source::Argument, "")
            }
            (None, Some(text)) => match parse(&text) {
                Ok(value) if !text.contains(NO_TEXT) => (value, Source::Variable, ""),
                Ok(_) => {
                    return Err(Error::Setting {
                        name: variable,
                        value: text,
                        origin: Source::Variable,
                        remedy: "it is no Unicode text: give it as UTF-8".to_owned(),
                    });
                }
                Err(remedy) => {
                    return Err(Error::Setting {
                        name: variable,
                        value: text,
                        origin: Source::Variable,
                        remedy,
                    });
                }
            },
            (None, None) => (default.0, Source::Default, default.1),
        };
        let why = if because.is_empty() {
            why.to_owned()
        } else {
            format!("{why}; {because}")
        };
        self.lines.push(Setting {
            name,
            variable,
            value: print(value.clone()),
            source,
            why,
        });
        Ok(value)
    }
}

impl Config {
    /// Adds the environment and the defaults. An unusable variable is an error, never ignored.
    pub fn resolve(&self) -> Result<Settings, Error> {
        crate::variables::warn_of_near_misses();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // What is no Unicode cannot be right either, and is shown as far as it can be.
        self.resolve_with(cores, &|name| {
            std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
        })
    }

    fn resolve_with(
        &self,
        cores: usize,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Settings, Error> {
        // Whether or not the GPU in force has copies: a value is a mistake on every machine or on none.
        doorbell_gpu::check_variables(lookup)?;
        let mut r = Resolver {
            lookup,
            lines: Vec::new(),
        };
        let gpu = r.pick(
            ("gpu", "DOORBELL_GPU", "which GPU runs kernels"),
            self.gpu,
            (
                GpuSelect::Auto,
                "a CUDA GPU if there is one, else threads of this process",
            ),
            |s| GpuSelect::from_str(s).map_err(|_| "give auto, host, cuda or cuda:N".to_owned()),
            |v| v.to_string(),
        )?;
        const PROGRAM: &str = "as this program has it unless told otherwise";
        fn otherwise<T: Clone>(own: &Option<T>, usual: (T, &'static str)) -> (T, &'static str) {
            own.clone().map_or(usual, |own| (own, PROGRAM))
        }
        // With one core an engine thread and a waiting kernel would take turns by the scheduler's clock.
        let (cores_default, cores_why) = if cores == 1 {
            (
                HcaCores::Caller,
                "this process may use one CPU core, so whoever waits runs the engine",
            )
        } else {
            (
                HcaCores::Threads(1),
                "one engine thread carries tens of millions of requests a second",
            )
        };
        let hca_cores = r.pick(
            (
                "hca-cores",
                "DOORBELL_HCA_CORES",
                "who runs the software HCA",
            ),
            self.hca_cores,
            otherwise(&self.otherwise.hca_cores, (cores_default, cores_why)),
            HcaCores::from_str,
            |v| v.to_string(),
        )?;
        let handler = r.pick(
            ("handler", "DOORBELL_HANDLER", "how queue pairs are rung"),
            self.handler,
            (
                Handler::Record,
                "doorbell with record recovers from any lost ring",
            ),
            Handler::from_str,
            |v| v.to_string(),
        )?;
        let depth = r.pick(
            ("depth", "DOORBELL_DEPTH", "64-byte slots of a send queue"),
            self.depth,
            (1024, "deep enough to hide a round trip over PCIe"),
            depth,
            |v| v.to_string(),
        )?;
        let quiesce = r.pick(
            (
                "quiesce",
                "DOORBELL_QUIESCE_MS",
                "milliseconds that destroying waits before it leaks",
            ),
            self.quiesce,
            (
                Duration::from_secs(2),
                "longer than any batch in flight, short enough to exit",
            ),
            millis,
            |v| v.as_millis().to_string(),
        )?;
        let emulate_warp = r.pick(
            (
                "host-warp",
                "DOORBELL_HOST_WARP",
                "lanes of a warp on the host GPU",
            ),
            self.emulate_warp,
            (false, "emulated warps are for tests"),
            warp,
            |v| if v { "32" } else { "1" }.to_owned(),
        )?;
        let on_error = r.pick(
            (
                "on-error",
                "DOORBELL_ON_ERROR",
                "what foreign kernels meet on a failed queue pair",
            ),
            self.on_error,
            (OnError::Report, "a kernel must not take a failure for data"),
            OnError::from_str,
            |v| v.to_string(),
        )?;
        let trace = r.pick(
            (
                "trace",
                "DOORBELL_TRACE",
                "where a trace for Perfetto goes when the device is closed",
            ),
            self.trace.clone().map(Some),
            (None, "nobody asked for one"),
            |text| match text {
                "" => Err("give a file, or off".to_owned()),
                "off" => Ok(None),
                _ => Ok(Some(PathBuf::from(text))),
            },
            |v| v.map_or("off".to_owned(), |v| v.display().to_string()),
        )?;
        let (events, why) = match trace {
            Some(_) => (
                Recorder::TRACE,
                "a trace was asked for, so more is kept than usual",
            ),
            None => (
                Recorder::EVENTS,
                "it costs a core 2 to 5 per cent in batches and up to 12 one at a time, and a job that hangs can be read",
            ),
        };
        let record = r.pick(
            (
                "record",
                "DOORBELL_RECORD",
                "what is kept of each queue pair for doorbell dump",
            ),
            self.record,
            (Recorder::On(events), why),
            Recorder::from_str,
            |v| v.to_string(),
        )?;
        let roce = r.pick(
            ("roce", "DOORBELL_ROCE", "the port of RoCE packets"),
            self.roce.clone(),
            otherwise(
                &self.otherwise.roce,
                (
                    "udp".to_owned(),
                    "a UDP socket needs no privileges; it is opened when first used",
                ),
            ),
            |text| match crate::provider::roce_port(text) {
                Ok(_) => Ok(text.to_owned()),
                Err(Error::Setting { remedy, .. }) => Err(remedy),
                Err(other) => Err(other.to_string()),
            },
            |v| v,
        )?;
        let verbs = r.pick(
            (
                "verbs",
                "DOORBELL_VERBS",
                "the RDMA device of queue pairs connected over verbs",
            ),
            self.verbs.clone(),
            otherwise(
                &self.otherwise.verbs,
                (
                    "auto".to_owned(),
                    "the first whose port is active; it is opened when first used",
                ),
            ),
            |text| {
                let device: Result<doorbell_hca::verbs::VerbsConfig, _> = text.parse();
                device.map(|_| text.to_owned())
            },
            |v| v,
        )?;
        let roce_mtu = r.pick(
            (
                "roce-mtu",
                "DOORBELL_ROCE_MTU",
                "payload of a packet of roce and verbs at most (path MTU)",
            ),
            self.roce_mtu.map(Some),
            (None, "the largest that fits the port"),
            mtu,
            |v| v.map_or("auto".to_owned(), |v| v.to_string()),
        )?;
        let said = |name| lookup(name).is_some_and(|v| !v.is_empty());
        let packets = match self.patience {
            Some(time) if !said("DOORBELL_ROCE_TIMEOUT") && !said("DOORBELL_ROCE_RETRY") => {
                patient_code(time)
            }
            _ => None,
        };
        let roce_timeout = r.pick(
            (
                "roce-timeout",
                "DOORBELL_ROCE_TIMEOUT",
                "repeat after 4.096 us times two to this power",
            ),
            self.roce_timeout,
            match packets {
                Some(code) => (code, PATIENT),
                None => (
                    17,
                    "with 7 retries a peer that is gone costs 4.3 s, and a link that is down for 2 s costs nothing",
                ),
            },
            small(1, 31),
            |v| v.to_string(),
        )?;
        let roce_retry = r.pick(
            (
                "roce-retry",
                "DOORBELL_ROCE_RETRY",
                "repetitions before a RoCE QP gives up",
            ),
            self.roce_retry,
            (7, "the most that InfiniBand knows"),
            small(0, 7),
            |v| v.to_string(),
        )?;
        let asked = match self.fault.as_deref().map(faults::load).transpose() {
            Ok(script) => script,
            Err(remedy) => {
                return Err(Error::Setting {
                    name: "fault",
                    value: self.fault.clone().unwrap_or_default(),
                    origin: Source::Argument,
                    remedy,
                });
            }
        };
        let fault = r.pick(
            ("fault", "DOORBELL_FAULT", "faults that the HCA plays"),
            asked,
            (Script::default(), "faults are for tests"),
            faults::load,
            |v| faults::print(&v),
        )?;
        Ok(Settings {
            fault,
            rank: match self.rank {
                Some(rank) => Some(rank),
                None => Launched::rank_in(lookup)?,
            },
            roce,
            verbs,
            roce_mtu,
            roce_timeout,
            roce_retry,
            roce_wrap: self.roce_wrap.clone(),
            patience: self.patience.unwrap_or(Duration::from_secs(5)),
            gpu,
            hca_cores,
            handler,
            depth,
            quiesce,
            emulate_warp,
            on_error,
            record,
            trace,
            explained: r.lines,
        })
    }
}

#[cfg(test)]
mod tests;
