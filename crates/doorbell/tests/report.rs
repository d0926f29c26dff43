//! What a process says about its queue pairs: the stage at which one is stuck, asked from inside and over the socket.
#![cfg(all(target_os = "linux", not(miri)))]

use std::time::Duration;

use doorbell::cpu::{self, Post};
use doorbell::report::{QpReport, server};
use doorbell::{Access, CpuQp, Device, GpuSelect, Handler, Mr, Place, Qp};

const APART: Duration = Duration::from_millis(5);

fn bench() -> (Device, Mr, Qp) {
    let device = Device::builder()
        .gpu(GpuSelect::Host)
        .caller_driven()
        .handler(Handler::Record)
        .open()
        .unwrap();
    let pd = device.pd().unwrap();
    let memory = device.alloc(Place::Host, 4096).unwrap();
    let mr = pd.register(&memory, Access::ALL).unwrap();
    let qp = pd
        .qp()
        .depth(64)
        .build()
        .unwrap()
        .connect_to_self()
        .unwrap();
    (device, mr, qp)
}

fn of(device: &Device, qp: &Qp) -> QpReport {
    let report = device.report(APART);
    let found = report.qps.into_iter().find(|q| q.qpn == qp.qpn());
    found.expect("every queue pair is in the report")
}

#[test]
fn a_doorbell_that_was_never_rung_is_named() {
    let (device, mr, qp) = bench();
    assert!(of(&device, &qp).verdict.contains("idle"));
    let mut cpu = CpuQp::new(&qp).unwrap();
    {
        let queue = cpu.queue().unwrap();
        let how = Post::by(cpu::deadline(Duration::from_secs(5)));
        let (to, from) = (cpu::remote(&mr.remote(), 2048), cpu::local(&mr, 0, 64));
        let ticket = queue.put(to, from, how).unwrap();
        queue
            .wait(ticket, cpu::deadline(Duration::from_secs(5)))
            .unwrap();
        queue.put(to, from, how.without_ringing()).unwrap();
    }
    let report = of(&device, &qp);
    assert!(report.stuck && !report.moving, "{report:?}");
    let verdict = &report.verdict;
    assert!(
        verdict.contains("WQE 1 is written and published, and not covered by any doorbell"),
        "{verdict}"
    );
    assert!(verdict.contains("record 1, doorbell 1"), "{verdict}");
    let next = report.next.expect("it shows the WQE");
    assert!(
        next.starts_with("#1 ") && next.contains("RDMA_WRITE 64 B"),
        "{next}"
    );
    assert!(report.cqe.expect("a CQE").contains("WQE 0 completed"));
}

#[test]
fn an_engine_that_nobody_runs_is_named() {
    let (device, mr, qp) = bench();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let queue = cpu.queue().unwrap();
    let how = Post::by(cpu::deadline(Duration::from_secs(5)));
    let (to, from) = (cpu::remote(&mr.remote(), 2048), cpu::local(&mr, 0, 64));
    queue.put(to, from, how).unwrap();
    let report = of(&device, &qp);
    assert!(report.stuck, "{report:?}");
    assert!(report.verdict.contains("caller-driven"), "{report:?}");
    while device.poll() {}
    assert!(!of(&device, &qp).stuck);
}

#[test]
fn a_failure_is_shown_with_its_first_error() {
    let (device, mr, qp) = bench();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let queue = cpu.queue().unwrap();
    let by = cpu::deadline(Duration::from_secs(5));
    let mut far = mr.remote();
    far.key ^= 1 << 31;
    let (to, from) = (cpu::remote(&far, 0), cpu::local(&mr, 0, 8));
    let ticket = queue.put(to, from, Post::by(by)).unwrap();
    assert!(queue.wait(ticket, by).is_err());
    let report = of(&device, &qp);
    assert!(
        report.stuck && report.verdict.contains("BAD_RKEY"),
        "{report:?}"
    );
    assert!(report.cqe.expect("a CQE").contains("WQE 0 failed"));
}

#[test]
fn the_socket_gives_what_is_there() {
    let (device, _mr, qp) = bench();
    let pid = std::process::id();
    let report = server::ask(pid, true).unwrap();
    assert_eq!(
        (report.pid, report.schema.as_str()),
        (pid, doorbell::report::SCHEMA)
    );
    let here = device.report(APART).id;
    let found = report.devices.iter().find(|d| d.id == here);
    let found = found.expect("the device");
    assert!(found.qps.iter().any(|q| q.qpn == qp.qpn()));
    assert!(server::all().unwrap().contains(&pid));
    // What was dropped is gone from it.
    drop((device, _mr, qp));
    let report = server::ask(pid, true).unwrap();
    assert!(report.devices.iter().all(|d| d.id != here));
}
