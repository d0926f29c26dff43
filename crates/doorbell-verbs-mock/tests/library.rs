//! The way from a path to functions: libibverbs and libefa as shared libraries, found by the variables that name them.

use std::path::PathBuf;
use std::process::Command;

use doorbell_verbs::efa::{SrdConfig, SrdQp};
use doorbell_verbs::{Context, Cq, Pd, Verbs};

/// The example `mock_rdma`, which is built with these tests.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let target = own.ancestors().nth(2).expect("target/PROFILE");
    target.join("examples").join("libmock_rdma.so")
}

/// Runs one of the tests below that are ignored, since variables are a process's own.
fn child(test: &str, libefa: &str) {
    let path = library();
    assert!(path.exists(), "{} is not built", path.display());
    let ended = Command::new(std::env::current_exe().expect("this program"))
        .args(["--ignored", "--exact", test])
        .env("DOORBELL_IBVERBS", &path)
        .env("DOORBELL_LIBEFA", libefa)
        .env("MOCK_RDMA", "efa")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

#[test]
fn an_efa_device_is_found_through_both_libraries() {
    child(
        "peer_process_finds_srd",
        library().to_str().expect("a path"),
    );
}

#[test]
fn an_efa_device_without_libefa_says_what_to_install() {
    child("peer_process_misses_libefa", "/no/such/libefa.so.1");
}

#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process_finds_srd() {
    let verbs = Verbs::load().expect("the mock");
    let names = verbs.devices().expect("a list");
    let context = Context::open(&verbs, &names[0].name).expect("opens");
    let attr = context.efa().expect("libefa").expect("an EFA device");
    assert!(attr.writes && attr.reads);
    let pd = Pd::new(&context).expect("a domain");
    let cq = Cq::new(&context, 64).expect("a queue");
    let config = SrdConfig { send: 16, recv: 16 };
    let qp = SrdQp::new(&pd, &cq, &config, &attr).expect("a queue pair");
    qp.start(1, 5, Some(7)).expect("RTS");
}

#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process_misses_libefa() {
    let verbs = Verbs::load().expect("the mock");
    let names = verbs.devices().expect("a list");
    let context = Context::open(&verbs, &names[0].name).expect("opens");
    let text = context.efa().expect_err("no libefa").to_string();
    assert!(
        text.contains("/no/such/libefa.so.1") && text.contains("rdma-core 46"),
        "{text}"
    );
}
