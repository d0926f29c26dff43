//! What a WQE costs the engine over the verbs link: instructions, counted by callgrind, with a device that only notes what it is given.
//!
//! WQEs are built beforehand and the engine is caller-driven, so that nothing but the engine and that stub is counted: reading and checking the WQE,
//! finding keys, the call or the list entry, the completion, the CQE. What the stub itself takes (some ten instructions) is in the figures. Usage:
//! `cargo run --release -p doorbell-hca --example verbs_cost` (needs valgrind; `--once calls|list OPERATION COUNT` runs one without counting).

mod common;

use core::ffi::{c_int, c_void};
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::Block;
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::record::Recording;
use doorbell_hca::verbs::library::Verbs;
use doorbell_hca::verbs::library::abi::{
    RawContext, RawCq, RawDevice, RawQp, RawQpEx, SendWr, Sge, Wc, send_flags,
};
use doorbell_hca::verbs::{VerbsConfig, VerbsTarget};
use doorbell_hca::{
    Access, Addressing, CqConfig, Destination, DoorbellWord, Hca, HcaConfig, Memory, MrConfig,
    OnError, QpConfig,
};
use doorbell_verbs_mock::{Config, Mock};
use doorbell_wire::{Fence, Key, Local, Remote, Wqe};

/// The usual WQEs.
const OPERATIONS: [&str; 8] = [
    "inline8", "write64", "fenced64", "imm64", "read64", "send64", "add", "swap",
];
/// One that has to be taken apart, since it takes two slots: for comparison.
const LONG: &str = "inline60";
/// At most so many instructions a WQE are wanted.
const WANTED: f64 = 400.0;
const LOG_DEPTH: u8 = 10;
const PATIENCE: Duration = Duration::from_secs(10);
/// Rounds in which the engine must be through with a ring.
const ROUNDS: u64 = 1 << 20;

/// Signalled requests that were not polled yet, in a ring: where the next goes, where the oldest is. One thread uses them.
static DONE: [AtomicU64; RING] = [const { AtomicU64::new(0) }; RING];
static ENDS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
/// More than a device's queue holds.
const RING: usize = 1024;

#[inline(always)]
fn note(id: u64, flags: u32) {
    if flags & send_flags::SIGNALED != 0 {
        let end = ENDS[0].load(Ordering::Relaxed);
        DONE[end % RING].store(id, Ordering::Relaxed);
        ENDS[0].store(end + 1, Ordering::Relaxed);
    }
}

unsafe extern "C" fn post_send(_: *mut RawQp, first: *mut SendWr, _: *mut *mut SendWr) -> c_int {
    let mut next = first;
    while !next.is_null() {
        // SAFETY: a list of the caller's.
        unsafe {
            note((*next).wr_id, (*next).send_flags);
            next = (*next).next;
        }
    }
    0
}

unsafe extern "C" fn poll_cq(_: *mut RawCq, room: c_int, out: *mut Wc) -> c_int {
    let (end, from) = (
        ENDS[0].load(Ordering::Relaxed),
        ENDS[1].load(Ordering::Relaxed),
    );
    let n = (end - from).min(room as usize);
    for i in 0..n {
        // SAFETY: there is room. As devices do, only what a completion has is written.
        unsafe {
            let wc = out.add(i);
            (*wc).wr_id = DONE[(from + i) % RING].load(Ordering::Relaxed);
            (*wc).status = 0;
        }
    }
    ENDS[1].store(from + n, Ordering::Relaxed);
    n as c_int
}

unsafe extern "C" fn begin(qp: *mut RawQpEx, _: u32, _: u64) {
    // SAFETY: the caller's queue pair.
    unsafe { note((*qp).wr_id, (*qp).wr_flags) };
}

unsafe extern "C" fn begin_add(qp: *mut RawQpEx, _: u32, _: u64, _: u64) {
    // SAFETY: the caller's queue pair.
    unsafe { note((*qp).wr_id, (*qp).wr_flags) };
}

unsafe extern "C" fn begin_imm(qp: *mut RawQpEx, _: u32, _: u64, _: u32) {
    // SAFETY: the caller's queue pair.
    unsafe { note((*qp).wr_id, (*qp).wr_flags) };
}

unsafe extern "C" fn begin_send(qp: *mut RawQpEx) {
    // SAFETY: the caller's queue pair.
    unsafe { note((*qp).wr_id, (*qp).wr_flags) };
}

unsafe extern "C" fn begin_swap(qp: *mut RawQpEx, _: u32, _: u64, _: u64, _: u64) {
    // SAFETY: the caller's queue pair.
    unsafe { note((*qp).wr_id, (*qp).wr_flags) };
}

unsafe extern "C" fn set_inline(_: *mut RawQpEx, _: *mut c_void, _: usize) {}
unsafe extern "C" fn set_sge(_: *mut RawQpEx, _: u32, _: u64, _: u32) {}
unsafe extern "C" fn set_sge_list(_: *mut RawQpEx, _: usize, _: *const Sge) {}
unsafe extern "C" fn start(_: *mut RawQpEx) {}
unsafe extern "C" fn complete(_: *mut RawQpEx) -> c_int {
    0
}

static OPEN: Mutex<Option<unsafe extern "C" fn(*mut RawDevice) -> *mut RawContext>> =
    Mutex::new(None);

/// The mock's device, whose data path is this file's.
unsafe extern "C" fn open(device: *mut RawDevice) -> *mut RawContext {
    let real = (*OPEN.lock().unwrap_or_else(PoisonError::into_inner)).expect("set before");
    // SAFETY: passed on; the context is ours until it is returned.
    unsafe {
        let context = real(device);
        (*context).ops.post_send = Some(post_send);
        (*context).ops.poll_cq = Some(poll_cq);
        context
    }
}

unsafe extern "C" fn extended(qp: *mut RawQp) -> *mut RawQpEx {
    let ex: *mut RawQpEx = qp.cast();
    // SAFETY: the mock makes every queue pair as an extended one.
    unsafe {
        (*ex).write = Some(begin);
        (*ex).read = Some(begin);
        (*ex).write_imm = Some(begin_imm);
        (*ex).send = Some(begin_send);
        (*ex).fetch_add = Some(begin_add);
        (*ex).compare_swap = Some(begin_swap);
        (*ex).set_inline = Some(set_inline);
        (*ex).set_sge = Some(set_sge);
        (*ex).set_sge_list = Some(set_sge_list);
        (*ex).start = Some(start);
        (*ex).complete = Some(complete);
    }
    ex
}

/// What callgrind counts.
#[inline(never)]
fn measured(driver: &doorbell_hca::Driver, qp: &doorbell_hca::HcaQp, until: u64) {
    let mut rounds = 0u64;
    while qp.indexes().1 < until {
        driver.poll();
        rounds += 1;
        assert!(rounds < ROUNDS, "the engine stands at {:?}", qp.indexes());
    }
}

fn once(calls: bool, operation: &str, count: u64) -> f64 {
    let mock = Mock::new(Config {
        calls,
        ..Config::default()
    });
    let mut api = *mock.verbs().api();
    *OPEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(api.open_device);
    api.open_device = open;
    api.qp_to_qp_ex = Some(extended);
    // SAFETY: the mock's functions, and those above, which do what the engine may rely on: complete what is signalled.
    let verbs = unsafe { Verbs::with_api("stub", api) };
    // Valgrind has no vDSO, whose clock the recorder asks for.
    let config = HcaConfig {
        record: Recording::Off,
        ..HcaConfig::caller_driven()
    };
    let hca = Hca::new(config).expect("an HCA");
    hca.add_host_doorbells(8).expect("doorbells");
    let (pd, driver) = (hca.alloc_pd(), hca.driver());
    let port = hca
        .open_verbs(&verbs, &VerbsConfig::new(mock.name()))
        .expect("opens");
    let memory = Block::new(4096);
    let config = MrConfig {
        memory: Memory::Host {
            ptr: memory.ptr(),
            len: 4096,
            keep: Arc::new(memory.clone()),
        },
        access: Access::ALL,
        addressing: Addressing::Zero,
        pd,
    };
    // SAFETY: `keep` owns the memory, which is all atomics.
    let mr = unsafe { hca.register(config) }.expect("registers");
    let (ring, cq) = (Block::new(64 << LOG_DEPTH), Block::new(64));
    let slot = hca.reserve_doorbell(None, None).expect("a doorbell");
    let bell = slot.word();
    let config = QpConfig {
        pd,
        sq: ring.ptr(),
        log_depth: LOG_DEPTH,
        cq: CqConfig {
            ring: cq.ptr(),
            log_entries: LOG_DEPTH,
            kind: CqKind::Collapsed,
            cqn: hca.alloc_cqn().expect("a number"),
        },
        handler: NicHandler::ProducerWord,
        doorbell: DoorbellWord::Slot(slot),
        record: None,
        poll_record: false,
        wait_note: None,
        error_word: None,
        rq: None,
        core: None,
        on_error: OnError::Flush,
        signals: Vec::new(),
        keep: Arc::new((ring.clone(), cq.clone())),
    };
    // SAFETY: `keep` owns all of it, sized as `config` says, and all of it is atomics.
    let qp = unsafe { hca.create_qp(config) }.expect("a queue pair");
    let end = qp.prepare(&port, PATIENCE).expect("the device's");
    let target = VerbsTarget {
        peer: end,
        sq_psn: 0,
        rq_psn: 0,
        timeout: 14,
        retry: 6,
        rnr_retry: 7,
        min_rnr_timer: 12,
    };
    qp.connect(Destination::Verbs(Box::new(target)), PATIENCE)
        .expect("connects");
    let (remote, local) = (
        Remote {
            addr: 0,
            key: Key(1),
        },
        Local {
            addr: 0,
            key: mr.key(),
            len: 64,
        },
    );
    let wqe = match operation {
        "write64" => Wqe::write(remote, local),
        "imm64" => Wqe::write_imm(remote, local, 7),
        "send64" => Wqe::send(local),
        "fenced64" => Wqe::write(remote, local).map(|w| w.fence(Fence::Full)),
        LONG => Wqe::write_inline(remote, &[7; 60]),
        "inline8" => Wqe::write_inline(remote, &[7; 8]),
        "read64" => Wqe::read(remote, local),
        "add" => Wqe::fetch_add(remote, Local { len: 8, ..local }, 1),
        "swap" => Wqe::compare_swap(remote, Local { len: 8, ..local }, 1, 2),
        other => panic!("no operation {other}: {OPERATIONS:?} or {LONG}"),
    }
    .expect("a valid request");
    let (mut pi, depth) = (0u64, 1u64 << LOG_DEPTH);
    let mut took = Duration::ZERO;
    while pi < count {
        let slots = u64::from(wqe.slots());
        for i in (0..depth).step_by(slots as usize) {
            let at = pi + i;
            let signalled = i / slots % 32 == 31;
            let chunks = wqe.signalled(signalled).emit(at as u16, qp.qpn());
            for (j, chunk) in chunks[..usize::from(wqe.ds())].iter().enumerate() {
                let word = (at % depth) as usize * 8 + 2 * j;
                ring.word(word).store(chunk.0[0], Ordering::Relaxed);
                ring.word(word + 1).store(chunk.0[1], Ordering::Relaxed);
            }
        }
        pi += depth;
        // SAFETY: the word lives as long as the HCA.
        unsafe { bell.store_release(pi) };
        let started = Instant::now();
        measured(&driver, &qp, pi);
        took += started.elapsed();
    }
    took.as_nanos() as f64 / pi as f64
}

/// Instructions of so many WQEs, by callgrind.
fn counted(way: &str, operation: &str, count: u64) -> u64 {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--toggle-collect=*measured*",
            "--callgrind-out-file=/dev/null",
        ])
        .arg(program)
        .args(["--once", way, operation, &count.to_string()])
        .output()
        .expect("valgrind: install it");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let collected = said.lines().find_map(|l| l.split("Collected :").nth(1));
    collected
        .and_then(|n| n.trim().parse().ok())
        .unwrap_or_else(|| panic!("callgrind counted nothing:\n{said}"))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [once_word, way, operation, count] = args.as_slice()
        && once_word == "--once"
    {
        let ns = once(way == "calls", operation, count.parse().expect("a count"));
        println!("{way} {operation}: {ns:.1} ns a WQE");
        return;
    }
    println!(
        "instructions of the engine a WQE over verbs (wanted: at most {WANTED}); ns are of this machine, without counting"
    );
    println!(
        "{:10} {:8} {:>12} {:>8}",
        "operation", "posting", "instructions", "ns"
    );
    let mut worst = 0.0f64;
    for operation in OPERATIONS.into_iter().chain([LONG]) {
        let slots = if operation == LONG { 2 } else { 1 };
        for way in ["calls", "list"] {
            // What setting up costs goes by taking the difference.
            let (few, many) = (16 << LOG_DEPTH, 48 << LOG_DEPTH);
            let (a, b) = (counted(way, operation, few), counted(way, operation, many));
            let each = (b - a) as f64 / ((many - few) / slots) as f64;
            if operation != LONG {
                worst = worst.max(each);
            }
            let ns = once(way == "calls", operation, 1 << 20) * slots as f64;
            let note = if operation == LONG {
                " (taken apart)"
            } else {
                ""
            };
            println!("{operation:10} {way:8} {each:12.1} {ns:8.1}{note}");
        }
    }
    println!("worst of the usual: {worst:.1} of {WANTED}");
    if worst > WANTED {
        std::process::exit(1);
    }
}
