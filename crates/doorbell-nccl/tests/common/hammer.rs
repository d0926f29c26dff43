//! Kernels of many blocks, one after another: every block puts words with a signal each from several threads, then looks whether all have come.
//!
//! What is lost in the middle of a stream of requests is made up for by the next one; at the end of a kernel it is missed. So kernels are short
//! and many, rings are small and wrap, and threads stand still now and then between any two steps of a post ([`pauses`]).

use std::sync::Barrier;

use super::gin::{Gin, Sharing, Signal, Win, With, pauses};
use super::{LONG, Pages, Rank, config};

/// Words a thread puts in a kernel at most.
const ROUNDS: usize = 24;
/// Threads of a block that post.
const POSTERS: usize = 2;
/// Signals below are those of the sharing modes; from here on those by which blocks meet.
const MEET: u32 = 3;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Hammer {
    pub kernels: usize,
    /// A context each.
    pub blocks: usize,
    /// Slots of a queue.
    pub depth: i32,
}

/// A block as its threads share it.
struct Block<'a> {
    me: usize,
    ranks: usize,
    number: usize,
    pages: &'a Pages,
    win: Win,
    together: Barrier,
    /// Its own context, and the first one.
    own: Gin,
    common: Gin,
}

fn word(from: usize, at: usize, kernel: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (from as u64 + 1) << 56 ^ kernel as u64
}

/// Ranks put to the next one, or to themselves; two at most, as blocks meet by one signal.
pub fn hammer(rank: &Rank, pages: impl Fn(usize) -> Pages, what: Hammer) {
    assert!(rank.ranks <= 2);
    let half = 8 * what.blocks * POSTERS * ROUNDS;
    let pages = pages(2 * half);
    let (window, win) = rank.register(&pages, 0);
    let signals = MEET as usize + what.blocks;
    let context = rank.create(config(signals as i32, 0, what.blocks as i32, what.depth));
    let blocks = (0..what.blocks).map(|number| Block {
        me: rank.rank,
        ranks: rank.ranks,
        number,
        pages: &pages,
        win,
        together: Barrier::new(POSTERS),
        own: context.gin(number),
        common: context.gin(0),
    });
    let blocks: Vec<_> = blocks.collect();
    let grid = &Barrier::new(what.blocks * POSTERS);
    std::thread::scope(|scope| {
        for block in &blocks {
            for thread in 0..POSTERS {
                scope.spawn(move || {
                    pauses(0x9e37 + 64 * block.number as u64 + thread as u64);
                    let mut sent = Sent::default();
                    for kernel in 0..what.kernels {
                        block.run(thread, kernel, what, &mut sent);
                        // A queue has one sharing mode at a time: no block begins the next kernel before all have ended this one.
                        grid.wait();
                    }
                });
            }
        }
    });
    assert!(!context.has_error());
    rank.gather.barrier(rank.rank);
    context.destroy();
    rank.deregister(window);
}

/// How many signals there have been: what is read at the beginning of a kernel may have some of it already.
#[derive(Default)]
struct Sent {
    /// By sharing mode.
    words: [u64; 3],
    /// By which this block met, in its own context and in the common one.
    met: [u64; 2],
}

/// Puts of each of a block's threads.
fn rounds(kernel: usize, block: usize) -> usize {
    1 + (kernel * 7 + block * 5) % ROUNDS
}

impl Block<'_> {
    /// What one thread of the block does in a kernel.
    fn run(&self, thread: usize, kernel: usize, what: Hammer, sent: &mut Sent) {
        let sharing = [Sharing::Gpu, Sharing::Cta, Sharing::Cta, Sharing::Thread][kernel % 4];
        let is_common = sharing == Sharing::Gpu;
        let gin = match is_common {
            true => self.common,
            false => self.own.shared(sharing),
        };
        let posters = if sharing == Sharing::Thread {
            1
        } else {
            POSTERS
        };
        let rounds_here = rounds(kernel, self.number);
        let count = posters * rounds_here;
        let id = sharing as u32;
        let (me, ranks) = (self.me, self.ranks);
        let (to, from) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let first = self.number * POSTERS * ROUNDS;
        let half = what.blocks * POSTERS * ROUNDS;
        if thread == 0 {
            for i in 0..count {
                let value = word(me, first + i, kernel);
                self.pages.write(8 * (first + i), &value.to_ne_bytes());
            }
            self.meet(gin, to, is_common, sent);
        }
        self.together.wait();
        if thread < posters {
            for i in 0..rounds_here {
                let at = 8 * (first + thread * rounds_here + i) as u64;
                let with = With::signal(Signal::Indexed(id), 1);
                let target = (self.win, 8 * half as u64 + at);
                gin.put(to, target, (self.win, at), 8, with);
            }
        }
        self.together.wait();
        if thread != 0 {
            return;
        }
        // All blocks' words come to one signal where all post to one queue.
        sent.words[id as usize] += match is_common {
            true => (0..what.blocks)
                .map(|b| (posters * rounds(kernel, b)) as u64)
                .sum(),
            false => count as u64,
        };
        let expected = sent.words[id as usize];
        let seen = gin.wait_signal(id, expected, LONG);
        assert_eq!(seen, expected, "kernel {kernel}, {sharing:?}: signals");
        gin.flush(to, LONG).expect("complete");
        for i in 0..count {
            let (here, value) = (
                self.pages.word(8 * (half + first + i)),
                word(from, first + i, kernel),
            );
            assert_eq!(
                here, value,
                "kernel {kernel}, {sharing:?}: word {i} of block {}",
                self.number
            );
        }
        self.meet(gin, to, is_common, sent);
    }

    /// Waits for the other rank's block of this number, over the queue that the block posts to.
    fn meet(&self, gin: Gin, to: usize, is_common: bool, sent: &mut Sent) {
        let id = MEET + self.number as u32;
        gin.signal(to, Signal::Indexed(id), 1, None);
        let met = &mut sent.met[usize::from(is_common || self.number == 0)];
        *met += 1;
        gin.wait_signal(id, *met, LONG);
    }
}
