//! `doorbell info`: what would be used here, and why.
//!
//! It opens the device exactly as a program would, so that what it says is what happens, and adds
//! the limits of the machine that matter. An error to open is what a program would get, too.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use doorbell::{Backend, Device, GpuInfo};
use serde::Serialize;

use crate::args::InfoArgs;
use crate::environment::{Machine, nvidia_driver};
use crate::plugins::{self, Plugin};
use crate::variables::{self, Variable};
use crate::{Ended, table, units};

/// The name and version of the JSON.
const SCHEMA: &str = "doorbell-info/1";
/// Memory that may be locked below which pinning buffers is likely to fail.
const LITTLE_MEMLOCK: u64 = 64 << 20;

#[derive(Debug, Serialize)]
struct Info {
    schema: &'static str,
    version: &'static str,
    git: Option<&'static str>,
    profile: Option<&'static str>,
    target: Option<&'static str>,
    machine: MachineInfo,
    gpu: GpuFacts,
    hca: HcaInfo,
    links: Vec<LinkInfo>,
    plugins: Vec<Plugin>,
    settings: Vec<SettingInfo>,
    /// Those that are set and are no settings.
    variables: Vec<Variable>,
}

#[derive(Debug, Serialize)]
struct MachineInfo {
    kernel: Option<String>,
    cpu: Option<String>,
    cpus: u64,
    cpu_quota: Option<f64>,
    memory_bytes: Option<u64>,
    memory_limit_bytes: Option<u64>,
    /// Null: unlimited.
    memlock_bytes: Option<u64>,
    open_files: Option<u64>,
    nvidia_driver: Option<String>,
    gdrcopy: bool,
}

#[derive(Debug, Serialize)]
struct GpuFacts {
    backend: &'static str,
    name: String,
    ordinal: Option<u32>,
    uuid: Option<String>,
    pci: Option<String>,
    numa_node: Option<u32>,
    compute_capability: Option<String>,
    multiprocessors: u32,
    memory_bytes: Option<u64>,
    cuda: Option<String>,
    copy_engines: u32,
    batched_copies: bool,
    /// Many small copies go by a kernel.
    kernel_copies: bool,
    exportable_memory: bool,
    dma_buf: bool,
    mig: bool,
    mps: bool,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct HcaInfo {
    provider: &'static str,
    /// 0: driven by whoever waits.
    cores: u64,
    cpus: Vec<usize>,
    placement: Option<String>,
}

#[derive(Debug, Serialize)]
struct LinkInfo {
    name: &'static str,
    usable: bool,
    why: String,
}

#[derive(Debug, Serialize)]
struct SettingInfo {
    name: &'static str,
    variable: &'static str,
    value: String,
    source: String,
    why: String,
}

/// Prints it.
pub(crate) fn run(args: &InfoArgs) -> Result<Ended> {
    let device = Device::builder()
        .config(crate::config::of(&args.device, None, None))
        .open()?;
    let info = gather(&device);
    write(&mut crate::out::out(), args.json, &info).context("writing to standard output")?;
    Ok(Ended::Well)
}

fn write(out: &mut dyn Write, json: bool, info: &Info) -> Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, info)?;
        writeln!(out)?;
    } else {
        print(out, info)?;
    }
    Ok(())
}

fn gather(device: &Device) -> Info {
    let machine = Machine::read();
    Info {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        git: option_env!("DOORBELL_GIT"),
        profile: option_env!("DOORBELL_PROFILE"),
        target: option_env!("DOORBELL_TARGET"),
        machine: MachineInfo {
            kernel: machine.kernel,
            cpu: machine.cpu,
            cpus: machine.cpus,
            cpu_quota: machine.cpu_quota,
            memory_bytes: machine.memory_bytes,
            memory_limit_bytes: machine.memory_limit,
            memlock_bytes: machine.memlock,
            open_files: rustix::process::getrlimit(rustix::process::Resource::Nofile).current,
            nvidia_driver: nvidia_driver(),
            gdrcopy: Path::new("/dev/gdrdrv").exists(),
        },
        gpu: gpu(device.gpu_info()),
        hca: hca(device),
        links: links(device),
        plugins: plugins::list(),
        settings: device
            .settings()
            .explain()
            .iter()
            .map(|s| SettingInfo {
                name: s.name,
                variable: s.variable,
                value: s.value.clone(),
                source: s.source.to_string(),
                why: s.why.clone(),
            })
            .collect(),
        variables: variables::list(device.settings()),
    }
}

fn gpu(info: &GpuInfo) -> GpuFacts {
    let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    GpuFacts {
        backend: info.backend.as_str(),
        name: info.name.clone(),
        ordinal: info.ordinal,
        uuid: info.uuid.clone(),
        pci: info.pci_bus_id.clone(),
        numa_node: info.numa_node,
        compute_capability: info.compute_capability.map(version),
        multiprocessors: info.sm_count,
        memory_bytes: (info.backend == Backend::Cuda).then_some(info.memory_bytes),
        cuda: info.driver_version.map(version),
        copy_engines: info.can.async_engines,
        batched_copies: info.can.batch_copy,
        kernel_copies: info.can.kernel_copies,
        exportable_memory: info.can.vmm_fd,
        dma_buf: info.can.dma_buf,
        mig: info.mig,
        mps: info.mps,
        notes: info.notes.clone(),
    }
}

fn hca(device: &Device) -> HcaInfo {
    let placement = device.soft().map(|soft| soft.hca().placement().clone());
    HcaInfo {
        provider: device.provider().name(),
        cores: match device.settings().hca_cores {
            doorbell::HcaCores::Threads(n) => n.into(),
            doorbell::HcaCores::Caller => 0,
        },
        cpus: placement
            .as_ref()
            .map(|p| p.cpus.clone())
            .unwrap_or_default(),
        placement: placement.map(|p| p.why),
    }
}

fn links(device: &Device) -> Vec<LinkInfo> {
    // Tried, not guessed: this is what `perf --link shm` does first.
    let address = format!("@doorbell-info-{}", std::process::id());
    let shm = device.listen(&address).map(drop);
    let memory = device.alloc(doorbell::Place::Shared, 4096).map(drop);
    let shm = match shm.and(memory) {
        Ok(()) => (
            true,
            "sealed memory files over a Unix socket work here".to_owned(),
        ),
        Err(e) => (false, e.to_string()),
    };
    // Opened as a queue pair would have it; the port says what it guarantees.
    let roce = match device.roce_offer() {
        Ok(_) => (
            true,
            device.roce_describe().join("\n").trim_end().to_owned(),
        ),
        Err(e) => (false, e.to_string()),
    };
    let verbs = match device.verbs_describe() {
        Ok(what) => (true, what),
        Err(e) => (false, e.to_string()),
    };
    vec![
        LinkInfo {
            name: "loopback",
            usable: true,
            why: "both ends in one process".to_owned(),
        },
        LinkInfo {
            name: "shm",
            usable: shm.0,
            why: shm.1,
        },
        LinkInfo {
            name: "roce",
            usable: roce.0,
            why: roce.1,
        },
        LinkInfo {
            name: "verbs",
            usable: verbs.0,
            why: verbs.1,
        },
    ]
}

type Facts = Vec<(String, String)>;

/// A name beside the first of several lines.
fn lines(name: &str, text: &str) -> Facts {
    let names = std::iter::once(name.to_owned()).chain(std::iter::repeat(String::new()));
    names.zip(text.lines().map(str::to_owned)).collect()
}

fn print(out: &mut dyn Write, info: &Info) -> io::Result<()> {
    let git = info.git.map_or(String::new(), |g| format!(" ({g})"));
    writeln!(out, "doorbell {}{git}", info.version)?;
    section(out, "GPU", gpu_facts(info))?;
    section(out, "HCA", hca_facts(info))?;
    let links = info.links.iter().flat_map(|l| {
        let text = format!("{}{}", if l.usable { "" } else { "not usable: " }, l.why);
        lines(l.name, &text)
    });
    section(out, "Links", links.collect())?;
    let plugins = info.plugins.iter();
    let plugins = plugins.flat_map(|p| lines(p.library, &p.words()));
    section(out, "Plug-ins", plugins.collect())?;
    section(out, "Machine", machine_facts(&info.machine))?;
    let settings = info
        .settings
        .iter()
        .map(|s| {
            let from = match s.source.as_str() {
                "environment" => s.variable,
                other => other,
            };
            (
                s.name.to_owned(),
                format!("{} ({from}): {}", s.value, s.why),
            )
        })
        .collect();
    section(out, "Settings", settings)?;
    if !info.variables.is_empty() {
        let words = info.variables.iter().map(|v| (v.name.clone(), v.words()));
        section(out, "Variables", words.collect())?;
    }
    writeln!(
        out,
        "\nArguments win over DOORBELL_* variables, which win over defaults."
    )
}

fn section(out: &mut dyn Write, name: &str, facts: Facts) -> io::Result<()> {
    writeln!(out, "\n{name}")?;
    table::facts(out, &facts)
}

fn push(facts: &mut Facts, name: &str, value: Option<String>) {
    if let Some(value) = value {
        facts.push((name.to_owned(), value));
    }
}

fn gpu_facts(info: &Info) -> Facts {
    let gpu = &info.gpu;
    let mut facts = Facts::new();
    push(&mut facts, "name", Some(gpu.name.clone()));
    let what = match gpu.backend {
        "cuda" => "multiprocessors",
        _ => "CPU cores for its threads",
    };
    push(
        &mut facts,
        "size",
        Some(format!("{} {what}", gpu.multiprocessors)),
    );
    push(&mut facts, "memory", gpu.memory_bytes.map(memory));
    push(&mut facts, "PCI", gpu.pci.clone());
    push(
        &mut facts,
        "NUMA node",
        gpu.numa_node.map(|n| n.to_string()),
    );
    push(
        &mut facts,
        "capability",
        gpu.compute_capability
            .as_ref()
            .map(|c| format!("sm_{}", c.replace('.', ""))),
    );
    push(&mut facts, "CUDA", gpu.cuda.clone());
    if gpu.backend == "cuda" {
        let copies = format!(
            "{} copy engines, {}; small ones {}",
            gpu.copy_engines,
            if gpu.batched_copies {
                "batched copies"
            } else {
                "single copies (driver before CUDA 12.8)"
            },
            if gpu.kernel_copies {
                "by a kernel (DOORBELL_GPU_COPIES)"
            } else {
                "too"
            }
        );
        push(&mut facts, "copies", Some(copies));
    }
    for note in &gpu.notes {
        push(&mut facts, "why", Some(note.clone()));
    }
    facts
}

fn hca_facts(info: &Info) -> Facts {
    let hca = &info.hca;
    let mut facts = Facts::new();
    push(&mut facts, "provider", Some(hca.provider.to_owned()));
    let cores = match hca.cores {
        0 => "driven by whoever waits, no threads of its own".to_owned(),
        1 => "1 engine thread".to_owned(),
        n => format!("{n} engine threads"),
    };
    push(&mut facts, "cores", Some(cores));
    if !hca.cpus.is_empty() {
        let cpus: Vec<String> = hca.cpus.iter().map(usize::to_string).collect();
        push(&mut facts, "on CPUs", Some(cpus.join(", ")));
    }
    push(&mut facts, "why", hca.placement.clone());
    let payloads = match (info.gpu.backend, info.machine.gdrcopy) {
        ("cuda", _) => {
            Some("GPU memory through the copy engine, host memory by the CPU".to_owned())
        }
        _ => Some("host memory by the CPU".to_owned()),
    };
    push(&mut facts, "payloads", payloads);
    facts
}

fn machine_facts(machine: &MachineInfo) -> Facts {
    let mut facts = Facts::new();
    push(&mut facts, "kernel", machine.kernel.clone());
    push(&mut facts, "CPU", machine.cpu.clone());
    let quota = machine.cpu_quota.map_or(String::new(), |q| {
        format!(", the cgroup grants {q:.1} cores of time")
    });
    push(&mut facts, "CPUs", Some(format!("{}{quota}", machine.cpus)));
    push(&mut facts, "memory", machine.memory_bytes.map(memory));
    push(
        &mut facts,
        "limit",
        machine
            .memory_limit_bytes
            .map(|l| format!("{} (cgroup)", memory(l))),
    );
    let memlock = match machine.memlock_bytes {
        None => "unlimited".to_owned(),
        Some(n) if n < LITTLE_MEMLOCK => format!(
            "{}: little if a GPU or NIC is to pin memory; raise it with `ulimit -l`",
            memory(n)
        ),
        Some(n) => memory(n),
    };
    push(&mut facts, "memlock", Some(memlock));
    push(
        &mut facts,
        "open files",
        machine.open_files.map(units::grouped),
    );
    push(&mut facts, "NVIDIA driver", machine.nvidia_driver.clone());
    facts
}

fn memory(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{} GiB", units::three(b as f64 / (1u64 << 30) as f64)),
        b => units::size(b),
    }
}
