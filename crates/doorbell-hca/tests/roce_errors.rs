//! RoCE errors that only the network's other end, or the port itself, can cause: each reaches whoever polls, with its syndrome, the vendor's
//! word, and the index of the work request; what was behind it is flushed.
#![cfg(not(miri))]

mod common;
#[path = "common/roce.rs"]
mod net;

use std::time::Instant;

use common::{MockQp, Options, PATIENCE, Rig};
use doorbell_hca::roce::transport::Config;
use doorbell_hca::roce::{PortConfig, RocePort};
use doorbell_hca::{Access, Fault, QpState};
use doorbell_port::{PathRequest, Port, RecvBatch, SendBatch};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::roce::{Aeth, AethKind, Bth, Ext, Header, NakCode, Opcode, Place, Psn};
use doorbell_wire::{Syndrome, Wqe};

/// Connects to queue pair 0x55 at that address, which sends from packet 900 on; this side from 500 on.
fn connect(qp: &MockQp, peer: std::net::SocketAddr, config: Config) {
    let config = Config {
        dest_qpn: 0x55,
        sq_psn: Psn::new(500),
        rq_psn: Psn::new(900),
        ..config
    };
    net::attach(qp, peer, false, Access::ALL, config);
}

/// A peer that answers as the test says.
struct Peer {
    port: Box<dyn Port>,
    path: doorbell_port::Path,
}

impl Peer {
    fn new(to: &RocePort) -> Self {
        let config: PortConfig = "udp://127.0.0.2".parse().expect("valid");
        let mut port = config.open().expect("a port");
        let path = port.path(&PathRequest::new(to.local)).expect("a way");
        Self { port, path }
    }

    fn send(&mut self, header: &Header, payload: &[u8]) {
        let mut batch = SendBatch::new();
        let space = batch.space(&self.path).expect("empty");
        let start = header.emit(space);
        let len = start + payload.len();
        space[start..len].copy_from_slice(payload);
        batch.commit(&self.path, len);
        self.port.send(&mut batch).expect("sent");
    }

    /// Drives the rig until a packet has come.
    fn hear(&mut self, rig: &Rig) {
        let mut batch: RecvBatch = self.port.recv_batch();
        assert!(rig.until(|| self.port.recv(&mut batch).expect("works") > 0));
    }
}

/// The queue pair is in error as `fault` says, at `at`; its CQE and what follows agree.
fn failed(rig: &Rig, qp: &MockQp, fault: Fault, at: u64, last: u64) {
    assert!(rig.until(|| qp.state() == QpState::Error), "{fault:?}");
    let word = qp.error_word();
    assert_eq!(
        (word.syndrome(), word.vendor(), word.wqe_index()),
        (fault.syndrome().0, fault.vendor().0, at as u16),
        "{fault:?}"
    );
    let cqe = ErrorCqe::parse(&qp.wait_any(rig, last)).expect("an error");
    assert_eq!(cqe.syndrome, Syndrome::WR_FLUSH);
    // In words, as every poller's error has them.
    assert!(fault.syndrome().to_string().len() > 10);
    let first = qp.hca_qp().first_error().expect("kept");
    assert_eq!(first.wqe_index(), at as u16);
}

#[test]
fn answers_that_do_not_fit_and_refusals() {
    let ack = |kind| Ext::Aeth(Aeth { kind, msn: 1 });
    let good = AethKind::Ack { credit: 31 };
    let only = Opcode::read_response(Place::Only);
    let cases: [(&str, Opcode, Ext, usize, Fault); 6] = [
        (
            "a READ's answer is short",
            only,
            ack(good),
            7,
            Fault::BadResponse,
        ),
        ("it is long", only, ack(good), 9, Fault::BadResponse),
        (
            "it is an atomic's",
            Opcode::ATOMIC_ACK,
            Ext::AtomicAck(Aeth { kind: good, msn: 1 }, 5),
            0,
            Fault::BadResponse,
        ),
        (
            "operational",
            Opcode::ACK,
            ack(AethKind::Nak(NakCode::RemoteOperational)),
            0,
            Fault::RemoteOperational,
        ),
        (
            "access",
            Opcode::ACK,
            ack(AethKind::Nak(NakCode::RemoteAccess)),
            0,
            Fault::RemoteAccess,
        ),
        (
            "invalid",
            Opcode::ACK,
            ack(AethKind::Nak(NakCode::InvalidRequest)),
            0,
            Fault::RemoteInvalid,
        ),
    ];
    for (what, opcode, ext, len, fault) in cases {
        println!("{what}");
        let (rig, port) = net::rig_with_port();
        let mut peer = Peer::new(&port);
        let mut qp = rig.qp_with(Options::default());
        connect(
            &qp,
            peer.port.local_addr(),
            Config {
                timeout: 22,
                ..Config::default()
            },
        );
        let region = rig.region(64);
        let at = qp.post(&Wqe::read(region.remote(0), region.local(8, 8)).expect("a length"));
        let last = qp.go(Wqe::nop());
        peer.hear(&rig);
        let bth = Bth::new(opcode, qp.hca_qp().qpn().get(), Psn::new(500));
        peer.send(&Header { bth, ext }, &vec![0xee; len]);
        failed(&rig, &qp, fault, at, last);
        assert_eq!(
            region.bytes(0, 64),
            vec![0; 64],
            "{what}: nothing was stored"
        );
        let counted = qp
            .hca_qp()
            .roce_counters(PATIENCE)
            .expect("alive")
            .expect("there");
        let bad = u64::from(fault == Fault::BadResponse);
        assert_eq!(counted.req_bad_responses, bad, "{what}");
    }
}

/// A receiver that is never ready costs as many tries as were agreed, and no more; the peer of a slow one does not count them.
#[test]
fn receivers_that_are_not_ready() {
    for tries in 0..3u8 {
        let (rig, port) = net::rig_with_port();
        let receives = Options {
            receive: true,
            ..Options::default()
        };
        let (mut a, b) = (rig.qp_with(receives), rig.qp_with(receives));
        for (from, to) in [(&a, &b), (&b, &a)] {
            let config = Config {
                timeout: 22,
                rnr_retry: tries,
                // 10.24 ms.
                min_rnr_timer: 20,
                ..Config::default()
            };
            net::connect(from, to, &port, Access::ALL, config);
        }
        let started = Instant::now();
        let at = a.post(&Wqe::send_inline(b"anybody?").expect("short"));
        let last = a.go(Wqe::nop());
        failed(&rig, &a, Fault::RnrExceeded, at, last);
        assert!(
            started.elapsed().as_millis() >= 10 * u128::from(tries),
            "it gave up early"
        );
        let counted = |qp: &MockQp| {
            let counted = qp.hca_qp().roce_counters(PATIENCE).expect("alive");
            counted.expect("connected")
        };
        assert_eq!(counted(&a).req_rnr_retries_exceeded, 1);
        assert_eq!(counted(&a).rnr_nak_retry_err, u64::from(tries));
        assert_eq!(counted(&b).out_of_buffer, u64::from(tries) + 1);
        assert_eq!(b.state(), QpState::Ready);
    }
}

/// The port's socket is taken away: every queue pair of the core is told, also those that had nothing to do, and a new one too.
#[test]
fn a_port_that_fails_fails_its_queue_pairs() {
    let (rig, port) = net::rig_with_port();
    let peer = Peer::new(&port);
    let (mut busy, idle) = (
        rig.qp_with(Options::default()),
        rig.qp_with(Options::default()),
    );
    for qp in [&busy, &idle] {
        connect(
            qp,
            peer.port.local_addr(),
            Config {
                timeout: 22,
                ..Config::default()
            },
        );
    }
    let region = rig.region(64);
    let at = busy.post(&Wqe::read(region.remote(0), region.local(8, 8)).expect("a length"));
    let last = busy.go(Wqe::nop());
    for _ in 0..50 {
        rig.driver.poll();
    }
    assert_eq!(
        (busy.state(), idle.state()),
        (QpState::Ready, QpState::Ready)
    );
    take_socket(port.local);
    failed(&rig, &busy, Fault::PortDown, at, last);
    assert!(rig.until(|| idle.state() == QpState::Error));
    assert_eq!(idle.error_word().vendor(), Fault::PortDown.vendor().0);
}

/// Puts something that is no socket in the place of the one that is bound there.
fn take_socket(at: std::net::SocketAddr) {
    let mut taken = 0;
    for entry in std::fs::read_dir("/proc/self/fd").expect("procfs") {
        let name = entry.expect("an entry").file_name();
        let Some(fd) = name.to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        // SAFETY: zeros are a valid address of no family.
        let mut addr: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        // SAFETY: the structure is ours, and `len` is its size.
        let known = unsafe { libc::getsockname(fd, (&raw mut addr).cast(), &raw mut len) } == 0;
        if known
            && i32::from(addr.sin_family) == libc::AF_INET
            && u16::from_be(addr.sin_port) == at.port()
        {
            // SAFETY: opening and closing descriptors of our own; the socket's number stays in use, so nobody else can get it meanwhile.
            unsafe {
                let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
                assert!(null >= 0 && libc::dup2(null, fd) == fd);
                libc::close(null);
            }
            taken += 1;
        }
    }
    assert_eq!(taken, 1, "one socket is bound to {at}");
}
