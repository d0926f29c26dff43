//! A peer over SRD that is no Doorbell, or a mad one: whatever it says, the engine goes on, memory is as it was, and what cannot be
//! meant well ends the connection.

use std::sync::Arc;

use crate::common::{MockQp, Options, PATIENCE, Region, Rig, seed};
use doorbell_hca::verbs::library::abi::{Sge, Wc, access};
use doorbell_hca::verbs::library::efa::{Address, SrdConfig, SrdOp, SrdQp, SrdWork, To};
use doorbell_hca::verbs::library::{Context, Cq, Mr, Pd, Source};
use doorbell_hca::verbs::{VerbsConfig, VerbsEnd, VerbsPort, VerbsTarget};
use doorbell_hca::{Destination, Event, QpState};
use doorbell_verbs_mock::{Config, Mock, Srd};
use doorbell_wire::{Syndrome, Wqe};

use crate::pair::poll_some;

const QKEY: u32 = 0x1111;
/// What the liar's messages carry, and what comes back.
const TOKEN: u32 = 0x55_5555;
const WORDS: usize = 1024;

struct Liar {
    rig: Rig,
    _mock: Mock,
    port: Arc<VerbsPort>,
    /// The one that is lied to.
    a: MockQp,
    end: Option<VerbsEnd>,
    /// Receives that are posted.
    receives: u64,
    qp: SrdQp,
    cq: Cq,
    address: Address,
    mr: Mr,
    _pd: Pd,
    gid: [u8; 16],
    memory: Box<[u64; WORDS]>,
}

impl Liar {
    fn new() -> Self {
        let rig = Rig::new();
        let mock = Mock::new(Config {
            srd: Some(Srd::default()),
            ..Config::default()
        });
        let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
        let attr = context.efa().expect("asked").expect("an EFA device");
        let gid = context.choose_gid(1, None, None).expect("a GID").gid;
        let pd = Pd::new(&context).expect("a domain");
        let cq = Cq::new(&context, 1024).expect("a queue");
        let config = SrdConfig {
            send: 256,
            recv: 512,
        };
        let qp = SrdQp::new(&pd, &cq, &config, &attr).expect("a queue pair");
        qp.start(1, QKEY, None).expect("RTS");
        let address = Address::new(&pd, 1, gid).expect("the device itself");
        let memory = Box::new([0; WORDS]);
        let at = memory.as_ptr().expose_provenance() as u64;
        let rights = access::LOCAL_WRITE;
        // SAFETY: the memory is dropped after its registration.
        let mr = unsafe { pd.register(Source::Host(at), 8 * WORDS, at, rights) };
        let port = rig
            .hca
            .open_verbs(&mock.verbs(), &VerbsConfig::new(mock.name()))
            .expect("opens");
        let a = rig.qp_with(Options {
            receive: true,
            ..Options::default()
        });
        let mut liar = Self {
            rig,
            _mock: mock,
            port,
            a,
            end: None,
            receives: 0,
            qp,
            cq,
            address,
            mr: mr.expect("registers"),
            _pd: pd,
            gid,
            memory,
        };
        liar.connect();
        liar
    }

    fn connect(&mut self) {
        if self.a.state() != QpState::Reset {
            self.a.reset();
        }
        let qp = self.a.hca_qp();
        let end = qp.prepare(&self.port, PATIENCE).expect("SRD");
        let to = VerbsTarget {
            peer: VerbsEnd {
                qpn: self.qp.qpn(),
                gid: self.gid,
                srd: Some(QKEY),
                ..end
            },
            sq_psn: 0x66_6666,
            rq_psn: TOKEN,
            timeout: 14,
            retry: 6,
            rnr_retry: 7,
            min_rnr_timer: 12,
        };
        let to = Destination::Verbs(Box::new(to));
        qp.connect(to, PATIENCE).expect("connects");
        self.end = Some(end);
        while self.receives < 64 {
            let piece = Sge {
                addr: self.mr.base() + 4096,
                length: 4096,
                lkey: self.mr.lkey(),
            };
            // SAFETY: the memory outlives the queue pair; nobody reads what answers say.
            unsafe { self.qp.post_recv(1, &mut [piece]) }.expect("posted");
            self.receives += 1;
        }
        self.say(&head(1, TOKEN, 0, |h| h[40] = 32), &[]);
        poll_some(&self.rig);
        assert_eq!(self.a.state(), QpState::Ready);
    }

    /// Sends a message and lets the engine look at it.
    fn say(&mut self, head: &[u8], rest: &[u8]) {
        let bytes: Vec<u8> = head.iter().chain(rest).copied().collect();
        for (word, bytes) in self.memory.iter_mut().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        let piece = Sge {
            addr: self.mr.base(),
            length: bytes.len() as u32,
            lkey: self.mr.lkey(),
        };
        let end = self.end.expect("connected");
        let to = To {
            address: &self.address,
            qpn: end.qpn,
            qkey: end.srd.expect("SRD"),
        };
        let work = SrdWork::new(1 << 40, SrdOp::Send, &[piece]);
        // SAFETY: the memory outlives the queue pair and is not changed before the request is over.
        unsafe { self.qp.post(to, &[work]) }.expect("posted");
        let mut over = false;
        for _ in 0..10_000 {
            let mut out = [Wc::default(); 16];
            let n = self.cq.poll(&mut out).expect("completions");
            over |= out[..n].iter().any(|wc| wc.wr_id == 1 << 40);
            let filled = out[..n].iter().filter(|wc| wc.wr_id == 1).count();
            self.receives -= filled as u64;
            if over {
                break;
            }
            self.rig.driver.poll();
        }
        assert!(over);
        for _ in 0..20 {
            self.rig.driver.poll();
        }
    }

    fn engine_is_alive(&self) {
        while let Some(event) = self.rig.hca.poll_event() {
            assert!(!matches!(event, Event::EngineDown { .. }), "{event:?}");
        }
    }
}

/// A head as the documentation of the format has it.
fn head(kind: u8, token: u32, seq: u64, change: impl FnOnce(&mut [u8; 80])) -> [u8; 80] {
    let mut bytes = [0; 80];
    (bytes[0], bytes[1], bytes[3]) = (kind, 1, 8);
    bytes[4..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..16].copy_from_slice(&seq.to_le_bytes());
    change(&mut bytes);
    bytes
}

fn put(bytes: &mut [u8; 80], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// An atomic on the first word of a region: adds 1.
fn add(liar: &Liar, region: &Region, seq: u64) -> [u8; 80] {
    let keys = region.mr.on_port(&liar.port).expect("registers");
    head(4, TOKEN, seq, |h| {
        h[16..24].copy_from_slice(&keys.base.to_le_bytes());
        put(h, 24, keys.rkey);
        h[48] = 1;
    })
}

#[test]
fn strangers_and_other_versions_are_not_heard() {
    let mut liar = Liar::new();
    let region = liar.rig.region(64);
    let good = add(&liar, &region, 0);
    let mut other = good;
    other[4] ^= 1;
    liar.say(&other, &[]);
    let mut newer = good;
    newer[1] = 2;
    liar.say(&newer, &[]);
    let mut unknown = good;
    unknown[0] = 77;
    liar.say(&unknown, &[]);
    liar.say(&good[..40], &[]);
    liar.say(&[], &[0; 3]);
    assert_eq!((region.u64(0), liar.a.state()), (0, QpState::Ready));
    liar.say(&good, &[]);
    assert_eq!((region.u64(0), liar.a.state()), (1, QpState::Ready));
}

#[test]
fn messages_wait_for_those_before_them_and_none_is_carried_out_twice() {
    let mut liar = Liar::new();
    let region = liar.rig.region(64);
    for seq in [2, 1, 31] {
        liar.say(&add(&liar, &region, seq), &[]);
        assert_eq!(region.u64(0), 0, "number {seq} went before number 0");
    }
    liar.say(&add(&liar, &region, 0), &[]);
    assert_eq!(region.u64(0), 3);
    // One that was carried out, and one that waits.
    for seq in [1, 31] {
        liar.say(&add(&liar, &region, seq), &[]);
        assert_eq!((region.u64(0), liar.a.state()), (3, QpState::Error));
        let word = liar.a.error_word();
        assert_eq!(word.syndrome(), Syndrome::BAD_RESP.0);
        liar.connect();
        for seq in [31, 2, 1, 0] {
            liar.say(&add(&liar, &region, seq), &[]);
        }
        assert_eq!(region.u64(0), 6);
        region.set_u64(0, 3);
    }
}

#[test]
fn what_breaks_the_agreement_ends_the_connection() {
    let cases: [(&str, [u8; 80], usize); 7] = [
        ("beyond the window", head(4, TOKEN, 32, |_| {}), 0),
        ("at the end of numbers", head(4, TOKEN, u64::MAX, |_| {}), 0),
        ("another window", head(1, TOKEN, 0, |h| h[40] = 31), 0),
        ("an answer to nothing", head(6, TOKEN, 0, |h| h[40] = 1), 8),
        (
            "an answer without results",
            head(6, TOKEN, 0, |h| h[40] = 1),
            0,
        ),
        (
            "a failure of nothing",
            head(6, TOKEN, 0, |h| (h[2], h[3]) = (2, 0x13)),
            0,
        ),
        (
            "a count that overflows",
            head(6, TOKEN, u64::MAX, |h| put(h, 40, u32::MAX)),
            8,
        ),
    ];
    let mut liar = Liar::new();
    for (what, head, rest) in cases {
        liar.say(&head, &vec![0; rest]);
        assert_eq!(liar.a.state(), QpState::Error, "{what}");
        let word = liar.a.error_word();
        assert_eq!(word.syndrome(), Syndrome::BAD_RESP.0, "{what}");
        liar.engine_is_alive();
        liar.connect();
    }
}

#[test]
fn parts_of_a_send_that_do_not_fit_together_write_nothing() {
    let send = |offset, count, total| {
        head(2, TOKEN, 0, |h| {
            put(h, 32, total);
            put(h, 36, offset);
            put(h, 40, count);
        })
    };
    let mut liar = Liar::new();
    for (offset, count, total, rest) in [
        (8, 8, 16, 8),
        (0, 8, 4, 8),
        (0, 8, 8, 16),
        (0, 16, 16, 8),
        (u32::MAX, 8, 7, 8),
        (0, u32::MAX, u32::MAX, 8),
    ] {
        let dst = liar.rig.region(64);
        liar.a.post_receive(&[dst.local(0, 64)]);
        liar.say(&send(offset, count, total), &vec![0xff; rest]);
        assert_eq!(dst.bytes(0, 64), [0; 64], "{offset} {count} {total} {rest}");
        assert!(dst.canaries_intact());
        liar.engine_is_alive();
        liar.a.reset();
        liar.connect();
    }
}

#[test]
fn an_answer_that_comes_twice_or_to_another_kind_of_request_ends_the_connection() {
    let mut liar = Liar::new();
    let (old, src) = (liar.rig.region(64), liar.rig.region(64));
    let to = doorbell_wire::Remote {
        addr: 0x1000,
        key: doorbell_wire::Key(5),
    };
    let answer = |seq, value: u8| (head(6, TOKEN, seq, |h| h[40] = 1), [value; 8]);
    let wqe = Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes");
    let at = liar.a.go(wqe);
    poll_some(&liar.rig);
    let (head, result) = answer(0, 7);
    liar.say(&head, &result);
    liar.a.wait(&liar.rig, at);
    assert_eq!(old.u64(0), 0x0707_0707_0707_0707);
    liar.say(&head, &result);
    assert_eq!(liar.a.state(), QpState::Error);
    assert_eq!(liar.a.error_word().syndrome(), Syndrome::BAD_RESP.0);
    assert_eq!(old.u64(0), 0x0707_0707_0707_0707);
    drop(src);
}

#[test]
fn whatever_is_said_the_engine_goes_on() {
    let mut liar = Liar::new();
    let region = liar.rig.region(64);
    let mut state = seed() | 1;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut ended = 0;
    for _ in 0..1500 {
        let mut head = add(&liar, &region, draw() % 4);
        head[0] = (draw() % 8) as u8;
        for _ in 0..draw() % 6 {
            let at = (draw() % 80) as usize;
            head[at] = draw() as u8;
        }
        let rest = vec![draw() as u8; (draw() % 200) as usize];
        liar.say(&head, &rest);
        liar.engine_is_alive();
        if liar.a.state() == QpState::Error {
            ended += 1;
            liar.connect();
        }
    }
    assert!(ended > 10, "only {ended} of them mattered");
    assert!(region.canaries_intact());
}
