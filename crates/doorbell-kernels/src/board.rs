//! What the copier's host and its kernel share: a board in host memory that the GPU reaches, with room for eight jobs.
//!
//! Jobs have numbers, from 1 up, and are done in their order; number `n` is in place `n % 8`. A launch is given its first job as arguments. It says that it
//! has started ([`doorbell_device::claim`]: until then it can be taken back), does that job, and then stays a moment: it polls for the [`Post`] of the job behind, whose
//! number is in it, does that one, and so on. At last it writes which job it would have taken next ([`CopyBoard::left`]), and touches nothing after that.
//!
//! So neither side ever has to decide who does a job. The host writes a post, and while it waits for [`CopyBoard::done`] it looks at `left` too: if the kernel has left and the
//! job is not done, it was not begun and will not be by that launch, and the host launches again with that job as the first.
//!
//! Host and kernel write different lines.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::params::Params;

/// Most copies, and most steps, of a [`CopyJob`].
pub const COPIES: usize = 256;

/// Jobs that have not been done, at a time.
pub const JOBS: usize = 8;

/// The whole of it. One launch at a time uses it, from its call to its `left`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CopyBoard {
    /// Not 0: the host has taken the launch back. The host sets it, and the three below, to 0 before a launch, except for `done`.
    pub cancelled: AtomicU64,
    reserved: [AtomicU64; 7],
    /// 1 when the kernel runs.
    pub started: AtomicU64,
    /// Number of the newest job that was done: all its copies were made, and everyone sees their bytes. It never goes back.
    pub done: AtomicU64,
    /// Number of the job that the kernel did not take when it left; 0 while it is there. The last that it writes.
    pub left: AtomicU64,
    reserved2: [AtomicU64; 5],
    /// [`Post`]s.
    pub posts: [[AtomicU64; 2]; JOBS],
    /// What does not fit in them.
    pub jobs: [CopyJob; JOBS],
}

const _: () = assert!(size_of::<CopyBoard>() == 256 + JOBS * size_of::<CopyJob>());
// A post is read as one access.
const _: () = assert!(core::mem::offset_of!(CopyBoard, posts).is_multiple_of(16));

/// The steps and copies of a job.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CopyJob {
    /// [`CopyJob::step`]s; the first is in the post too, and the kernel does not read it here.
    pub steps: [AtomicU64; COPIES],
    /// Destination, source, bytes, 0.
    pub copies: [[AtomicU64; 4]; COPIES],
}

const _: () = assert!(size_of::<CopyJob>() == COPIES * 8 + COPIES * 32);

impl CopyBoard {
    /// The place of job `number`.
    #[inline(always)]
    pub const fn place(number: u64) -> usize {
        (number % JOBS as u64) as usize
    }

    /// Forgets the launch before, which has left.
    pub fn reset(&self) {
        self.cancelled.store(0, Ordering::Relaxed);
        self.started.store(0, Ordering::Relaxed);
        self.left.store(0, Ordering::Relaxed);
    }

    /// Shows a job to the kernel that is there. All that belongs to it was written before.
    pub fn post(&self, number: u64, post: Post) {
        let [first, last] = &self.posts[Self::place(number)];
        first.store(post.0[0], Ordering::Relaxed);
        // The kernel reads both at once, and this one's number says that it is all there.
        last.store(post.0[1], Ordering::Release);
    }

    /// What was posted as job `number`.
    pub fn posted(&self, number: u64) -> Post {
        let [first, last] = &self.posts[Self::place(number)];
        Post([first.load(Ordering::Relaxed), last.load(Ordering::Relaxed)])
    }
}

impl CopyJob {
    /// The word of a step: the copies up to and without number `end` that no step before it has, `lanes` threads each (a power of two). `len` is the
    /// bytes of each of them, below 2^31; 0: each says itself, which takes the kernel another read of host memory.
    pub const fn step(end: u32, lanes: u32, len: u32, is_last: bool) -> u64 {
        let shape = (end & 0xfff) as u64 | (lanes.ilog2() as u64) << 12;
        shape | (len as u64) << 32 | (is_last as u64) << 63
    }

    /// Its parts: the end, the logarithm of the threads a copy, the bytes of each, and whether it is the last.
    #[inline(always)]
    pub const fn parse_step(word: u64) -> (u32, u32, u32, bool) {
        let (end, lanes) = (word as u32 & 0xfff, (word as u32 >> 12) & 0xf);
        (
            end,
            lanes,
            (word >> 32) as u32 & 0x7fff_ffff,
            word >> 63 != 0,
        )
    }

    /// What a copy moves in at a time, in bytes: the largest power of two up to 16 by which both ends are aligned alike, but not 2, for which there are no loads.
    #[inline(always)]
    pub const fn width(dst: u64, src: u64) -> u64 {
        match 1 << (dst ^ src | 16).trailing_zeros() {
            2 => 1,
            width => width,
        }
    }

    /// The bytes of a copy that takes as long, if it is aligned alike by 16 bytes.
    #[inline(always)]
    pub const fn weight(dst: u64, src: u64, len: u64) -> u64 {
        len.saturating_mul(16 / Self::width(dst, src))
    }

    /// As many threads as a copy of this [weight](Self::weight) keeps busy, four units each: a power of two.
    #[inline(always)]
    pub const fn lanes_for(weight: u64) -> u32 {
        let units = weight.div_ceil(64);
        if units >= COPIES as u64 {
            COPIES as u32
        } else if units <= 1 {
            1
        } else {
            (units as u32).next_power_of_two()
        }
    }

    /// Sets copy number `at`.
    pub fn set(&self, at: usize, dst: u64, src: u64, len: u64) {
        for (word, value) in self.copies[at].iter().zip([dst, src, len]) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// What the kernel polls: sixteen bytes, read and written as one, with the number of the job in the last eight bits (1, and the low seven of it). A job of one copy is all there, since each further read of host
/// memory takes a microsecond.
///
/// | kind | first word | second word |
/// |---|---|---|
/// | a copy | source (52 bits), low 12 bits of its bytes | destination (52 bits), high 3 bits of its bytes, 0, number |
/// | steps | the first step's word | 1 at bit 55, number |
/// | leave | 0 | 1 at bit 55, number |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post(pub [u64; 2]);

/// What a [`Post`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// A job of this one copy.
    Copy {
        /// Where to.
        dst: u64,
        /// Where from.
        src: u64,
        /// Bytes.
        len: u64,
    },
    /// A job whose first step is this.
    Steps(u64),
    /// No job: the kernel is to leave.
    Leave,
}

impl Post {
    const ADDRESS: u64 = (1 << 52) - 1;
    const LONG: u64 = 1 << 15;
    const OTHER: u64 = 1 << 55;

    /// A job of one copy, if it fits.
    pub const fn copy(number: u64, dst: u64, src: u64, len: u64) -> Option<Self> {
        if dst > Self::ADDRESS || src > Self::ADDRESS || len == 0 || len >= Self::LONG {
            return None;
        }
        let last = dst | len >> 12 << 52 | Self::tag(number);
        Some(Self([src | len << 52, last]))
    }

    /// A job in steps, the first of which is `step`.
    pub const fn steps(number: u64, step: u64) -> Self {
        Self([step, Self::OTHER | Self::tag(number)])
    }

    /// In the place of job `number`: there is none, and the kernel is to leave.
    pub const fn leave(number: u64) -> Self {
        Self([0, Self::OTHER | Self::tag(number)])
    }

    /// Is it job `number`'s? What was in its place before is eight numbers older, or nothing: 0.
    #[inline(always)]
    pub const fn is(self, number: u64) -> bool {
        self.0[1] >> 56 == Self::tag(number) >> 56
    }

    #[inline(always)]
    const fn tag(number: u64) -> u64 {
        (number | 0x80) << 56
    }

    /// What it says.
    #[inline(always)]
    pub const fn parse(self) -> Posted {
        let [first, last] = self.0;
        if last & Self::OTHER == 0 {
            let (dst, src) = (last & Self::ADDRESS, first & Self::ADDRESS);
            let len = first >> 52 | (last >> 52 & 7) << 12;
            Posted::Copy { dst, src, len }
        } else if first == 0 {
            Posted::Leave
        } else {
            Posted::Steps(first)
        }
    }
}

/// What `copies` takes: five arguments on a GPU, since they come with the launch, and this structure on the host.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyCall {
    /// Pointer to a [`CopyBoard`].
    pub board: u64,
    /// The first job's number.
    pub number: u64,
    /// Its post.
    pub post: [u64; 2],
    /// How long to stay since the last job was done (low half) and in all (high half), in nanoseconds.
    pub times: u64,
}

const _: () = assert!(size_of::<CopyCall>() == 40);
// SAFETY: repr(C); the size above is the sum of the fields, so there is no padding.
unsafe impl Params for CopyCall {}

impl CopyCall {
    /// Its `times`.
    pub const fn times(stay_ns: u32, life_ns: u32) -> u64 {
        stay_ns as u64 | (life_ns as u64) << 32
    }
}
