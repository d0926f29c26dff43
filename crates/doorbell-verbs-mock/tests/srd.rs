//! The wrappers of SRD against the mock, and that the mock refuses what the real provider and driver refuse.

use std::collections::BTreeSet;

use doorbell_verbs::abi::{Sge, Wc, access, qp_state, wc_opcode, wc_status};
use doorbell_verbs::efa::abi::status;
use doorbell_verbs::efa::{Address, SrdConfig, SrdOp, SrdQp, SrdWork, To};
use doorbell_verbs::{Context, Cq, Mr, Pd, Qp, QpConfig, Source};
use doorbell_verbs_mock::{Config, Mock, Srd};

const RIGHTS: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;

fn efa() -> Config {
    Config {
        srd: Some(Srd::default()),
        ..Config::default()
    }
}

/// Two queue pairs of one device, and 4 KiB of memory on either side.
struct Pair {
    mock: Mock,
    context: Context,
    pd: Pd,
    cqs: [Cq; 2],
    qps: [SrdQp; 2],
    address: Option<Address>,
    memory: [Box<[u64; 512]>; 2],
    mrs: [Mr; 2],
}

impl Pair {
    fn new() -> Self {
        let mock = Mock::new(efa());
        let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
        let attr = context.efa().expect("asked").expect("an EFA device");
        assert!(attr.reads && attr.writes && attr.rnr_retry && attr.send_pieces == 2);
        let pd = Pd::new(&context).expect("a domain");
        let cqs = [0, 1].map(|_| Cq::new(&context, 256).expect("a queue"));
        let config = SrdConfig { send: 64, recv: 64 };
        let qps = [0, 1].map(|i| SrdQp::new(&pd, &cqs[i], &config, &attr).expect("a queue pair"));
        for qp in &qps {
            qp.start(1, 0x77, Some(7)).expect("RTS");
            assert_eq!(qp.state().expect("its state"), qp_state::RTS);
        }
        let gid = context.choose_gid(1, None, None).expect("a GID");
        let address = Address::new(&pd, 1, gid.gid).expect("itself");
        let memory = [Box::new([0u64; 512]), Box::new([0u64; 512])];
        let mrs = [0, 1].map(|i| {
            let at = memory[i].as_ptr().expose_provenance() as u64;
            // SAFETY: the memory outlives the region (fields drop in order: queue pairs first), and tests order their accesses.
            unsafe { pd.register(Source::Host(at), 4096, at, RIGHTS) }.expect("registers")
        });
        Self {
            mock,
            context,
            pd,
            cqs,
            qps,
            address: Some(address),
            memory,
            mrs,
        }
    }

    fn at(&self, side: usize, word: usize) -> u64 {
        self.mrs[side].base() + 8 * word as u64
    }

    fn piece(&self, side: usize, word: usize, length: u32) -> Sge {
        Sge {
            addr: self.at(side, word),
            length,
            lkey: self.mrs[side].lkey(),
        }
    }

    fn post(&self, qkey: u32, works: &[SrdWork]) -> Result<(), i32> {
        let to = To {
            address: self.address.as_ref().expect("not dropped yet"),
            qpn: self.qps[1].qpn(),
            qkey,
        };
        // SAFETY: the memory outlives the test's requests.
        unsafe { self.qps[0].post(to, works) }
    }

    fn drain(&self, side: usize, count: usize) -> Vec<Wc> {
        let mut all = Vec::new();
        for _ in 0..10_000 {
            let mut out = [Wc::default(); 16];
            let n = self.cqs[side].poll(&mut out).expect("completions");
            all.extend_from_slice(&out[..n]);
            if all.len() >= count {
                return all;
            }
        }
        panic!("{} completions of {count}", all.len());
    }

    fn one(&self, op: SrdOp, pieces: &[Sge]) -> Wc {
        self.post(0x77, &[SrdWork::new(1, op, pieces)])
            .expect("posted");
        self.drain(0, 1)[0]
    }
}

#[test]
fn writes_reads_and_messages() {
    let mut p = Pair::new();
    p.memory[0][3] = 0x1234;
    let (addr, rkey) = (p.at(1, 10), p.mrs[1].rkey());
    let wc = p.one(SrdOp::Write { addr, rkey }, &[p.piece(0, 3, 8)]);
    assert_eq!(
        (wc.status, wc.opcode),
        (wc_status::SUCCESS, wc_opcode::RDMA_WRITE)
    );
    assert_eq!(p.memory[1][10], 0x1234);
    let wc = p.one(SrdOp::Read { addr, rkey }, &[p.piece(0, 4, 8)]);
    assert_eq!((wc.status, p.memory[0][4]), (wc_status::SUCCESS, 0x1234));
    // SAFETY: the memory outlives the receive.
    unsafe { p.qps[1].post_recv(9, &mut [p.piece(1, 20, 64)]) }.expect("posted");
    let wc = p.one(SrdOp::Send, &[p.piece(0, 3, 8), p.piece(0, 4, 8)]);
    assert_eq!(wc.status, wc_status::SUCCESS);
    let got = p.drain(1, 1)[0];
    assert_eq!(
        (got.wr_id, got.byte_len, got.src_qp),
        (9, 16, p.qps[0].qpn())
    );
    assert_eq!(p.memory[1][20..22], [0x1234, 0x1234]);
}

#[test]
fn requests_finish_in_another_order_each_once() {
    let p = Pair::new();
    let (addr, rkey) = (p.at(1, 0), p.mrs[1].rkey());
    let works: Vec<_> = (0..60)
        .map(|id| SrdWork::new(id, SrdOp::Write { addr, rkey }, &[p.piece(0, 0, 64)]))
        .collect();
    p.post(0x77, &works).expect("posted");
    let ids: Vec<u64> = p.drain(0, 60).iter().map(|wc| wc.wr_id).collect();
    assert_ne!(ids, (0..60).collect::<Vec<_>>());
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 60);
    assert!(p.mock.counts().overtaken > 10);
}

#[test]
fn what_the_provider_refuses_is_refused_all_or_nothing() {
    let p = Pair::new();
    let (addr, rkey) = (p.at(1, 0), p.mrs[1].rkey());
    let write = SrdOp::Write { addr, rkey };
    let one = p.piece(0, 0, 8);
    // A remote write has one piece, a message fits a packet, a queue ends.
    let bad = [
        SrdWork::new(1, write, &[one]),
        SrdWork::new(2, write, &[one, one]),
    ];
    assert_eq!(p.post(0x77, &bad), Err(libc::EINVAL));
    let long = Sge {
        length: 9000,
        ..one
    };
    assert_eq!(
        p.post(0x77, &[SrdWork::new(1, SrdOp::Send, &[long])]),
        Err(libc::EINVAL)
    );
    let many = vec![SrdWork::new(1, write, &[one]); 65];
    assert_eq!(p.post(0x77, &many), Err(libc::ENOMEM));
    assert_eq!(p.mock.counts().requests, 1 + 64, "and none was taken");
    let wc = p.one(write, &[one]);
    assert_eq!(wc.status, wc_status::SUCCESS);
    // Rights that the device does not have.
    let at = p.memory[0].as_ptr().expose_provenance() as u64;
    let rights = RIGHTS | access::REMOTE_ATOMIC;
    // SAFETY: as above.
    let refused = unsafe { p.pd.register(Source::Host(at), 4096, at, rights) };
    assert!(refused.is_err());
    // RC, and the ways to bring that up.
    let config = QpConfig {
        send: 8,
        recv: 8,
        send_pieces: 1,
        recv_pieces: 1,
        inline: 0,
        calls: true,
    };
    assert!(Qp::new(&p.pd, &p.cqs[0], &p.cqs[0], &config).is_err());
    assert!(p.qps[0].start(1, 0, Some(7)).is_err(), "it is in RTS");
}

#[test]
fn failures_leave_the_queue_pair_as_it_is() {
    let mut p = Pair::new();
    let (addr, rkey) = (p.at(1, 0), p.mrs[1].rkey());
    let (write, piece) = (SrdOp::Write { addr, rkey }, p.piece(0, 0, 8));
    let beyond = SrdOp::Write {
        addr: addr + 4090,
        rkey,
    };
    let wc = p.one(beyond, &[piece]);
    assert_eq!((wc.status, wc.vendor_err), (wc_status::REM_ACCESS_ERR, 7));
    // Another key than the peer's queue pair has.
    p.post(0x78, &[SrdWork::new(2, write, &[piece])])
        .expect("posted");
    let wc = p.drain(0, 1)[0];
    let nobody = (wc_status::REM_INV_RD_REQ_ERR, status::BAD_DEST_QPN);
    assert_eq!((wc.status, wc.vendor_err), nobody);
    assert_eq!(p.one(write, &[piece]).status, wc_status::SUCCESS);
    p.qps[1].fail().expect("to ERR");
    let wc = p.one(SrdOp::Send, &[piece]);
    assert_eq!((wc.status, wc.vendor_err), nobody);
    assert_eq!(p.qps[0].state().expect("its state"), qp_state::RTS);
    // A target that does not know this side takes no remote writes. (Both are one device here, whose only handle is this.)
    let other = Mock::new(efa());
    let context = Context::open(&other.verbs(), other.name()).expect("opens");
    let attr = context.efa().expect("asked").expect("an EFA device");
    let pd = Pd::new(&context).expect("a domain");
    let cq = Cq::new(&context, 64).expect("a queue");
    let config = SrdConfig { send: 8, recv: 8 };
    let qp = SrdQp::new(&pd, &cq, &config, &attr).expect("a queue pair");
    qp.start(1, 5, None).expect("RTS");
    let gid = context.choose_gid(1, None, None).expect("a GID");
    let there = Address::new(&p.pd, 1, gid.gid).expect("known");
    let to = To {
        address: &there,
        qpn: qp.qpn(),
        qkey: 5,
    };
    // SAFETY: as above.
    unsafe { p.qps[0].post(to, &[SrdWork::new(3, write, &[piece])]) }.expect("posted");
    let wc = p.drain(0, 1)[0];
    assert_eq!(
        (wc.status, wc.vendor_err),
        (wc_status::REM_OP_ERR, status::UNKNOWN_PEER)
    );
    assert!(Address::new(&p.pd, 1, [9; 16]).is_err());
    drop(there);
    p.address = None;
}

#[test]
fn other_devices_are_no_efa() {
    let mock = Mock::new(Config::default());
    let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
    assert_eq!(context.efa().expect("asked"), None);
    let p = Pair::new();
    assert!(!p.context.attributes().expect("asked").atomics);
}
