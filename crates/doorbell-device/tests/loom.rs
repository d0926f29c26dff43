//! The posting and waiting source itself under a model checker, and the mutation table: each ordering weakened in turn must turn a
//! scene red (`docs/mutations.md`).
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p doorbell-device --test loom`. Loom knows memory orders, not scopes, and few
//! threads; what only a GPU can show is said in the table.
#![cfg(loom)]
#![allow(
    missing_docs,
    clippy::undocumented_unsafe_blocks,
    reason = "a model: every word is an atomic of loom's"
)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use doorbell_device::arch::{At, Group, Order};
use doorbell_device::layout::{
    CqKind, EXT_SOFT_ENGINE, GpuQp, MemType, NicHandler, QpExt, QpInit, RqInit,
};
use doorbell_device::scope::{Thread, sharing};
use doorbell_device::{
    Arch, Chunk, Deadline, Key, Local, Post, Qp, QpHandle, RecvQueue, Remote, Ticket, claim, leave,
    sites, take,
};
use doorbell_wire::cqe::{CqeTail, Kind};
use doorbell_wire::{Ctrl, Qpn, db};
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;

/// The memory of one model run: constants as they are, mutable words as loom's atomics.
struct World {
    qp: Box<GpuQp>,
    ext: Box<QpExt>,
    bare: bool,
    mutation: Option<u8>,
    words: HashMap<usize, AtomicU64>,
    halves: HashMap<usize, AtomicU32>,
    data: AtomicU64,
}

const RING: usize = 0x10_0000;
const CQ: usize = 0x20_0000;
const RECORD: usize = 0x30_0000;
const DB: usize = 0x40_0000;
const RQ: usize = 0x50_0000;
const RQ_RECORD: usize = 0x60_0000;
const RCQ: usize = 0x70_0000;
const STARTED: usize = 0x80_0000;
const CANCELLED: usize = 0x90_0000;
const LEFT: usize = 0xa0_0000;
const POST: usize = 0xb0_0000;
const JOB: usize = 0xc0_0000;
const DONE: usize = 0xd0_0000;
const QPN: u32 = 0x1234;

#[derive(Clone, Copy)]
struct Model(&'static World);

fn rmw(o: Order) -> Ordering {
    match o {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
        Order::SeqCst => Ordering::SeqCst,
    }
}

fn on_load(o: Order) -> Ordering {
    if matches!(o, Order::Acquire | Order::AcqRel) {
        Ordering::Acquire
    } else {
        Ordering::Relaxed
    }
}

fn on_store(o: Order) -> Ordering {
    if matches!(o, Order::Release | Order::AcqRel) {
        Ordering::Release
    } else {
        Ordering::Relaxed
    }
}

impl World {
    fn order(&self, at: At) -> Order {
        if self.mutation == Some(at.site) {
            Order::Relaxed
        } else {
            at.order
        }
    }

    fn word(&self, p: *const u64) -> &AtomicU64 {
        self.words
            .get(&p.addr())
            .unwrap_or_else(|| panic!("no word at {p:?}"))
    }

    fn half(&self, p: *const u32) -> &AtomicU32 {
        self.halves
            .get(&p.addr())
            .unwrap_or_else(|| panic!("no half word at {p:?}"))
    }
}

impl Arch for Model {
    const LANES: u32 = 1;
    fn thread(self) -> u32 {
        0
    }
    fn threads(self) -> u32 {
        1
    }
    fn block(self) -> u32 {
        0
    }
    fn blocks(self) -> u32 {
        1
    }
    /// As PTX has it: one access that orders nothing.
    unsafe fn load_unit(self, p: *const Chunk) -> Chunk {
        let p = p.cast::<u64>();
        Chunk([p, p.wrapping_add(1)].map(|p| self.0.word(p).load(Ordering::Relaxed)))
    }
    unsafe fn load8(self, p: *const u8) -> u8 {
        panic!("no scene moves bytes, this one from {p:?}")
    }
    unsafe fn store8(self, p: *mut u8, v: u8) {
        panic!("no scene moves bytes, this one {v} to {p:?}")
    }
    unsafe fn load32(self, p: *const u32, at: At) -> u32 {
        self.0.half(p).load(on_load(self.0.order(at)))
    }
    unsafe fn load64(self, p: *const u64, at: At) -> u64 {
        self.0.word(p).load(on_load(self.0.order(at)))
    }
    unsafe fn store32(self, p: *mut u32, v: u32, at: At) {
        self.0.half(p).store(v, on_store(self.0.order(at)));
    }
    unsafe fn store64(self, p: *mut u64, v: u64, at: At) {
        self.0.word(p).store(v, on_store(self.0.order(at)));
    }
    unsafe fn add64(self, p: *mut u64, v: u64, at: At) -> u64 {
        self.0.word(p).fetch_add(v, rmw(self.0.order(at)))
    }
    unsafe fn max64(self, p: *mut u64, v: u64, at: At) -> u64 {
        let order = self.0.order(at);
        let word = self.0.word(p);
        let mut seen = word.load(Ordering::Relaxed);
        while let Err(now) = word.compare_exchange(seen, seen.max(v), rmw(order), Ordering::Relaxed)
        {
            seen = now;
        }
        seen
    }
    unsafe fn or64(self, p: *mut u64, v: u64, at: At) -> u64 {
        self.0.word(p).fetch_or(v, rmw(self.0.order(at)))
    }
    unsafe fn exch64(self, p: *mut u64, v: u64, at: At) -> u64 {
        self.0.word(p).swap(v, rmw(self.0.order(at)))
    }
    unsafe fn cas64(self, p: *mut u64, expect: u64, new: u64, at: At) -> u64 {
        let order = self.0.order(at);
        match self
            .0
            .word(p)
            .compare_exchange(expect, new, rmw(order), on_load(order))
        {
            Ok(v) | Err(v) => v,
        }
    }
    unsafe fn cas32(self, p: *mut u32, expect: u32, new: u32, at: At) -> u32 {
        let order = self.0.order(at);
        match self
            .0
            .half(p)
            .compare_exchange(expect, new, rmw(order), on_load(order))
        {
            Ok(v) | Err(v) => v,
        }
    }
    fn fence(self, at: At) {
        match self.0.order(at) {
            Order::Relaxed => {}
            order => fence(rmw(order)),
        }
    }
    unsafe fn load_const32(self, p: *const u32) -> u32 {
        unsafe { p.read() }
    }
    unsafe fn load_const64(self, p: *const u64) -> u64 {
        unsafe { p.read() }
    }
    unsafe fn load_own64(self, p: *const u64) -> u64 {
        self.0.word(p).load(Ordering::Relaxed)
    }
    unsafe fn store_own64(self, p: *mut u64, v: u64) {
        self.0.word(p).store(v, Ordering::Relaxed);
    }
    /// Only the control segment of each slot is modelled, by its first word: the rest is written alike.
    unsafe fn store_chunk(self, p: *mut Chunk, c: Chunk) {
        if let Some(word) = self.0.words.get(&p.addr()) {
            word.store(c.0[0], Ordering::Relaxed);
        }
    }
    unsafe fn store_mmio64(self, p: *mut u64, v: u64) {
        self.0.word(p).store(v, Ordering::Relaxed);
    }
    /// Time stands still: no wait gives up.
    fn clock_ns(self) -> u64 {
        0
    }
    fn relax(self) {
        thread::yield_now();
    }
    fn warp(self) -> Group {
        Group::alone()
    }
    fn group(self, _: u64) -> Group {
        Group::alone()
    }
    fn broadcast64(self, _: Group, v: u64) -> u64 {
        v
    }
    fn shfl_xor64(self, _: Group, v: u64, _: u32) -> u64 {
        v
    }
    fn sync(self, _: Group) {}
    fn block_sync(self) {}
    fn block_broadcast64(self, v: u64) -> u64 {
        v
    }
}

/// What a scene needs.
#[derive(Clone, Copy)]
struct Setup {
    depth: u32,
    cq: CqKind,
    handler: NicHandler,
    bare: bool,
    soft: bool,
}

const SOFT: Setup = Setup {
    depth: 4,
    cq: CqKind::Collapsed,
    handler: NicHandler::DoorbellRecord,
    bare: false,
    soft: true,
};

impl World {
    fn new(setup: Setup, mutation: Option<u8>) -> Self {
        let init = QpInit {
            qpn: QPN,
            ring: RING as u64,
            depth: setup.depth,
            ring_mem: MemType::Host,
            cq: CQ as u64,
            cqn: 1,
            cq_mem: MemType::Host,
            cq_kind: setup.cq,
            dbrec: RECORD as u64,
            db: DB as u64,
            handler: setup.handler,
        };
        let qp = Box::new(GpuQp::new(&init));
        let mut ext = Box::new(QpExt::new());
        if setup.soft {
            ext.flags = EXT_SOFT_ENGINE;
        }
        ext.set_rq(&RqInit {
            ring: RQ as u64,
            depth: setup.depth,
            stride: 16,
            dbrec: RQ_RECORD as u64,
            cq: RCQ as u64,
            cqn: 2,
            cq_mem: MemType::Host,
        });
        let at = (&raw const *qp).addr();
        let mut words = HashMap::new();
        for offset in [0, 8, 16, 160 + 24] {
            words.insert(at + offset, AtomicU64::new(0));
        }
        words.insert((&raw const ext.error).addr(), AtomicU64::new(0));
        for word in [
            &raw const ext.rq_pi,
            &raw const ext.rq_ready,
            &raw const ext.rq_ci,
        ] {
            words.insert(word.addr(), AtomicU64::new(0));
        }
        for slot in 0..setup.depth as usize {
            words.insert(RQ + slot * 16, AtomicU64::new(0));
        }
        words.insert(DB, AtomicU64::new(db::doorbell_word(0, Qpn::truncate(QPN))));
        for slot in 0..setup.depth as usize {
            words.insert(RING + slot * 64, AtomicU64::new(0));
        }
        for at in [STARTED, CANCELLED, LEFT, POST, POST + 8, JOB, DONE] {
            words.insert(at, AtomicU64::new(0));
        }
        let mut halves = HashMap::new();
        halves.insert(at + 56, AtomicU32::new(0));
        halves.insert(RECORD, AtomicU32::new(0));
        halves.insert(RQ_RECORD, AtomicU32::new(0));
        halves.insert(CQ + 60, AtomicU32::new(CqeTail::initial(1).0));
        Self {
            qp,
            ext,
            bare: setup.bare,
            mutation,
            words,
            halves,
            data: AtomicU64::new(0),
        }
    }

    fn handle(&self) -> QpHandle {
        QpHandle {
            qp: (&raw const *self.qp).cast_mut(),
            ext: if self.bare {
                std::ptr::null_mut()
            } else {
                (&raw const *self.ext).cast_mut()
            },
        }
    }

    fn rung(&self, order: Ordering) -> u64 {
        u64::from(db::parse(self.words[&DB].load(order)).0)
    }

    /// What an engine does on seeing `pi`: the control segments of all slots from `seen` to there must be in place.
    fn inspect(&self, seen: u64, pi: u64) {
        let depth = self.qp.sq_wqe_num as u64;
        for index in seen..pi {
            let first = self.words[&(RING + (index % depth) as usize * 64)].load(Ordering::Relaxed);
            let ctrl = Ctrl::parse(Chunk([first, 0]));
            assert!(
                ctrl.idx == index as u16 && ctrl.qpn == QPN,
                "rung to {pi}, slot {index} holds {ctrl:?}"
            );
        }
    }
}

type Queue = Qp<'static, Model, Thread, sharing::Gpu>;

fn queue(w: &'static World) -> Queue {
    unsafe { Qp::new(Model(w), w.handle()) }.expect("a QP of this version")
}

fn how() -> Post {
    Post::by(Deadline(u64::MAX))
}

fn put(q: &Queue, how: Post) -> Ticket {
    q.put_value(
        Remote {
            addr: 0,
            key: Key(1),
        },
        7,
        8,
        how,
    )
    .expect("room and no error")
}

/// Runs `scene` in all interleavings with at most three preemptions.
fn model(
    setup: Setup,
    mutation: Option<u8>,
    scene: impl Fn(&'static World) + Sync + Send + 'static,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = Box::into_raw(Box::new(World::new(setup, mutation)));
        // Scenes join their threads, so nothing uses the world after them.
        scene(unsafe { &*world });
        drop(unsafe { Box::from_raw(world) });
    });
}

/// An engine that looks once at the doorbell.
fn observer(w: &'static World) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let pi = w.rung(Ordering::Acquire);
        w.inspect(0, pi);
    })
}

fn two_ring(m: Option<u8>) {
    model(SOFT, m, |w| {
        let t = thread::spawn(move || put(&queue(w), how()));
        let o = observer(w);
        put(&queue(w), how());
        t.join().expect("poster");
        o.join().expect("observer");
        assert_eq!(w.rung(Ordering::Relaxed), 2, "a ring was lost");
        w.inspect(0, 2);
    });
}

fn one_leaves_the_ringing_to_the_other(m: Option<u8>) {
    model(SOFT, m, |w| {
        let t = thread::spawn(move || put(&queue(w), how().without_ringing()));
        let o = observer(w);
        let mine = put(&queue(w), how());
        t.join().expect("poster");
        o.join().expect("observer");
        assert!(w.rung(Ordering::Relaxed) > mine.0);
    });
}

fn one_rings_for_the_other(m: Option<u8>) {
    model(SOFT, m, |w| {
        let t = thread::spawn(move || put(&queue(w), how().without_ringing()));
        let o = observer(w);
        queue(w)
            .ring(Deadline(u64::MAX))
            .expect("no lock to wait for");
        t.join().expect("poster");
        o.join().expect("observer");
    });
}

fn a_nic_with_records(m: Option<u8>) {
    model(
        Setup {
            soft: false,
            ..SOFT
        },
        m,
        |w| {
            let o = thread::spawn(move || {
                let pi = w.rung(Ordering::Acquire);
                let record = db::parse_record(w.halves[&RECORD].load(Ordering::Relaxed));
                assert!(
                    u64::from(record) >= pi,
                    "record {record} behind doorbell {pi}"
                );
            });
            let r = thread::spawn(move || {
                // A NIC may act on the record alone.
                let record = db::parse_record(w.halves[&RECORD].load(Ordering::Acquire));
                w.inspect(0, u64::from(record));
            });
            put(&queue(w), how());
            o.join().expect("observer");
            r.join().expect("record reader");
        },
    );
}

fn two_ring_a_bare_queue(m: Option<u8>) {
    model(
        Setup {
            bare: true,
            soft: false,
            ..SOFT
        },
        m,
        |w| {
            let t = thread::spawn(move || put(&queue(w), how()));
            put(&queue(w), how());
            t.join().expect("poster");
            assert_eq!(
                w.rung(Ordering::Relaxed),
                2,
                "the newest ring is not the last"
            );
        },
    );
}

fn two_wait_for_one(m: Option<u8>) {
    model(SOFT, m, |w| {
        let engine = thread::spawn(move || {
            w.data.store(9, Ordering::Relaxed);
            w.halves[&(CQ + 60)].store(CqeTail::new(0, Kind::Requester, 0).0, Ordering::Release);
        });
        let wait = move || {
            if queue(w).poll(Ticket(0)).expect("no error") {
                assert_eq!(
                    w.data.load(Ordering::Relaxed),
                    9,
                    "complete, and its data not visible"
                );
            }
        };
        let t = thread::spawn(wait);
        wait();
        engine.join().expect("engine");
        t.join().expect("waiter");
    });
}

fn a_small_ring_turns(m: Option<u8>) {
    let setup = Setup { depth: 2, ..SOFT };
    model(setup, m, |w| {
        let engine = thread::spawn(move || {
            let mut seen = 0;
            while seen < 3 {
                let pi = w.rung(Ordering::Acquire);
                assert!(pi - seen <= 2, "more in the ring than it holds");
                if pi == seen {
                    thread::yield_now();
                    continue;
                }
                w.inspect(seen, pi);
                seen = pi;
                let tail = CqeTail::new(seen as u16 - 1, Kind::Requester, 0);
                w.halves[&(CQ + 60)].store(tail.0, Ordering::Release);
            }
        });
        let q = queue(w);
        for _ in 0..3 {
            put(&q, how());
        }
        engine.join().expect("engine");
    });
}

/// Two post a receive each; an engine looks once at the record, and what it says is there.
fn two_post_receives(m: Option<u8>) {
    model(SOFT, m, |w| {
        let post = move || {
            let recv: RecvQueue<'_, Model, Thread, sharing::Gpu> =
                unsafe { RecvQueue::new(Model(w), w.handle()) }.expect("a receive queue");
            let local = Local {
                addr: 0x1000,
                key: Key(1),
                len: 8,
            };
            recv.recv_post(local, Deadline(u64::MAX)).expect("room");
        };
        let inspect = move |order| {
            let posted = db::parse_record(w.halves[&RQ_RECORD].load(order));
            for slot in 0..usize::from(posted) {
                let first = w.words[&(RQ + slot * 16)].load(Ordering::Relaxed);
                assert_ne!(first, 0, "{posted} posted, slot {slot} is not written");
            }
            posted
        };
        let t = thread::spawn(post);
        let o = thread::spawn(move || {
            inspect(Ordering::Acquire);
        });
        post();
        t.join().expect("poster");
        o.join().expect("observer");
        assert_eq!(
            inspect(Ordering::Relaxed),
            2,
            "the newest record is not the last"
        );
    });
}

/// A launch that may be taken back: kernel and host each do the work, or not, and never both.
fn a_launch_is_taken_back(m: Option<u8>) {
    model(SOFT, m, |w| {
        let kernel = thread::spawn(move || {
            let (started, cancelled) = (STARTED as *mut u64, CANCELLED as *const u64);
            if unsafe { claim(Model(w), started, cancelled) } {
                w.data.fetch_add(1, Ordering::Relaxed);
            }
        });
        w.words[&CANCELLED].store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let takes_over = w.words[&STARTED].load(Ordering::Relaxed) == 0;
        kernel.join().expect("kernel");
        let by_kernel = w.data.load(Ordering::Relaxed);
        assert!(
            by_kernel + u64::from(takes_over) <= 1,
            "the work is done twice"
        );
    });
}

/// A kernel looks for a job, and leaves, as the host posts one: whoever does it, it is done once and as it was written.
fn a_job_is_posted_as_the_kernel_leaves(m: Option<u8>) {
    const JOB_IS: u64 = 22;
    model(SOFT, m, |w| {
        let kernel = thread::spawn(move || unsafe {
            let a = Model(w);
            if take(a, POST as *const Chunk, |last| last != 0).is_some() {
                let job = a.load64(JOB as *const u64, sites::DATA);
                w.data.fetch_add(job, Ordering::Relaxed);
                a.store64(DONE as *mut u64, 1, sites::REPORT_STORE);
            }
            leave(a, LEFT as *mut u64, 1);
        });
        w.words[&JOB].store(JOB_IS, Ordering::Relaxed);
        w.words[&(POST + 8)].store(1, Ordering::Release);
        let look = || {
            let has_left = w.words[&LEFT].load(Ordering::Acquire) != 0;
            if has_left && w.words[&DONE].load(Ordering::Relaxed) == 0 {
                w.data.fetch_add(JOB_IS, Ordering::Relaxed);
            }
            has_left
        };
        let has_left = look();
        kernel.join().expect("kernel");
        assert!(has_left || look(), "it does not leave");
        let did = w.data.load(Ordering::Relaxed);
        assert_eq!(
            did, JOB_IS,
            "the job was forgotten, done twice, or read early"
        );
    });
}

type Scene = (&'static str, fn(Option<u8>));

const SCENES: [Scene; 10] = [
    ("two_ring", two_ring),
    (
        "one_leaves_the_ringing_to_the_other",
        one_leaves_the_ringing_to_the_other,
    ),
    ("one_rings_for_the_other", one_rings_for_the_other),
    ("a_nic_with_records", a_nic_with_records),
    ("two_ring_a_bare_queue", two_ring_a_bare_queue),
    ("two_wait_for_one", two_wait_for_one),
    ("a_small_ring_turns", a_small_ring_turns),
    ("two_post_receives", two_post_receives),
    ("a_launch_is_taken_back", a_launch_is_taken_back),
    (
        "a_job_is_posted_as_the_kernel_leaves",
        a_job_is_posted_as_the_kernel_leaves,
    ),
];

#[test]
fn loom_scenes_hold() {
    for (name, scene) in SCENES {
        println!("{name}");
        scene(None);
    }
}

/// Where an ordering that is not relaxed is weakened, a scene turns red, or the table says who else would notice.
#[test]
fn loom_every_mutation_is_caught() {
    let table = include_str!("../../../docs/mutations.md");
    std::panic::set_hook(Box::new(|_| {}));
    let mut wrong = Vec::new();
    for (name, at) in sites::ALL {
        if at.order == Order::Relaxed {
            continue;
        }
        let red = SCENES
            .iter()
            .find(|(_, scene)| catch_unwind(AssertUnwindSafe(|| scene(Some(at.site)))).is_err())
            .map(|(name, _)| *name);
        let row = table
            .lines()
            .find(|l| l.starts_with(&format!("| `{name}` |")))
            .unwrap_or_else(|| panic!("{name} is not in docs/mutations.md"));
        let said = row.split('|').nth(3).unwrap_or("").trim();
        let ok = match red {
            Some(scene) => said == format!("`{scene}`"),
            None => said.starts_with("not loom"),
        };
        if !ok {
            wrong.push(format!("{name}: found {red:?}, the table says {said:?}"));
        }
    }
    let _ = std::panic::take_hook();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
