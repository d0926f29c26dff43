//! The wrappers of `doorbell-verbs` against the mock: every operation by both ways to post, states, keys, events, and injected faults.

use std::time::{Duration, Instant};

use doorbell_verbs::abi::{
    Sge, Wc, access, event_type, qp_state, send_flags, wc_flags, wc_opcode, wc_status,
};
use doorbell_verbs::{
    AsyncEvent, Batch, Connection, Context, Cq, Data, Mr, Op, Pd, Qp, QpConfig, Refused, Remote,
    Source, Work,
};
use doorbell_verbs_mock::{Config, Mock};

const ALL: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// Two queue pairs of one device that are connected, and 4 KiB of memory on either side.
struct Pair {
    mock: Mock,
    context: Context,
    _pd: Pd,
    cqs: [Cq; 2],
    qps: [Qp; 2],
    memory: [Box<[u64; 512]>; 2],
    mrs: [Mr; 2],
}

fn config(calls: bool) -> QpConfig {
    QpConfig {
        send: 64,
        recv: 16,
        send_pieces: 4,
        recv_pieces: 4,
        inline: 1024,
        calls,
    }
}

impl Pair {
    fn new(device: Config) -> Self {
        let mock = Mock::new(device);
        let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
        let pd = Pd::new(&context).expect("a domain");
        let cqs = [0, 1].map(|_| Cq::new(&context, 128).expect("a queue"));
        let qps = [0, 1]
            .map(|i| Qp::new(&pd, &cqs[i], &cqs[i], &config(device.calls)).expect("a queue pair"));
        let gid = context.choose_gid(1, None, None).expect("a GID");
        let memory = [Box::new([0u64; 512]), Box::new([0u64; 512])];
        let mrs = [0, 1].map(|i| {
            let at = memory[i].as_ptr().expose_provenance() as u64;
            // SAFETY: the memory outlives the region (fields drop in order: queue pairs first), and tests order their accesses.
            unsafe { pd.register(Source::Host(at), 4096, at, ALL) }.expect("registers")
        });
        for (i, qp) in qps.iter().enumerate() {
            qp.init(1, 0, ALL).expect("INIT");
            assert_eq!(qp.state().expect("its state"), qp_state::INIT);
            let to = Connection {
                port: 1,
                gid_index: gid.index,
                own: gid.gid,
                remote: Remote {
                    qpn: qps[1 - i].qpn(),
                    gid: gid.gid,
                    lid: 0,
                },
                global: true,
                mtu: 1024,
                sq_psn: 1,
                rq_psn: 1,
                reads_open: 16,
                reads_answered: 16,
                timeout: 14,
                retry: 7,
                rnr_retry: 7,
                min_rnr_timer: 12,
                hop_limit: 64,
                traffic_class: 0,
                service_level: 0,
            };
            qp.connect(&to).expect("connects");
        }
        Self {
            mock,
            context,
            _pd: pd,
            cqs,
            qps,
            memory,
            mrs,
        }
    }

    fn at(&self, side: usize, word: usize) -> u64 {
        self.mrs[side].base() + 8 * word as u64
    }

    fn sge(&self, side: usize, word: usize, length: u32) -> Sge {
        Sge {
            addr: self.at(side, word),
            length,
            lkey: self.mrs[side].lkey(),
        }
    }

    fn post(&self, works: &[Work<'_>]) -> Result<(), Refused> {
        let mut batch = Batch::default();
        for work in works {
            // SAFETY: memory and queue pair live as long as this pair.
            assert!(unsafe { batch.push(&self.qps[0], work) });
        }
        assert_eq!(batch.len(), works.len());
        // SAFETY: as above.
        let done = unsafe { batch.submit(&self.qps[0]) };
        assert!(batch.is_empty());
        done
    }

    /// `n` completions of a side.
    fn completions(&self, side: usize, n: usize) -> Vec<Wc> {
        let (mut found, mut out) = (Vec::new(), [Wc::default(); 8]);
        let until = Instant::now() + Duration::from_secs(5);
        while found.len() < n {
            let got = self.cqs[side].poll(&mut out).expect("polls");
            found.extend_from_slice(&out[..got]);
            assert!(Instant::now() < until, "{found:?}");
        }
        found
    }

    fn word(&self, side: usize, word: usize) -> u64 {
        // SAFETY: memory of this test, which nobody writes at this moment.
        unsafe { self.memory[side].as_ptr().add(word).read_volatile() }
    }

    fn set(&self, side: usize, word: usize, value: u64) {
        let at = core::ptr::with_exposed_provenance_mut::<u64>(self.at(side, word) as usize);
        // SAFETY: as above; the address was exposed when it was registered.
        unsafe { at.write_volatile(value) };
    }
}

fn signalled(id: u64, op: Op, data: Data<'_>) -> Work<'_> {
    Work {
        id,
        flags: send_flags::SIGNALED,
        op,
        data,
    }
}

fn both(f: impl Fn(Pair)) {
    for calls in [true, false] {
        let pair = Pair::new(Config {
            calls,
            ..Config::default()
        });
        assert!(pair.qps.iter().all(|q| q.by_calls() == calls));
        assert_eq!(
            pair.qps[0].capacity().max_inline_data,
            256,
            "what the device gives"
        );
        f(pair);
    }
}

#[test]
fn every_operation_by_either_way() {
    both(|p| {
        let (rkey, there) = (p.mrs[1].rkey(), p.at(1, 0));
        p.set(0, 0, 0x1111);
        p.set(0, 1, 0x2222);
        p.set(1, 8, 40);
        p.set(1, 9, 7);
        let pieces = [p.sge(0, 0, 8), p.sge(0, 1, 8)];
        let read = [p.sge(0, 16, 16)];
        let (add, swap) = ([p.sge(0, 20, 8)], [p.sge(0, 21, 8)]);
        let works = [
            signalled(
                1,
                Op::Write {
                    addr: there,
                    rkey,
                    imm: None,
                },
                Data::Pieces(&pieces),
            ),
            signalled(
                2,
                Op::Write {
                    addr: there + 16,
                    rkey,
                    imm: None,
                },
                Data::Inline(b"12345678"),
            ),
            signalled(3, Op::Read { addr: there, rkey }, Data::Pieces(&read)),
            signalled(
                4,
                Op::FetchAdd {
                    addr: p.at(1, 8),
                    rkey,
                    add: 2,
                },
                Data::Pieces(&add),
            ),
            signalled(
                5,
                Op::CompareSwap {
                    addr: p.at(1, 9),
                    rkey,
                    compare: 7,
                    swap: 9,
                },
                Data::Pieces(&swap),
            ),
            signalled(
                6,
                Op::Write {
                    addr: 0,
                    rkey: 0,
                    imm: None,
                },
                Data::Pieces(&[]),
            ),
        ];
        p.post(&works).expect("posts");
        let ids: Vec<u64> = p.completions(0, 6).iter().map(|w| w.wr_id).collect();
        assert_eq!(ids, [1, 2, 3, 4, 5, 6]);
        assert_eq!([p.word(1, 0), p.word(1, 1)], [0x1111, 0x2222]);
        assert_eq!(p.word(1, 2), u64::from_ne_bytes(*b"12345678"));
        assert_eq!([p.word(0, 16), p.word(0, 17)], [0x1111, 0x2222]);
        assert_eq!([p.word(1, 8), p.word(0, 20)], [42, 40]);
        assert_eq!([p.word(1, 9), p.word(0, 21)], [9, 7]);
        let counts = p.mock.counts();
        assert_eq!((counts.posts, counts.requests, counts.inline), (1, 6, 1));
    });
}

#[test]
fn sends_and_immediates_take_receives_in_order() {
    both(|p| {
        for id in 0..3 {
            let mut pieces = [p.sge(1, 32 + 4 * id as usize, 32)];
            // SAFETY: the memory lives as long as the pair.
            unsafe { p.qps[1].post_recv(id, &mut pieces) }.expect("posts");
        }
        p.set(0, 0, 77);
        let (one, rkey) = ([p.sge(0, 0, 8)], p.mrs[1].rkey());
        let to = p.at(1, 0);
        p.post(&[
            signalled(1, Op::Send { imm: None }, Data::Pieces(&one)),
            signalled(
                2,
                Op::Send {
                    imm: Some(0xdead_beef),
                },
                Data::Inline(b"hi"),
            ),
            signalled(
                3,
                Op::Write {
                    addr: to,
                    rkey,
                    imm: Some(5),
                },
                Data::Pieces(&one),
            ),
        ])
        .expect("posts");
        p.completions(0, 3);
        let got = p.completions(1, 3);
        let seen: Vec<_> = got
            .iter()
            .map(|w| {
                (
                    w.wr_id,
                    w.opcode,
                    w.byte_len,
                    w.wc_flags,
                    u32::from_be(w.imm),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (0, wc_opcode::RECV, 8, 0, 0),
                (1, wc_opcode::RECV, 2, wc_flags::WITH_IMM, 0xdead_beef),
                (2, wc_opcode::RECV_RDMA_WITH_IMM, 8, wc_flags::WITH_IMM, 5),
            ]
        );
        assert_eq!([p.word(1, 32), p.word(1, 0)], [77, 77]);
        assert_eq!(
            p.word(1, 40),
            0,
            "a WRITE with immediate leaves the receive's memory alone"
        );
    });
}

#[test]
fn refusals_say_how_much_was_taken() {
    let refused = |calls| {
        let p = Pair::new(Config {
            calls,
            ..Config::default()
        });
        p.mock.refuse_post(2, libc::ENOMEM);
        let (rkey, to) = (p.mrs[1].rkey(), p.at(1, 0));
        let work = |id| {
            signalled(
                id,
                Op::Write {
                    addr: to,
                    rkey,
                    imm: None,
                },
                Data::Inline(b"abcdefgh"),
            )
        };
        let works: Vec<_> = (0..5).map(work).collect();
        p.post(&works).expect_err("refused")
    };
    // A list is taken up to the one that was refused, calls not at all.
    assert_eq!(
        refused(false),
        Refused {
            taken: 2,
            errno: libc::ENOMEM
        }
    );
    assert_eq!(
        refused(true),
        Refused {
            taken: 0,
            errno: libc::ENOMEM
        }
    );
}

#[test]
fn errors_end_both_sides_as_rc_does() {
    both(|p| {
        let one = [p.sge(0, 0, 8)];
        let beyond = p.mrs[1].base() + 4096;
        let rkey = p.mrs[1].rkey();
        p.post(&[
            Work {
                id: 1,
                flags: 0,
                op: Op::Write {
                    addr: beyond,
                    rkey,
                    imm: None,
                },
                data: Data::Pieces(&one),
            },
            signalled(
                2,
                Op::Write {
                    addr: p.at(1, 0),
                    rkey,
                    imm: None,
                },
                Data::Pieces(&one),
            ),
        ])
        .expect("posts");
        let got = p.completions(0, 2);
        assert_eq!(
            (got[0].wr_id, got[0].status),
            (1, wc_status::REM_ACCESS_ERR)
        );
        assert_eq!((got[1].wr_id, got[1].status), (2, wc_status::WR_FLUSH_ERR));
        assert!(
            p.qps
                .iter()
                .all(|q| q.state().expect("its state") == qp_state::ERR)
        );
        p.qps[0].reset().expect("RESET from any state");
        assert_eq!(p.qps[0].state().expect("its state"), qp_state::RESET);
    });
}

#[test]
fn a_device_that_is_pulled_says_so_and_refuses_everything() {
    let p = Pair::new(Config::default());
    assert_eq!(p.context.next_event(), None);
    p.mock.raise(event_type::QP_ACCESS_ERR, p.qps[1].qpn());
    assert_eq!(
        p.context.next_event(),
        Some(AsyncEvent::QpAccess(p.qps[1].qpn()))
    );
    p.mock.remove();
    assert_eq!(p.context.next_event(), Some(AsyncEvent::DeviceFatal));
    let one = [p.sge(0, 0, 8)];
    let op = Op::Write {
        addr: p.at(1, 0),
        rkey: p.mrs[1].rkey(),
        imm: None,
    };
    let refused = p.post(&[signalled(1, op, Data::Pieces(&one))]);
    assert_eq!(refused.expect_err("gone").errno, libc::EIO);
    assert!(
        p.qps[0]
            .fail()
            .expect_err("gone")
            .to_string()
            .contains("removed")
    );
}

#[test]
fn what_a_port_is_and_which_gid_is_chosen() {
    let mock = Mock::new(Config {
        active: false,
        ..Config::default()
    });
    let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
    let text = context.active_port(1).expect_err("down").to_string();
    assert!(
        text.contains("down") && text.contains("ip link set"),
        "{text}"
    );
    let text = context.port(2).expect_err("one port").to_string();
    assert!(text.contains("ports 1 to 1"), "{text}");
    let chosen = context.choose_gid(1, None, None).expect("a GID");
    assert_eq!(chosen.index, 2, "RoCE v2 with an IPv4 address");
    let ip = chosen.ip();
    assert_eq!(
        context.choose_gid(1, None, ip).expect("by address").index,
        2
    );
    assert_eq!(
        context
            .choose_gid(1, Some(1), None)
            .expect("by index")
            .index,
        1
    );
    let text = context
        .choose_gid(1, Some(9), None)
        .expect_err("three")
        .to_string();
    assert!(text.contains("index 9") && text.contains("gid=N"), "{text}");

    let mock = Mock::new(Config {
        infiniband: true,
        ..Config::default()
    });
    let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
    let port = context.active_port(1).expect("up");
    assert!(!port.is_ethernet() && port.lid != 0);
}

#[test]
fn memory_that_is_refused_says_what_to_do() {
    let mock = Mock::new(Config::default());
    let context = Context::open(&mock.verbs(), mock.name()).expect("opens");
    let pd = Pd::new(&context).expect("a domain");
    mock.refuse_memory(Some(libc::ENOMEM));
    // SAFETY: the memory is this program's own text.
    let error = unsafe { pd.register(Source::Host(0x1000), 4096, 0, ALL) }.expect_err("refused");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    mock.refuse_memory(Some(libc::EFAULT));
    // SAFETY: as above.
    let error = unsafe { pd.register(Source::Gpu(0x1000), 4096, 0, ALL) }.expect_err("refused");
    assert!(error.to_string().contains("nvidia-peermem"), "{error}");
    mock.refuse_memory(None);
    let bytes = [0u64; 4];
    let at = bytes.as_ptr().expose_provenance() as u64;
    // SAFETY: the memory lives longer than the region.
    let mr = unsafe { pd.register(Source::Host(at), 32, at + 1, access::REMOTE_WRITE) }
        .expect("registers");
    assert_eq!(
        mr.base(),
        at,
        "a base at another place of its page is not used"
    );
    assert_eq!(mock.counts().regions, 1);
    drop(mr);
    assert_eq!(mock.counts().regions, 0);
}
