//! The verdicts, against machines: each `machines/NAME.node` is a file as `doorbell doctor --capture` writes it,
//! with its screen in `NAME.txt` and its JSON in `NAME.json` beside it. They are composed from what the sources and
//! documentation of drivers and libraries say that such machines show, not captured on them.
//!
//! `DOORBELL_BLESS=1 cargo test -p doorbell-doctor --test machines` writes the screens and the JSON anew:
//! read the difference line by line before it is committed.

use std::collections::BTreeMap;
use std::path::PathBuf;

use doorbell_doctor::tree::{Live, Manifest, Recorder};
use doorbell_doctor::{GateState, Library, PathState, Report, Verdict, Who, examine, screen};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/machines")
}

fn machines() -> BTreeMap<String, Manifest> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "node") {
            let text = std::fs::read_to_string(&path).unwrap();
            let manifest =
                Manifest::whole(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            all.insert(
                path.file_stem().unwrap().to_str().unwrap().to_owned(),
                manifest,
            );
        }
    }
    all
}

fn report(name: &str) -> Report {
    examine(&machines()[name])
}

fn library<'r>(report: &'r Report, name: &str) -> &'r Library {
    report
        .libraries
        .iter()
        .find(|l| l.name == name)
        .unwrap_or_else(|| panic!("no {name}"))
}

/// The gates that a path fails, in words.
fn failed(library: &Library, path: &str) -> Vec<String> {
    let path = library
        .paths
        .iter()
        .find(|p| p.name == path)
        .unwrap_or_else(|| panic!("no {path}"));
    path.gates
        .iter()
        .filter(|g| g.state == GateState::Fail)
        .map(|g| g.what.clone())
        .collect()
}

#[test]
fn screens_and_json_are_the_blessed_ones() {
    let bless = std::env::var_os("DOORBELL_BLESS").is_some();
    let mut wrong = Vec::new();
    let all = machines();
    assert!(all.len() >= 9, "only {} machines", all.len());
    for (name, machine) in &all {
        let report = examine(machine);
        let json = serde_json::to_string_pretty(&report).unwrap() + "\n";
        for (kind, now) in [("txt", screen(&report, 80, false)), ("json", json)] {
            let file = folder().join(format!("{name}.{kind}"));
            if bless {
                std::fs::write(&file, &now).unwrap();
            } else if std::fs::read_to_string(&file).unwrap_or_default() != now {
                wrong.push(format!("{name}.{kind}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "not as blessed: {wrong:?}; look at them, then run with DOORBELL_BLESS=1"
    );
}

#[test]
fn no_line_is_wider_than_a_terminal() {
    for (name, machine) in machines() {
        for line in screen(&examine(&machine), 80, false).lines() {
            // A word that cannot be broken (a command, a symbol) may stand out; a sentence may not.
            let longest = line
                .split(' ')
                .map(|w| w.chars().count())
                .max()
                .unwrap_or(0);
            assert!(line.chars().count() <= 80 || longest > 60, "{name}: {line}");
        }
    }
}

#[test]
fn colour_adds_nothing_but_colour() {
    for machine in machines().values() {
        let report = examine(machine);
        let mut plain = String::new();
        let mut rest = screen(&report, 80, true);
        while let Some(at) = rest.find("\x1b[") {
            plain.push_str(&rest[..at]);
            let end = at + rest[at..].find('m').unwrap() + 1;
            rest = rest[end..].to_owned();
        }
        plain.push_str(&rest);
        assert_eq!(plain, screen(&report, 80, false));
    }
}

#[test]
fn a_capture_gives_the_same_report() {
    let text = |r: &Report| serde_json::to_string(r).unwrap();
    for (name, machine) in machines() {
        let first = examine(&machine);
        let recorder = Recorder::new(&machine);
        let _ = examine(&recorder);
        let captured = Manifest::parse(&recorder.manifest().print()).unwrap();
        assert_eq!(text(&examine(&captured)), text(&first), "{name} as text");
        let dir = tempfile::tempdir().unwrap();
        captured.write(dir.path()).unwrap();
        let live = Live::under(dir.path()).unwrap();
        // What could not be read is not in a folder; all else is.
        if !captured.print().contains(":denied") {
            assert_eq!(text(&examine(&live)), text(&first), "{name} as a folder");
        }
    }
}

#[test]
fn this_machine_is_judged_without_harm() {
    let here = Live::here();
    let report = examine(&here);
    assert!(report.machine.kernel.is_some());
    assert_eq!(report.schema, "doorbell-doctor/1");
    assert!(!screen(&report, 80, true).is_empty());
}

/// The report of a machine with variables added to its environment and lines to its files.
fn changed(name: &str, variables: &str, replace: (&str, &str)) -> Report {
    let text = std::fs::read_to_string(folder().join(format!("{name}.node"))).unwrap();
    let text = text.replace(replace.0, replace.1);
    let with = match text.contains("/.doorbell/env:\n") {
        true => text.replace(
            "/.doorbell/env:\n",
            &format!("/.doorbell/env:\n{variables}"),
        ),
        false => format!("{text}\n/.doorbell/env:\n{variables}"),
    };
    examine(&Manifest::parse(&with).unwrap())
}

#[test]
fn settings_with_which_nvshmem_ends_at_its_start_are_no_path() {
    let none = ("", "");
    for variables in [
        "| NVSHMEM_GPUNETIO_ENABLE_GDAKI=1\n",
        "| NVSHMEM_GPUNETIO_ENABLE_GDAKI=1\n| NVSHMEM_IB_ENABLE_IBGDA=1\n| NVSHMEM_REMOTE_TRANSPORT=gpunetio\n",
    ] {
        let report = changed("no-nic", variables, none);
        let nvshmem = library(&report, "nvshmem");
        assert_eq!(nvshmem.takes, None, "{variables}");
        assert!(screen(&report, 80, false).contains("NVSHMEM_GPUNETIO_ENABLE_GDAKI"));
    }
    let report = changed("no-nic", "| NVSHMEM_REMOTE_TRANSPORT=ucx\n", none);
    let ucx = library(&report, "nvshmem");
    assert!(ucx.paths.iter().any(|p| p.name == "ucx by the CPU proxy"));
    assert!(ucx.takes.is_some());
}

/// NCCL asks CUDA for GPUDirect RDMA, and no variable overrides the answer.
#[test]
fn geforce_has_no_gin() {
    let none = "";
    let report = changed(
        "connectx-ready",
        none,
        ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090"),
    );
    assert!(
        report.gpus.iter().any(|g| g.name.contains("GeForce")),
        "{:?}",
        report.gpus
    );
    let nccl = library(&report, "nccl");
    assert_eq!(nccl.takes, Some("collectives only, from the host"));
    assert!(
        failed(nccl, "GIN GDAKI, the GPU rings").contains(&"GPUs with GPUDirect RDMA".to_owned())
    );
}

/// Nothing names the environment but `PATH`, as in many containers.
#[test]
fn venv_on_path() {
    let report = report("venv-on-path");
    let seen: Vec<_> = report
        .libraries
        .iter()
        .map(|l| (l.name, l.version.as_deref(), l.source))
        .collect();
    let wanted = [
        ("nccl", Some("2.28.9"), "wheel"),
        ("nccl", Some("2.28.3"), "system"),
        ("nvshmem", Some("3.4.5"), "wheel"),
        ("ucx", Some("1.16.0"), "system"),
    ];
    assert_eq!(seen, wanted);
    for (library, part) in [
        (0, "PyTorch 2.11.0 beside it loads this one"),
        (1, "loads the wheel's 2.28.9"),
        (2, "beside it loads this"),
    ] {
        let notes = report.libraries[library].notes.join(" ");
        assert!(notes.contains(part), "{notes}");
    }
}

#[test]
fn connectx_ready() {
    let report = report("connectx-ready");
    assert_eq!(report.verdict, Verdict::Native);
    for library in &report.libraries {
        assert_eq!(library.who, Who::Native, "{}", library.name);
    }
    let pix: Vec<_> = report
        .distances
        .iter()
        .filter(|d| d.path == "PIX")
        .map(|d| d.nic.as_str())
        .collect();
    assert_eq!(pix, ["mlx5_0", "mlx5_1"]);
}

#[test]
fn connectx_without_the_registry_key() {
    let report = report("connectx-peermem");
    assert_eq!(report.verdict, Verdict::FallsBack);
    let nccl = library(&report, "nccl");
    assert_eq!(nccl.takes, Some("GIN GDAKI, a CPU thread rings"));
    assert_eq!(
        failed(nccl, "GIN GDAKI, the GPU rings"),
        ["the NIC's doorbell mapped into the GPU"]
    );
    // UCX has no CPU to fall back on.
    assert_eq!(library(&report, "ucx").who, Who::Host);
    // Nobody asked NVSHMEM for IBGDA: that is a setting, and the key is not.
    let nvshmem = library(&report, "nvshmem");
    assert_eq!(nvshmem.takes, Some("ibrc by the CPU proxy"));
    assert!(
        nvshmem
            .paths
            .iter()
            .any(|p| p.name == "IBGDA, a CPU thread rings" && p.state == PathState::Setting)
    );
}

#[test]
fn proprietary_driver_without_peermem() {
    let report = report("connectx-proprietary");
    assert_eq!(report.memory.dma_buf, Some(false));
    let nccl = library(&report, "nccl");
    assert_eq!(nccl.takes, Some("collectives only, from the host"));
    assert_eq!(
        failed(nccl, "GIN GDAKI, a CPU thread rings"),
        ["GPU memory for the NIC: dma-buf or nvidia_peermem"]
    );
    assert_eq!(
        library(&report, "nvshmem").takes,
        Some("one node only (NVLink and PCIe peers)")
    );
}

#[test]
fn open_driver_without_peermem_has_dma_buf() {
    let report = report("connectx-dmabuf");
    assert!(!report.memory.nvidia_peermem);
    assert_eq!(library(&report, "nccl").who, Who::Native);
}

#[test]
fn efa_takes_what_its_plugin_brings() {
    let report = report("efa");
    let nccl = library(&report, "nccl");
    assert_eq!(nccl.takes, Some("GIN plug-in"));
    assert!(
        failed(nccl, "GIN GDAKI, the GPU rings")
            .iter()
            .any(|g| g.contains("mlx5"))
    );
}

#[test]
fn broadcom_has_the_proxy() {
    let report = report("broadcom");
    assert_eq!(
        library(&report, "nccl").takes,
        Some("GIN proxy over InfiniBand verbs")
    );
    assert_eq!(library(&report, "ucx").who, Who::Host);
}

#[test]
fn no_nic_and_old_driver_and_container_and_rxe() {
    let none = report("no-nic");
    assert_eq!(
        library(&none, "nccl").takes,
        Some("collectives only, from the host")
    );
    let old = report("old-driver");
    assert!(
        failed(library(&old, "nccl"), "GIN GDAKI, a CPU thread rings")
            .iter()
            .any(|g| g.contains("CUDA 12.0"))
    );
    let container = report("container");
    assert_eq!(container.container.kind.as_deref(), Some("docker"));
    let nccl = library(&container, "nccl");
    assert!(
        nccl.paths[0]
            .gates
            .iter()
            .any(|g| g.found.contains("uverbs is not here"))
    );
    let rxe = report("rxe");
    assert_eq!(rxe.verdict, Verdict::NothingInstalled);
    assert_eq!(
        rxe.nics.iter().find(|n| n.rdma).unwrap().driver.as_deref(),
        Some("rdma_rxe")
    );
}

#[test]
fn a_capture_of_this_machine_is_small_and_says_the_same() {
    let here = Live::here();
    let recorder = Recorder::new(&here);
    let first = examine(&recorder);
    let captured = recorder.manifest().print();
    let again = examine(&Manifest::parse(&captured).unwrap());
    let libraries = |r: &Report| serde_json::to_string(&r.libraries).unwrap();
    assert_eq!(libraries(&again), libraries(&first));
    assert_eq!(again.limits.memlock, first.limits.memlock);
    assert!(
        !captured.contains("PPid"),
        "more of /proc/self/status than is used"
    );
}

#[test]
fn any_fact_may_be_missing_or_mad() {
    let mut judged = 0;
    for name in ["connectx-ready", "efa"] {
        let text = std::fs::read_to_string(folder().join(format!("{name}.node"))).unwrap();
        let lines: Vec<&str> = text.lines().filter(|l| l.starts_with('/')).collect();
        for (at, line) in lines.iter().enumerate() {
            let path = line.split([':', ' ']).next().unwrap();
            for other in [
                "",
                &format!("{path}: \u{fffd}-1.0x:::"),
                &format!("{path} -> ../.."),
                &format!("{path}/"),
            ] {
                let without: String = lines
                    .iter()
                    .enumerate()
                    .filter(|(i, l)| *i != at && !l.ends_with(':'))
                    .flat_map(|(_, l)| [*l, "\n"])
                    .collect();
                // Paths with a colon in them make lines that are none; those are refused, not judged.
                if let Ok(machine) = Manifest::parse(&format!("{without}{other}\n")) {
                    judged += 1;
                    let report = examine(&machine);
                    assert!(screen(&report, 80, true).len() > 100, "{line}");
                }
            }
        }
    }
    assert!(judged > 100, "the parser took {judged} machines");
}
