//! `dump` and `stat` of other processes: one that runs, one that is stuck, one that stands, one that was killed.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{doorbell, run, succeed, texts};
use doorbell::cpu::{self, Post};
use doorbell::{Access, CpuQp, Device, GpuSelect, Place};

/// Ends it whatever happens.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// `perf` for long, once it answers.
    fn perf() -> Self {
        let args = ["perf", "put-bw", "--secs", "600", "--no-baseline"];
        let mut command = doorbell(&args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let running = Self(command.spawn().expect("starting perf"));
        let until = Instant::now() + Duration::from_secs(60);
        while !run(&["dump", &running.pid()]).status.success() {
            assert!(Instant::now() < until, "perf does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

#[test]
fn a_lost_doorbell_is_found_from_outside() {
    let device = Device::builder()
        .gpu(GpuSelect::Host)
        .hca_cores(1)
        .open()
        .unwrap();
    let pd = device.pd().unwrap();
    let memory = device.alloc(Place::Host, 4096).unwrap();
    let mr = pd.register(&memory, Access::ALL).unwrap();
    let qp = pd.qp().build().unwrap().connect_to_self().unwrap();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let how = Post::by(cpu::deadline(Duration::from_secs(5))).without_ringing();
    let queue = cpu.queue().unwrap();
    let (to, from) = (cpu::remote(&mr.remote(), 0), cpu::local(&mr, 64, 64));
    queue.put(to, from, how).unwrap();
    let pid = std::process::id().to_string();
    let text = succeed(&["dump", &pid]);
    for part in [
        "STUCK",
        "WQE 0 is written and published, and not covered by any doorbell",
        "reserved 1, ready 1, rung 0",
        "RDMA_WRITE 64 B",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&succeed(&["dump", &pid, "--json"])).unwrap();
    let qps = &json[0]["devices"][0]["qps"];
    assert_eq!(
        (&qps[0]["stuck"], &qps[0]["poster"]["ready"]),
        (&true.into(), &1.into())
    );
}

#[test]
fn a_running_process_is_watched_and_a_killed_one_missed() {
    let mut perf = Running::perf();
    let pid = perf.pid();
    let text = succeed(&["stat", &pid, "--count", "2", "--interval", "0.2"]);
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows.len(), 2, "{text}");
    assert!(rows[1].trim_start().starts_with(&pid), "{text}");
    assert!(succeed(&["dump", "all"]).contains(&format!("process {pid} ")));
    perf.0.kill().unwrap();
    perf.0.wait().unwrap();
    let text = succeed(&["dump", &pid]);
    assert!(text.contains("post-mortem: it ended"), "{text}");
    assert!(text.contains("QP 0x"), "{text}");
    let output = run(&["stat", &pid, "--count", "1"]);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains(&format!("there is no process {pid}")), "{err}");
    forget(&pid);
}

#[test]
fn a_stopped_process_is_shown_as_stopped_and_delays_no_other() {
    let (perf, other) = (Running::perf(), Running::perf());
    let pid = perf.pid();
    let number = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(number, rustix::process::Signal::STOP).unwrap();
    let text = succeed(&["stat", "--count", "1", "--interval", "0.2"]);
    assert!(text.contains(&format!("{pid}  stopped: ")), "{text}");
    assert!(text.contains(&other.pid()), "{text}");
    let text = succeed(&["stat", &pid, "--count", "1", "--interval", "0.2"]);
    assert!(text.contains(&format!("{pid}  stopped: ")), "{text}");
}

#[test]
fn who_cannot_be_asked_is_said_to_be_what_it_is() {
    let other = Running(
        std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap(),
    );
    let output = run(&["stat", &other.pid()]);
    let (_, err) = texts(&output);
    assert!(
        err.contains("(sleep) answers no questions: it has no open"),
        "{err}"
    );
}

/// The records of a process that was killed.
fn forget(pid: &str) {
    let number = pid.parse().unwrap();
    for (_, path) in doorbell::report::records(number) {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn metrics_are_served() {
    let perf = Running::perf();
    let pid = perf.pid();
    let mut command = doorbell(&["stat", &pid, "--prometheus", "127.0.0.1:0"]);
    let mut server = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    let out = server.0.stdout.take().unwrap();
    BufReader::new(out).read_line(&mut line).unwrap();
    let address = line
        .trim()
        .strip_prefix("serving http://")
        .and_then(|l| l.strip_suffix("/metrics"))
        .expect("it says where");
    // Who says nothing keeps nobody from being served.
    let _idle = TcpStream::connect(address).unwrap();
    let get = |what: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        write!(stream, "{what} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = get("GET /metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    for part in [
        "# TYPE doorbell_qp_wqes_total counter\n",
        &format!("doorbell_process_cpu_seconds_total{{pid=\"{pid}\"}} "),
        "doorbell_qp_stuck{",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    assert!(get("GET /").starts_with("HTTP/1.1 404"));
    assert!(get("POST /metrics").starts_with("HTTP/1.1 405"));
    drop(perf);
    assert!(get("GET /metrics").starts_with("HTTP/1.1 503"));
}

/// Names of a trace's processes and threads, and how many slices there are.
fn trace_of(path: &std::path::Path) -> (Vec<String>, usize) {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names = events
        .iter()
        .filter(|e| e["ph"] == "M" && e["name"] != "thread_sort_index")
        .map(|e| e["args"]["name"].as_str().unwrap().to_owned())
        .collect();
    (names, events.iter().filter(|e| e["ph"] == "X").count())
}

#[test]
fn a_trace_shows_kernels_posters_engine_and_peer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let args = [
        "perf",
        "put-lat",
        "--link",
        "shm",
        "--iters",
        "50",
        "--no-baseline",
        "--trace",
    ];
    let mut args: Vec<&str> = args.to_vec();
    args.push(path.to_str().unwrap());
    succeed(&args);
    let (names, slices) = trace_of(&path);
    for part in ["kernels", "engine core 0", "by shm: posted"] {
        assert!(names.iter().any(|n| n.contains(part)), "{part}: {names:?}");
    }
    let processes = names.iter().filter(|n| n.contains("doorbell p")).count();
    assert_eq!(processes, 2, "the peer is on the same time line: {names:?}");
    assert!(slices > 100, "{slices} slices");
}

#[test]
fn a_running_process_is_traced_from_outside_and_a_program_by_a_variable() {
    let perf = Running::perf();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.json");
    let name = path.to_str().unwrap();
    succeed(&["dump", &perf.pid(), "--trace", name]);
    let (names, slices) = trace_of(&path);
    assert!(names.iter().any(|n| n.contains("kernels")), "{names:?}");
    assert!(slices > 10, "{slices} slices");
    drop(perf);
    let name = dir.path().join("own-%p.json");
    let mut command = doorbell(&["explain", "put"]);
    command.env("DOORBELL_TRACE", &name).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    assert!(child.wait().unwrap().success());
    let path = dir.path().join(format!("own-{}.json", child.id()));
    let (names, slices) = trace_of(&path);
    assert!(
        slices > 0 && names.iter().any(|n| n.contains("engine core")),
        "{names:?}"
    );
}
