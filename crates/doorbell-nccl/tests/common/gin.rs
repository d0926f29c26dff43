//! NCCL's device side, played by host code: it reads what a kernel would read and writes the queues as NVIDIA's headers do.
//!
//! Nothing here comes from Doorbell's crates. Offsets, opcodes and the order of stores are written down from NCCL 2.30.7 once more, so that a
//! mistake in a layout shows as a failed test and not as two sides that agree with each other.

use std::cell::Cell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, fence};
use std::time::{Duration, Instant};

/// Where the two forms of a queue pair differ.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// Bytes of one in the array that a context points to.
    stride: u64,
    lock: u64,
    num: u64,
    mask: u64,
    handler: u64,
    /// 2.30 and later: gets are tracked, and made visible by a flush.
    gets: bool,
}

const NEW: Form = Form {
    stride: 296,
    lock: 56,
    num: 60,
    mask: 62,
    handler: 288,
    gets: true,
};
/// Up to 2.29.7.
const OLD: Form = Form {
    stride: 280,
    lock: 52,
    num: 56,
    mask: 58,
    handler: 272,
    gets: false,
};
/// A work request of more is split.
const CHUNK: u64 = 1 << 30;
/// `fm_ce_se`: write a CQE.
const CQ_UPDATE: u8 = 8;
/// What the bytes hold that device code leaves uninitialised.
const GARBAGE: u32 = 0xdead_beef;

/// `ncclGinOptFlagsMaySkipCreditCheck`.
pub const SKIP_CREDIT: u32 = 1;
/// `ncclGinOptFlagsAggregateRequests`.
pub const AGGREGATE: u32 = 2;

/// `ncclGinResourceSharingMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    Gpu,
    Cta,
    Thread,
}

/// How a wait ended that did not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// An error CQE with this syndrome and vendor syndrome.
    Cqe(u8, u8),
    /// Nothing came.
    TimedOut,
}

thread_local! {
    /// The state of this thread's [`pauses`]; 0: none.
    static PAUSES: Cell<u64> = const { Cell::new(0) };
}

/// From now on this thread stands still now and then between two steps of a post.
pub fn pauses(seed: u64) {
    PAUSES.set(seed | 1);
}

/// Between two steps of a post.
fn pause() {
    let mut x = PAUSES.get();
    if x == 0 {
        return;
    }
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    PAUSES.set(x);
    match x % 1024 {
        0 => std::thread::sleep(Duration::from_micros(200)),
        1..32 => std::thread::yield_now(),
        _ => {}
    }
}

/// Lets others go on. Threads that stand still now and then are many, and engines must not wait for all of them.
fn rest() {
    match PAUSES.get() {
        0 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(20)),
    }
}

fn u8_at(addr: u64) -> &'static AtomicU8 {
    // SAFETY: addresses come from the plug-in's structures, which live as long as the test's context.
    unsafe { AtomicU8::from_ptr(addr as *mut u8) }
}

fn u32_at(addr: u64) -> &'static AtomicU32 {
    assert!(addr != 0 && addr.is_multiple_of(4), "{addr:#x}");
    // SAFETY: as above.
    unsafe { AtomicU32::from_ptr(addr as *mut u32) }
}

fn u64_at(addr: u64) -> &'static AtomicU64 {
    assert!(addr != 0 && addr.is_multiple_of(8), "{addr:#x}");
    // SAFETY: as above.
    unsafe { AtomicU64::from_ptr(addr as *mut u64) }
}

fn u16_of(addr: u64) -> u16 {
    // SAFETY: as above.
    unsafe { (addr as *const u16).read_volatile() }
}

/// A window as device code has it: the address that `regMrSym` gave.
#[derive(Clone, Copy, Debug)]
pub struct Win(pub u64);

impl Win {
    fn rkey(self, peer: usize) -> u32 {
        u32_at(u64_at(self.0).load(Relaxed) + 4 * peer as u64).load(Relaxed)
    }

    fn lkey(self) -> u32 {
        u32_at(self.0 + 8).load(Relaxed)
    }
}

/// Which word a signal goes to.
#[derive(Clone, Copy, Debug)]
pub enum Signal {
    /// Of the context's table.
    Indexed(u32),
    /// Of a window.
    Va(Win, u64),
}

/// What may come with a put.
#[derive(Clone, Copy, Debug, Default)]
pub struct With {
    /// Which word grows by how much behind it.
    pub signal: Option<(Signal, u64)>,
    /// Which own counter grows by one when it is complete.
    pub counter: Option<u32>,
    /// `ncclGinOptFlags`.
    pub opts: u32,
}

impl With {
    pub fn signal(signal: Signal, add: u64) -> Self {
        Self {
            signal: Some((signal, add)),
            ..Self::default()
        }
    }
}

/// A queue pair of NVIDIA's headers.
#[derive(Clone, Copy, Debug)]
pub struct Qp {
    at: u64,
    sharing: Sharing,
    form: Form,
}

impl Qp {
    fn word(self, offset: u64) -> &'static AtomicU64 {
        u64_at(self.at + offset)
    }

    pub fn number(self) -> u32 {
        u32_at(self.at + 24).load(Relaxed)
    }

    pub fn depth(self) -> u64 {
        u64::from(u16_of(self.at + self.form.num))
    }

    pub fn handler(self) -> i32 {
        u32_at(self.at + self.form.handler).load(Relaxed) as i32
    }

    fn cqn(self) -> u32 {
        u32_at(self.at + 160 + 8).load(Relaxed)
    }

    fn reserve(self, count: u64, opts: u32) -> u64 {
        let rsvd = self.word(0);
        let first = match self.sharing {
            Sharing::Thread => {
                let first = rsvd.load(Relaxed);
                rsvd.store(first + count, Relaxed);
                first
            }
            _ => rsvd.fetch_add(count, Relaxed),
        };
        pause();
        let last = first + count - 1;
        if opts & SKIP_CREDIT == 0 && last >= self.depth() {
            // An error CQE ends this wait too; the headers go on in silence.
            match self.poll(last - self.depth(), Duration::from_secs(20)) {
                Ok(()) | Err(Failed::Cqe(..)) => {}
                Err(Failed::TimedOut) => panic!("no slot in {:#x}", self.number()),
            }
        }
        first
    }

    /// Writes one WQE: control segment, then the rest; what the headers leave uninitialised is garbage here.
    fn write(self, index: u64, opcode: u32, segments: &[[u32; 4]]) {
        let slot = u64_at(self.at + 64).load(Relaxed)
            + 64 * (index & u64::from(u16_of(self.at + self.form.mask)));
        let ds = 1 + segments.len() as u32;
        let qpn_ds = match ds {
            // The headers keep these words ready-made.
            1 => u32_at(self.at + 36).load(Relaxed),
            3 => u32_at(self.at + 44).load(Relaxed),
            4 => u32_at(self.at + 48).load(Relaxed),
            _ => (u32_at(self.at + 28).load(Relaxed) | ds).to_be(),
        };
        let ctrl = [
            (((index as u32) & 0xffff) << 8 | opcode).to_be(),
            qpn_ds,
            (GARBAGE & 0xffff_ff00 | u32::from(CQ_UPDATE)).to_be(),
            GARBAGE,
        ];
        for (i, segment) in std::iter::once(&ctrl).chain(segments).enumerate() {
            for (j, word) in segment.iter().enumerate() {
                u32_at(slot + 16 * i as u64 + 4 * j as u64).store(*word, Relaxed);
            }
        }
    }

    fn ready(self, first: u64, last: u64) {
        pause();
        let ready = self.word(8);
        if self.sharing == Sharing::Thread {
            ready.store(last + 1, Relaxed);
            return;
        }
        fence(Release);
        while ready
            .compare_exchange(first, last + 1, AcqRel, Relaxed)
            .is_err()
        {
            rest();
        }
        fence(Acquire);
    }

    /// Tells the executor of everything below `pi`.
    fn submit(self, pi: u64, opts: u32) {
        pause();
        let db = u64_at(u64_at(self.at + 80).load(Relaxed));
        let bell = || {
            let word = u64::from((pi as u32) << 8) << 32;
            let high = u64::from(u32::from_be(u32_at(self.at + 32).load(Relaxed)));
            // Two big-endian halves, stored as one word.
            (word | high).to_be()
        };
        match self.handler() {
            2 | 10 if opts & AGGREGATE != 0 => {}
            2 => {
                // SAFETY: the lock word of this queue pair.
                let lock = unsafe { AtomicI32::from_ptr((self.at + self.form.lock) as *mut i32) };
                while lock.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
                    rest();
                }
                if self.word(16).fetch_max(pi, Relaxed) < pi {
                    fence(Release);
                    db.store(bell(), Relaxed);
                    u32_at(u64_at(self.at + 72).load(Relaxed))
                        .store(((pi as u32) & 0xffff).to_be(), Relaxed);
                    fence(Release);
                    db.store(bell(), Relaxed);
                }
                lock.store(0, Release);
            }
            10 => {
                if self.word(16).fetch_max(pi, Relaxed) < pi {
                    fence(Release);
                    db.store(bell(), Relaxed);
                }
            }
            // The producer word rings with the aggregate flag too.
            _ => {
                fence(Release);
                match self.sharing {
                    Sharing::Thread => db.store(pi, Relaxed),
                    _ => {
                        db.fetch_max(pi, Relaxed);
                    }
                }
            }
        }
    }

    /// Waits until request `index` is complete.
    pub fn poll(self, index: u64, time: Duration) -> Result<(), Failed> {
        let cq = self.at + 160;
        let entries = u64::from(u32_at(cq + 12).load(Relaxed));
        assert_eq!(u64_at(cq + 40).load(Relaxed), 0, "no CQEs are reserved");
        let cqe = u64_at(cq).load(Relaxed) + 64 * (index & (entries - 1));
        let deadline = Instant::now() + time;
        loop {
            let ci = u64_at(cq + 24).load(Relaxed);
            if index < ci {
                fence(SeqCst);
                return Ok(());
            }
            // Older GPUs look at the counter as well; the last word of a CQE is stored whole.
            let word = u32::from_be(u32_at(cqe + 60).load(Acquire));
            let (counter, op_own) = (word >> 16, word & 0xff);
            let owner = u32::from(index & entries != 0);
            if index < ci + entries && op_own & 1 == owner && counter == (index as u32) & 0xffff {
                if op_own >> 4 == 13 {
                    let (vendor, syndrome) = (u8_at(cqe + 54), u8_at(cqe + 55));
                    return Err(Failed::Cqe(syndrome.load(Relaxed), vendor.load(Relaxed)));
                }
                assert_eq!(op_own >> 4, 0, "opcode of a CQE");
                fence(SeqCst);
                u64_at(cq + 24).fetch_max(index + 1, Relaxed);
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Failed::TimedOut);
            }
            rest();
        }
    }
}

fn remote(addr: u64, rkey_be: u32) -> [u32; 4] {
    [
        ((addr >> 32) as u32).to_be(),
        (addr as u32).to_be(),
        rkey_be,
        GARBAGE,
    ]
}

fn local(len: u32, lkey_be: u32, addr: u64) -> [u32; 4] {
    [
        len.to_be(),
        lkey_be,
        ((addr >> 32) as u32).to_be(),
        (addr as u32).to_be(),
    ]
}

/// `ncclGin` on one context.
#[derive(Clone, Copy, Debug)]
pub struct Gin {
    /// Address of this context's structure.
    at: u64,
    pub rank: usize,
    pub ranks: usize,
    sharing: Sharing,
    form: Form,
}

impl Gin {
    /// Context `context` of what `createContext` gave, with structures of `stride` bytes.
    pub fn new(handle: u64, stride: u64, context: usize, rank: usize, ranks: usize) -> Self {
        Self {
            at: handle + stride * context as u64,
            rank,
            ranks,
            sharing: Sharing::Gpu,
            form: NEW,
        }
    }

    /// As headers up to 2.29.7 see it: one context a connection, and another queue pair.
    pub fn old(handle: u64, rank: usize, ranks: usize) -> Self {
        Self {
            form: OLD,
            ..Self::new(handle, 72, 0, rank, ranks)
        }
    }

    pub fn shared(self, sharing: Sharing) -> Self {
        Self { sharing, ..self }
    }

    pub fn qp(self, peer: usize) -> Qp {
        self.nth(0, peer)
    }

    pub fn companion(self, peer: usize) -> Qp {
        self.nth(8, peer)
    }

    fn nth(self, array: u64, peer: usize) -> Qp {
        assert!(peer < self.ranks);
        Qp {
            at: u64_at(self.at + array).load(Relaxed) + self.form.stride * peer as u64,
            sharing: self.sharing,
            form: self.form,
        }
    }

    fn sink(self) -> u32 {
        u32_at(self.at + 64).load(Relaxed)
    }

    /// Address and key of a signal at `peer`.
    fn signal_of(self, peer: usize, signal: Signal) -> (u64, u32) {
        match signal {
            Signal::Indexed(id) => {
                let offset = u32_at(self.at + 40 + 20).load(Relaxed);
                let rkeys = u64_at(self.at + 40 + 8).load(Relaxed);
                let key = u32_at(rkeys + 4 * peer as u64).load(Relaxed);
                (8 * u64::from(id + offset), key)
            }
            Signal::Va(win, offset) => (offset, win.rkey(peer)),
        }
    }

    fn fetch_add(self, qp: Qp, index: u64, (addr, key): (u64, u32), add: u64) {
        let word = [((add >> 32) as u32).to_be(), (add as u32).to_be()];
        qp.write(
            index,
            0x12,
            &[
                remote(addr, key),
                [word[0], word[1], word[0], word[1]],
                local(8, self.sink(), 0),
            ],
        );
    }

    /// WQEs of a put, from slot `first` on; how many.
    fn writes(self, qp: Qp, first: u64, to: (u64, u32), from: (u64, u32), bytes: u64) -> u64 {
        let chunks = bytes.div_ceil(CHUNK).max(1);
        for i in 0..chunks {
            match (bytes - i * CHUNK).min(CHUNK) as u32 {
                0 => qp.write(first + i, 0, &[]),
                size => qp.write(
                    first + i,
                    8,
                    &[
                        remote(to.0 + i * CHUNK, to.1),
                        local(size, from.1, from.0 + i * CHUNK),
                    ],
                ),
            }
        }
        chunks
    }

    /// `gin.put`, with what may come with it.
    pub fn put(
        self,
        peer: usize,
        (dst, dst_off): (Win, u64),
        (src, src_off): (Win, u64),
        bytes: u64,
        with: With,
    ) -> u64 {
        let qp = self.qp(peer);
        let chunks = bytes.div_ceil(CHUNK).max(1);
        let count = chunks + u64::from(with.signal.is_some());
        let first = qp.reserve(count, with.opts);
        let (to, from) = ((dst_off, dst.rkey(peer)), (src_off, src.lkey()));
        self.writes(qp, first, to, from, bytes);
        if let Some((signal, add)) = with.signal {
            self.fetch_add(qp, first + chunks, self.signal_of(peer, signal), add);
        }
        let last = first + count - 1;
        self.finish(qp, peer, first, last, with.counter, with.opts)
    }

    /// `gin.signal`.
    pub fn signal(self, peer: usize, signal: Signal, add: u64, counter: Option<u32>) -> u64 {
        let qp = self.qp(peer);
        let first = qp.reserve(1, 0);
        self.fetch_add(qp, first, self.signal_of(peer, signal), add);
        self.finish(qp, peer, first, first, counter, 0)
    }

    fn finish(
        self,
        qp: Qp,
        peer: usize,
        first: u64,
        last: u64,
        counter: Option<u32>,
        opts: u32,
    ) -> u64 {
        qp.ready(first, last);
        if let Some(id) = counter {
            let companion = self.companion(peer);
            let at = companion.reserve(2, opts);
            companion.write(
                at,
                0x0f,
                &[[GARBAGE, GARBAGE, (last as u32).to_be(), qp.cqn().to_be()]],
            );
            let offset = u32_at(self.at + 16 + 20).load(Relaxed);
            let rkeys = u64_at(self.at + 16 + 8).load(Relaxed);
            let key = u32_at(rkeys + 4 * self.rank as u64).load(Relaxed);
            self.fetch_add(companion, at + 1, (8 * u64::from(id + offset), key), 1);
            companion.ready(at, at + 1);
            qp.submit(last + 1, opts);
            companion.submit(at + 2, opts);
        } else {
            qp.submit(last + 1, opts);
        }
        last
    }

    /// `gin.putValue` of a word of `T`'s size.
    pub fn put_value(
        self,
        peer: usize,
        (dst, offset): (Win, u64),
        value: &[u8],
        signal: Option<(Signal, u64)>,
    ) -> u64 {
        assert!(matches!(value.len(), 1 | 2 | 4 | 8));
        let qp = self.qp(peer);
        let count = 1 + u64::from(signal.is_some());
        let first = qp.reserve(count, 0);
        let mut inline = [[GARBAGE; 4]; 1];
        inline[0][0] = (value.len() as u32 | 0x8000_0000).to_be();
        let mut payload = [0xa5; 8];
        payload[..value.len()].copy_from_slice(value);
        inline[0][1] = u32::from_ne_bytes([payload[0], payload[1], payload[2], payload[3]]);
        if value.len() == 8 {
            inline[0][2] = u32::from_ne_bytes([payload[4], payload[5], payload[6], payload[7]]);
        }
        qp.write(first, 8, &[remote(offset, dst.rkey(peer)), inline[0]]);
        if let Some((signal, add)) = signal {
            self.fetch_add(qp, first + 1, self.signal_of(peer, signal), add);
        }
        self.finish(qp, peer, first, first + count - 1, None, 0)
    }

    /// `gin.get`.
    pub fn get(
        self,
        peer: usize,
        (from, from_off): (Win, u64),
        (to, to_off): (Win, u64),
        bytes: u64,
    ) {
        let qp = self.qp(peer);
        let chunks = bytes.div_ceil(CHUNK).max(1);
        let first = qp.reserve(chunks, 0);
        for i in 0..chunks {
            match (bytes - i * CHUNK).min(CHUNK) as u32 {
                0 => qp.write(first + i, 0, &[]),
                size => qp.write(
                    first + i,
                    0x10,
                    &[
                        remote(from_off + i * CHUNK, from.rkey(peer)),
                        local(size, to.lkey(), to_off + i * CHUNK),
                    ],
                ),
            }
        }
        let last = first + chunks - 1;
        qp.ready(first, last);
        qp.submit(last + 1, 0);
        let issued = u64_at(self.at + 72).load(Relaxed) + 8 * peer as u64;
        u64_at(issued).fetch_max(last + 1, Relaxed);
    }

    /// `gin.flush` towards one peer: a DUMP behind gets that nobody has made visible, then a wait for everything reserved.
    pub fn flush(self, peer: usize, time: Duration) -> Result<(), Failed> {
        let qp = self.qp(peer);
        if !self.form.gets {
            return match qp.word(0).load(Relaxed) {
                0 => Ok(()),
                n => qp.poll(n - 1, time),
            };
        }
        let issued = u64_at(u64_at(self.at + 72).load(Relaxed) + 8 * peer as u64);
        let visible = u64_at(u64_at(self.at + 80).load(Relaxed) + 8 * peer as u64);
        let upto = if issued.load(Relaxed) > visible.load(Relaxed) {
            let at = qp.reserve(1, 0);
            qp.write(at, 0x23, &[local(1, self.sink(), 0)]);
            qp.ready(at, at);
            qp.submit(at + 1, 0);
            visible.fetch_max(at + 1, Relaxed);
            at + 1
        } else {
            qp.word(0).load(Relaxed)
        };
        match upto {
            0 => Ok(()),
            n => qp.poll(n - 1, time),
        }
    }

    /// `gin.flush`, all peers, with headers of 2.30.3: there were no gets.
    pub fn flush_all(self, time: Duration) -> Result<(), Failed> {
        (0..self.ranks).try_for_each(|peer| self.flush(peer, time))
    }

    fn table(self, table: u64, id: u32) -> &'static AtomicU64 {
        u64_at(u64_at(self.at + table).load(Relaxed) + 8 * u64::from(id))
    }

    pub fn read_signal(self, id: u32) -> u64 {
        self.table(40, id).load(Acquire)
    }

    pub fn read_counter(self, id: u32) -> u64 {
        self.table(16, id).load(Acquire)
    }

    pub fn reset_signal(self, id: u32) {
        self.table(40, id).store(0, Relaxed);
    }

    pub fn reset_counter(self, id: u32) {
        self.table(16, id).store(0, Relaxed);
    }

    /// `gin.waitSignal`.
    pub fn wait_signal(self, id: u32, least: u64, time: Duration) -> u64 {
        wait(|| self.read_signal(id), least, time, "signal")
    }

    /// `gin.waitCounter`.
    pub fn wait_counter(self, id: u32, least: u64, time: Duration) -> u64 {
        wait(|| self.read_counter(id), least, time, "counter")
    }
}

/// Until a word has at least this value.
pub fn wait(read: impl Fn() -> u64, least: u64, time: Duration, what: &str) -> u64 {
    let deadline = Instant::now() + time;
    loop {
        let value = read();
        if value >= least {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} is {value}, not {least}");
        rest();
    }
}
