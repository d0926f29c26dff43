//! Two processes of one host: each test starts this test program once more as its peer.
#![cfg(not(miri))]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, LONG, caller_driven, device, meet, read};
use doorbell::cpu::{self, Post, deadline};
use doorbell::device_api::{Error as DeviceError, Failure, Remote};
use doorbell::{
    AsyncError, CpuQp, Device, Dims, Endpoint, GpuSelect, Peer, Place, Qp, QpState, Ready, Vendor,
    params,
};

const ONE: Dims = Dims::new(1, 1);
const LEN: usize = 1 << 16;

/// What the child is told to do, and where.
const ROLE: &str = "DOORBELL_TEST_ROLE";
const SOCKET: &str = "DOORBELL_TEST_SOCKET";

/// The child, ended with the test whatever becomes of it.
struct Started {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Started {
    fn ends_well(mut self) {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                assert!(status.success(), "the peer process: {status}");
                return;
            }
            assert!(Instant::now() < deadline, "the peer process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts a peer process in `role` and returns it with the session.
fn peer(device: &Device, role: &str) -> (Started, Peer) {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("s").to_str().expect("UTF-8").to_owned();
    let listener = device.listen(&socket).expect("listening");
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "peer_process", "--ignored", "--nocapture"])
        .env(ROLE, role)
        .env(SOCKET, &socket)
        .stdout(Stdio::null())
        .spawn()
        .expect("a child");
    let child = Started { child, _dir: dir };
    (child, listener.accept(LONG).expect("the peer dials"))
}

/// Swaps endpoints and connects one queue pair to the peer's.
fn connect(b: &Bench, peer: &Peer) -> (Qp<Ready>, Endpoint) {
    let qp = b.pd.qp().depth(64).build().expect("a queue pair");
    let (qp, theirs) = meet(qp, peer, &[b.target.remote()]);
    assert_ne!(theirs.hca, b.device.provider().id());
    (qp, theirs)
}

/// Parameters of one put to the peer's region.
fn rate(b: &Bench, export: &doorbell::Export, theirs: &Endpoint, size: u64) -> params::Rate {
    let to = theirs.regions[0];
    params::Rate {
        remote: params::Area {
            addr: to.addr,
            key: to.key,
            ..Default::default()
        },
        ..b.rate(export, size)
    }
}

#[test]
#[ignore = "the other tests of this file run it in a process of its own"]
fn peer_process() {
    let role = std::env::var(ROLE).expect("started by a test of this file");
    let (device, place) = match role.as_str() {
        "caller" => (caller_driven(), Place::Shared),
        "gpu" => (cuda(), Place::Gpu),
        _ => (device(), Place::Shared),
    };
    let b = Bench::new(device, place, LEN);
    let peer = b
        .device
        .dial(&std::env::var(SOCKET).expect("a socket"), LONG)
        .expect("dialled");
    let (qp, theirs) = connect(&b, &peer);
    match role.as_str() {
        "echo" | "caller" | "gpu" => {
            let export = qp.export().expect("exported");
            peer.barrier(LONG).expect("the peer has put");
            let got = read(&b.target, 0, 1000);
            assert_eq!(
                got,
                read(&b.source, 0, 1000),
                "both sides fill their source alike"
            );
            b.source.write(0, &[0x77; 1000]).expect("in range");
            assert_eq!(
                b.run("put_bw", ONE, &rate(&b, &export, &theirs, 1000))[0].error,
                0
            );
            peer.barrier(LONG).expect("the peer has looked");
            qp.check().expect("no error");
            peer.barrier(LONG).expect("the peer is done");
        }
        "die" => {
            peer.barrier(LONG).expect("the peer is ready");
            // No goodbye, no unwinding: as a process that is killed.
            std::process::abort();
        }
        "deregister" => {
            peer.barrier(LONG).expect("the peer has put");
            let Bench { target, .. } = b;
            let memory = target.deregister(LONG).expect("the peer lets go");
            let mut before = [0; 64];
            memory.read(0, &mut before).expect("in range");
            peer.barrier(LONG).expect("the peer may try");
            peer.barrier(LONG).expect("the peer has tried");
            let mut after = [0; 64];
            memory.read(0, &mut after).expect("in range");
            assert_eq!(before, after, "a revoked key writes nothing");
        }
        "destroy" => {
            peer.barrier(LONG).expect("the peer is ready");
            qp.destroy(LONG).expect("destroyed");
            peer.barrier(LONG).expect("the peer may try");
            peer.barrier(LONG).expect("the peer has tried");
        }
        other => panic!("no role {other}"),
    }
}

/// `target`: where both sides' regions lie; `place`: where this side puts from.
fn echo(device: Device, role: &str, target: Place, place: Place) {
    let b = Bench::new(device, target, LEN);
    let (child, peer) = peer(&b.device, role);
    assert_eq!(peer.credentials().pid, child.child.id() as i32);
    let (qp, theirs) = connect(&b, &peer);
    let export = qp.export().unwrap();
    // The source may lie anywhere: only the peer's target has to be shared.
    let source =
        b.pd.register(&b.device.alloc(place, LEN).unwrap(), doorbell::Access::ALL)
            .unwrap();
    source.write(0, &read(&b.source, 0, LEN)).unwrap();
    let mut put = rate(&b, &export, &theirs, 1000);
    put.local = params::Area {
        addr: source.addr(),
        key: source.key(),
        ..Default::default()
    };
    assert_eq!(b.run("put_bw", ONE, &put)[0].error, 0);
    peer.barrier(LONG).unwrap();
    peer.barrier(LONG).unwrap();
    assert_eq!(read(&b.target, 0, 1000), [0x77; 1000]);
    // What the peer's memory holds can be read, and its words counted.
    let get = params::Rate {
        local: params::Area {
            addr: b.target.addr(),
            key: b.target.key(),
            ..Default::default()
        },
        ..put
    };
    assert_eq!(b.run("get_bw", ONE, &get)[0].error, 0);
    assert_eq!(read(&b.target, 0, 1000), read(&b.source, 0, 1000));
    drop(export);
    let mut cpu = CpuQp::new(&qp).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    let word = Remote {
        addr: theirs.regions[0].addr + 4096,
        key: cpu::remote(&theirs.regions[0], 0).key,
    };
    let old = doorbell::device_api::Fetch {
        addr: b.source.addr(),
        key: cpu::remote(&b.source.remote(), 0).key,
    };
    for i in 0..10 {
        q.wait(q.fetch_add(word, 3, old, Post::by(by)).unwrap(), by)
            .unwrap();
        assert_eq!(b.source.memory().load(0).unwrap(), 3 * i);
    }
    peer.barrier(LONG).unwrap();
    child.ends_well();
}

#[test]
fn kernels_of_two_processes_put_to_each_other() {
    echo(device(), "echo", Place::Shared, Place::Shared);
    echo(device(), "echo", Place::Shared, Place::Host);
}

#[test]
fn both_processes_can_be_driven_by_their_callers() {
    echo(caller_driven(), "caller", Place::Shared, Place::Host);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_memory_of_another_process_is_reached() {
    let device = cuda();
    echo(device.clone(), "gpu", Place::Gpu, Place::Host);
    echo(device, "gpu", Place::Gpu, Place::Gpu);
}

fn cuda() -> Device {
    Device::builder()
        .gpu(GpuSelect::Cuda(None))
        .hca_cores(1)
        .open()
        .expect("a device on a CUDA GPU")
}

#[test]
fn a_peer_that_dies_is_an_error_within_its_time() {
    let b = Bench::new(device(), Place::Shared, LEN);
    let (child, peer) = peer(&b.device, "die");
    let (qp, theirs) = connect(&b, &peer);
    let export = qp.export().unwrap();
    assert_eq!(
        b.run("put_bw", ONE, &rate(&b, &export, &theirs, 64))[0].error,
        0
    );
    peer.barrier(LONG).unwrap();
    let mut seen = (false, false);
    while seen != (true, true) {
        match b.device.next_error(LONG).expect("both are reported") {
            AsyncError::PeerDown { peer: id, .. } => {
                assert_eq!(id, peer.id());
                seen.0 = true;
            }
            AsyncError::Qp { qpn, fault } => {
                assert_eq!((qpn, fault.vendor()), (qp.qpn(), Vendor::PEER_DEAD));
                seen.1 = true;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(qp.state(), QpState::Error);
    assert!(peer.gone().is_some());
    let s = b.run("put_bw", ONE, &rate(&b, &export, &theirs, 64));
    let Some(Failure::Completion { vendor, .. }) =
        DeviceError::from_code(s[0].error).map(DeviceError::failure)
    else {
        panic!("{s:?}")
    };
    assert_eq!(Vendor(vendor), Vendor::PEER_DEAD);
    assert!(peer.send(b"anyone?", Duration::from_millis(10)).is_err());
    // The queue pair itself is fine: it can carry on within this process.
    drop(child);
    let qp = qp.reset(LONG).unwrap().connect_to_self().unwrap();
    assert_eq!(b.run("put_bw", ONE, &b.rate(&export, 64))[0].error, 0);
    qp.check().unwrap();
}

#[test]
fn a_region_that_the_peer_deregisters_is_out_of_reach() {
    let b = Bench::new(device(), Place::Shared, LEN);
    let (child, peer) = peer(&b.device, "deregister");
    let (qp, theirs) = connect(&b, &peer);
    let export = qp.export().unwrap();
    let put = rate(&b, &export, &theirs, 64);
    assert_eq!(b.run("put_bw", ONE, &put)[0].error, 0);
    peer.barrier(LONG).unwrap();
    peer.barrier(LONG).unwrap();
    b.source.write(0, &[0xff; 64]).unwrap();
    assert_ne!(b.run("put_bw", ONE, &put)[0].error, 0);
    assert_eq!(qp.error().unwrap().vendor(), Vendor::REVOKED);
    peer.barrier(LONG).unwrap();
    child.ends_well();
}

#[test]
fn a_queue_pair_whose_peer_is_destroyed_fails() {
    let b = Bench::new(device(), Place::Shared, LEN);
    let (child, peer) = peer(&b.device, "destroy");
    let (qp, theirs) = connect(&b, &peer);
    let export = qp.export().unwrap();
    peer.barrier(LONG).unwrap();
    peer.barrier(LONG).unwrap();
    assert_ne!(
        b.run("put_bw", ONE, &rate(&b, &export, &theirs, 64))[0].error,
        0
    );
    assert_eq!(qp.error().unwrap().vendor(), Vendor::PEER_DEAD);
    peer.barrier(LONG).unwrap();
    child.ends_well();
}

#[test]
fn large_exchanges_cross_in_pieces() {
    let (a, b) = (device(), device());
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s").to_str().unwrap().to_owned();
    let listener = a.listen(&socket).unwrap();
    let other = std::thread::spawn(move || {
        let peer = b.dial(&socket, LONG).unwrap();
        let got = peer.exchange(&vec![2; 300_000], LONG).unwrap();
        assert_eq!(got, vec![1; 1_000_000]);
        assert_eq!(peer.exchange(b"", LONG).unwrap(), b"");
        peer.close(LONG).unwrap();
    });
    let peer = listener.accept(LONG).unwrap();
    assert_eq!(
        peer.exchange(&vec![1; 1_000_000], LONG).unwrap(),
        vec![2; 300_000]
    );
    peer.barrier(LONG).unwrap();
    other.join().unwrap();
    let e = peer
        .exchange(&vec![0; 17 << 20], LONG)
        .unwrap_err()
        .to_string();
    assert!(e.contains("16 MiB"), "{e}");
    let quick = Duration::from_millis(50);
    assert!(a.dial("/nonexistent", quick).is_err());
    assert!(listener.accept(quick).is_err());
}
