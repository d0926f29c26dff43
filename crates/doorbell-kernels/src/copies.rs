//! Small copies, many at a time, in steps: what a copy engine does one by one in a microsecond each, threads do side by side.
//!
//! One block, which stays a moment when it has done its job, for the next: a launch takes ten microseconds, a kernel that is there two reads of host memory
//! ([`board`](crate::board)). Its stay is short, and its life bounded however much there is to do, since others may wait for all kernels of the GPU to end.
//!
//! The copies of a step are dealt out to groups of threads, as many threads a copy as its step says; between steps is a barrier, and a fence, so
//! that what a step reads the one before has written, and whoever sees a step's bytes sees those of the steps before. Loads and stores go
//! past the first-level cache, to what other kernels, CPUs and GPUs see. Nothing outside the ranges is touched, and what is aligned alike
//! at both ends moves in words of up to 16 bytes: an aligned word of 4 or 8 bytes is read and written whole.
//!
//! A thread's loads of host memory take their round trips one by one, a microsecond each. So the first warp asks whether the work is still
//! ours while the others fetch what it is, a step whose copies are of one length says so in its word, and a lone copy is in what is polled.

use doorbell_device::{Arch, Chunk, claim, leave, sites, take};

use crate::board::{CopyBoard, CopyCall, CopyJob, Post, Posted};

/// A copy as a thread holds it.
#[derive(Clone, Copy)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
}

/// `copies`: does the job that it was launched with, unless the host takes the launch back first, and those that are posted behind it while it stays.
///
/// # Safety
/// The board is as [`CopyBoard`] says, and every range of its jobs' copies may be read and written by this GPU until they are done.
#[inline(always)]
pub(crate) unsafe fn copies<A: Arch>(a: A, call: CopyCall) {
    let board: *const CopyBoard = pointer(call.board);
    let (mut number, born) = (call.number, a.clock_ns());
    // SAFETY: (whole body) the caller's promise; addresses of fields, no references to memory that others write.
    unsafe {
        let mut work = Work::new(a);
        let mut post = Post(call.post);
        work.turn_to(a, job(board, number), post);
        let mut granted = 0;
        if a.thread() == 0 {
            let started = (&raw const (*board).started).cast_mut().cast();
            let cancelled = (&raw const (*board).cancelled).cast();
            granted = u64::from(claim(a, started, cancelled));
        }
        if a.block_broadcast64(granted) != 0 {
            loop {
                work.all(a, job(board, number));
                if a.thread() == 0 {
                    let done: *mut u64 = (&raw const (*board).done).cast_mut().cast();
                    // A release, behind the barrier: it comes after the stores of all threads.
                    a.store64(done, number, sites::REPORT_STORE);
                }
                number += 1;
                // The next job comes after this one for all who see it. Nobody waits for this fence while there is no next job.
                work.fence(a);
                let mut next = Post::leave(number);
                if a.thread() == 0 {
                    next = stay(a, board, number, born, call.times);
                }
                let Post([first, last]) = next;
                post = Post(a.block_broadcast_unit(Chunk([first, last])).0);
                if post.parse() == Posted::Leave {
                    break;
                }
                work.turn_to(a, job(board, number), post);
            }
        }
        if a.thread() == 0 {
            let left: *mut u64 = (&raw const (*board).left).cast_mut().cast();
            leave(a, left, number);
        }
    }
}

/// Stays for the post of job `number`, as long as it may; [`Post::leave`] if none came. For one thread.
///
/// # Safety
/// As for [`copies`].
#[inline(always)]
unsafe fn stay<A: Arch>(a: A, board: *const CopyBoard, number: u64, born: u64, times: u64) -> Post {
    let (stay, life) = (times & 0xffff_ffff, times >> 32);
    let since = a.clock_ns();
    let mut now = since;
    // SAFETY: the caller's promise; a place of the array.
    let place = unsafe {
        (&raw const (*board).posts)
            .cast::<Chunk>()
            .add(CopyBoard::place(number))
    };
    // However much there is to do: who waits for all kernels to end waits for this one too.
    if now.wrapping_sub(born) >= life {
        return Post::leave(number);
    }
    loop {
        // SAFETY: as above.
        if let Some(Chunk(post)) = unsafe { take(a, place, |last| Post([0, last]).is(number)) } {
            return Post(post);
        }
        // It has looked behind its last look at the clock: while other processes had the GPU a job may have come, and the time run out.
        if now.wrapping_sub(since) >= stay || now.wrapping_sub(born) >= life {
            return Post::leave(number);
        }
        a.relax();
        now = a.clock_ns();
    }
}

/// # Safety
/// As for [`copies`].
#[inline(always)]
unsafe fn job(board: *const CopyBoard, number: u64) -> *const CopyJob {
    // SAFETY: the caller's promise; a place of the array.
    unsafe {
        (&raw const (*board).jobs)
            .cast::<CopyJob>()
            .add(CopyBoard::place(number))
    }
}

/// A step: copies up to `end`, `1 << lanes` threads each.
#[derive(Clone, Copy)]
struct Step {
    end: u32,
    lanes: u32,
    len: u32,
    is_last: bool,
}

/// What a thread does of a job.
struct Work {
    /// Threads that copy, and this one's number among them; from there on it does nothing.
    threads: u32,
    me: u32,
    step: Step,
    /// Its next copy, fetched ahead.
    at: u32,
    copy: Copy,
}

impl Work {
    #[inline(always)]
    fn new<A: Arch>(a: A) -> Self {
        // The first warp asks, if there are others.
        let asking = if a.threads() > A::LANES { A::LANES } else { 0 };
        let threads = a.threads() - asking;
        let nothing = Step {
            end: 0,
            lanes: 0,
            len: 0,
            is_last: true,
        };
        let (dst, src, len) = (0, 0, 0);
        Self {
            threads,
            me: if a.thread() < asking {
                threads
            } else {
                a.thread() - asking
            },
            step: nothing,
            at: 0,
            copy: Copy { dst, src, len },
        }
    }

    /// Begins a job.
    ///
    /// # Safety
    /// As for [`copies`].
    #[inline(always)]
    unsafe fn turn_to<A: Arch>(&mut self, a: A, job: *const CopyJob, post: Post) {
        match post.parse() {
            Posted::Copy { dst, src, len } => {
                let lanes = CopyJob::lanes_for(CopyJob::weight(dst, src, len));
                self.shape(CopyJob::step(1, lanes, len as u32, true));
                self.at = self.first(0);
                self.copy = Copy { dst, src, len };
            }
            // SAFETY: the caller's promise.
            Posted::Steps(first) => unsafe { self.begin(a, job, first, 0) },
            Posted::Leave => {}
        }
    }

    /// What this thread has stored, and seen stored, comes before what it will. The first warp stores nothing, and has no time.
    #[inline(always)]
    fn fence<A: Arch>(&self, a: A) {
        if self.me < self.threads {
            a.fence(sites::STEP_FENCE);
        }
    }

    /// All steps, with a barrier behind each.
    ///
    /// # Safety
    /// As for [`copies`].
    #[inline(always)]
    unsafe fn all<A: Arch>(&mut self, a: A, job: *const CopyJob) {
        // SAFETY: (whole body) the caller's promise; every step but the last has one behind it.
        unsafe {
            let steps: *const u64 = (&raw const (*job).steps).cast();
            let mut number = 0;
            loop {
                let step = self.step;
                number += 1;
                let next = if step.is_last {
                    0
                } else {
                    a.load64(steps.add(number), sites::DATA)
                };
                self.carry_out(a, job);
                if !step.is_last {
                    self.begin(a, job, next, step.end);
                }
                a.block_sync();
                if step.is_last {
                    return;
                }
                // Everyone's stores come before everyone's next: what the barrier has shown a thread counts as its own.
                a.fence(sites::STEP_FENCE);
            }
        }
    }

    /// Copies that are made at a time.
    #[inline(always)]
    fn groups(&self) -> u32 {
        self.threads >> self.step.lanes
    }

    /// Turns to the step of `word`, whose copies are those from `start` on.
    ///
    /// # Safety
    /// As for [`copies`].
    #[inline(always)]
    unsafe fn begin<A: Arch>(&mut self, a: A, job: *const CopyJob, word: u64, start: u32) {
        self.shape(word);
        self.at = self.first(start);
        // SAFETY: the caller's promise.
        self.copy = unsafe { self.load(a, job, self.at) };
    }

    #[inline(always)]
    fn shape(&mut self, word: u64) {
        let (end, lanes, len, is_last) = CopyJob::parse_step(word);
        self.step = Step {
            end,
            lanes: lanes.min(self.threads.ilog2()),
            len,
            is_last,
        };
    }

    /// This thread's first copy of those from `start` on.
    #[inline(always)]
    fn first(&self, start: u32) -> u32 {
        let group = self.me >> self.step.lanes;
        // Threads that are no whole group are left over.
        if group < self.groups() {
            start + group
        } else {
            self.step.end
        }
    }

    /// Copy `at`, if the step has it.
    ///
    /// # Safety
    /// As for [`copies`].
    #[inline(always)]
    unsafe fn load<A: Arch>(&self, a: A, job: *const CopyJob, at: u32) -> Copy {
        let Step { end, len, .. } = self.step;
        if at >= end {
            let (dst, src, len) = (0, 0, 0);
            return Copy { dst, src, len };
        }
        // SAFETY: the caller's promise; there are `end` copies.
        unsafe {
            let words: *const u64 = (&raw const (*job).copies)
                .cast::<u64>()
                .add(at as usize * 4);
            let Chunk([dst, src]) = a.load_unit(words.cast());
            let len = match len {
                0 => a.load64(words.add(2), sites::DATA),
                len => u64::from(len),
            };
            Copy { dst, src, len }
        }
    }

    /// This thread's part of the step.
    ///
    /// # Safety
    /// As for [`copies`].
    #[inline(always)]
    unsafe fn carry_out<A: Arch>(&mut self, a: A, job: *const CopyJob) {
        let lanes = 1 << self.step.lanes;
        while self.at < self.step.end {
            self.at += self.groups();
            // SAFETY: the caller's promise.
            unsafe {
                let next = self.load(a, job, self.at);
                carry_out(a, self.copy, self.me & (lanes - 1), lanes);
                self.copy = next;
            }
        }
    }
}

/// The part of thread `rank` of `lanes`.
///
/// # Safety
/// Both ranges may be read and written.
#[inline(always)]
unsafe fn carry_out<A: Arch>(a: A, copy: Copy, rank: u32, lanes: u32) {
    let Copy { dst, src, len } = copy;
    let (rank, lanes) = (u64::from(rank), u64::from(lanes));
    let width = CopyJob::width(dst, src);
    let head = (dst.wrapping_neg() & (width - 1)).min(len);
    let units = (len - head) / width;
    let tail = head + units * width;
    // SAFETY: (whole body) every access is inside the ranges and aligned: at both ends alike, and at the destination by construction.
    unsafe {
        if rank == 0 {
            edge(a, copy, 0, head);
        }
        let (to, from) = (dst + head, src + head);
        match width {
            16 => spread(
                (rank, lanes, units),
                |i| a.load_unit(pointer(from + i * 16)),
                |i, unit| a.store_unit(pointer(to + i * 16), unit),
            ),
            8 => spread(
                (rank, lanes, units),
                |i| a.load64(pointer(from + i * 8), sites::DATA),
                |i, word| a.store64(pointer(to + i * 8), word, sites::DATA),
            ),
            4 => spread(
                (rank, lanes, units),
                |i| a.load32(pointer(from + i * 4), sites::DATA),
                |i, word| a.store32(pointer(to + i * 4), word, sites::DATA),
            ),
            _ => spread(
                (rank, lanes, units),
                |i| a.load8(pointer(from + i)),
                |i, byte| a.store8(pointer(to + i), byte),
            ),
        }
        if rank == 0 {
            edge(a, copy, tail, len);
        }
    }
}

/// Every `lanes`th of `units`, from `rank` on: several loads, then their stores, so that their round trips overlap.
#[inline(always)]
fn spread<T>(
    (rank, lanes, units): (u64, u64, u64),
    load: impl Fn(u64) -> T,
    store: impl Fn(u64, T),
) {
    let mut i = rank;
    while i + 3 * lanes < units {
        let four = [0, 1, 2, 3].map(|k| load(i + k * lanes));
        let [u, v, w, x] = four;
        store(i, u);
        store(i + lanes, v);
        store(i + 2 * lanes, w);
        store(i + 3 * lanes, x);
        i += 4 * lanes;
    }
    while i < units {
        store(i, load(i));
        i += lanes;
    }
}

/// What is left over at an end, fewer than 16 bytes: in words as wide as their place allows.
///
/// # Safety
/// As for [`carry_out`]; both ends are aligned alike by more than is left over.
#[inline(always)]
unsafe fn edge<A: Arch>(a: A, copy: Copy, mut at: u64, end: u64) {
    while at < end {
        let (to, from) = (copy.dst + at, copy.src + at);
        let fits = |width: u64| to & (width - 1) == 0 && at + width <= end;
        // SAFETY: the caller's promise.
        unsafe {
            at += if fits(8) {
                a.store64(
                    pointer(to),
                    a.load64(pointer(from), sites::DATA),
                    sites::DATA,
                );
                8
            } else if fits(4) {
                a.store32(
                    pointer(to),
                    a.load32(pointer(from), sites::DATA),
                    sites::DATA,
                );
                4
            } else {
                a.store8(pointer(to), a.load8(pointer(from)));
                1
            };
        }
    }
}

#[inline(always)]
fn pointer<T>(addr: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(addr as usize)
}
