//! What the pipeline remembers of a job and of a QP, and where a job stands in the order of its QP.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use super::{
    WriteOrder,
    atomic::Atomic,
    channel::{Channel, JobId},
    job::{DmaFailure, Pieces, Range, Ranges, Word, put_old},
    staging::Slot,
};

pub(super) enum Task {
    Copy {
        pieces: Pieces,
        signal: bool,
        piece: usize,
        offset: u64,
    },
    Atomic(Atomic),
    Word(Word),
}

impl Task {
    /// May it be visible before or after its neighbours, as long as they do not touch the same bytes?
    pub(super) fn is_relaxed(&self, order: WriteOrder) -> bool {
        matches!(self, Self::Copy { signal, .. } if order.relaxes(*signal))
    }

    /// Does it read or write any of these bytes?
    pub(super) fn touches(&self, bytes: Range) -> bool {
        match self {
            Self::Copy { pieces, .. } => (0..)
                .map_while(|i| pieces.get(i))
                .any(|piece| piece.touches(bytes)),
            Self::Atomic(_) | Self::Word(_) => true,
        }
    }
}

/// Where a job's copies go, found out once.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// The one channel of all its pieces.
    pub(super) channel: Option<usize>,
    /// It needs the CPU, or several channels, between or after copies.
    pub(super) steps: bool,
    /// The CPU reads host memory as soon as the job begins.
    pub(super) eager: bool,
}

/// What is still to be done of a job that was not put into batches at once.
pub(super) struct Rest {
    pub(super) task: Task,
    pub(super) plan: Option<Plan>,
    /// Its copies go into this batch or later ones.
    pub(super) earliest: u64,
    /// Batch of its last copy so far.
    pub(super) last: u64,
    pub(super) begun: bool,
    pub(super) since: Instant,
}

pub(super) struct State {
    pub(super) qp: u32,
    /// Copies waiting or under way.
    pub(super) ops: u32,
    pub(super) cookie: u64,
    pub(super) rest: Option<Box<Rest>>,
    pub(super) failed: Option<Arc<DmaFailure>>,
    pub(super) hold: bool,
    /// The old value of an atomic.
    pub(super) old: u64,
    /// What the job's bytes are copied to or from, kept as long as a copy may use it.
    pub(super) buffer: Option<Slot>,
    /// Everything has been put into batches.
    pub(super) issued: bool,
    /// The engine does not want to hear of it any more.
    pub(super) closed: bool,
}

impl State {
    pub(super) fn ended(&self) -> bool {
        self.failed.is_some() || (self.issued && self.ops == 0)
    }

    /// It is the oldest of its QP: if it is a word, everything before it has ended, and it is carried out. `true`: it was.
    pub(super) fn carry_out_word(&mut self) -> bool {
        let is_word = |rest: &mut Box<Rest>| matches!(rest.task, Task::Word(_));
        let Some(rest) = self.rest.take_if(is_word) else {
            return false;
        };
        if let Task::Word(word) = rest.task {
            // SAFETY: word and sink were checked and are valid until the job is retired.
            unsafe {
                self.old = crate::engine::modify(word.at, word.width, word.new);
                if let Some(sink) = word.sink {
                    put_old(sink, word.width, self.old);
                }
            }
        }
        self.issued = true;
        true
    }
}

/// A QP's jobs, in order.
#[derive(Default)]
pub(super) struct Pipe {
    /// The first `started` have been put into batches.
    pub(super) jobs: VecDeque<JobId>,
    pub(super) started: usize,
    /// Of the job that started last.
    pub(super) channel: Option<usize>,
    pub(super) steps: bool,
    /// The latest batch with a copy of this QP.
    pub(super) last: u64,
    /// Everything from now on goes into this batch or a later one.
    floor: u64,
    /// The batch that plain writes go into at present, with what they write and read in it.
    run: u64,
    writes: Ranges,
    reads: Range,
    /// All that was written since the QP last had nothing under way.
    written: Range,
    /// Words ([`Task::Word`]) among those that started, and the range that holds them all. The CPU carries each out when those before it have ended.
    words: usize,
    words_hull: Range,
    /// A job failed: nothing more until the QP is cancelled.
    pub(super) dead: bool,
    /// Listed as waiting.
    pub(super) listed: bool,
}

/// Where a piece of a QP may go.
pub(super) struct Turn {
    pub(super) from: Range,
    pub(super) to: Range,
    /// May it be visible before or after its neighbours, as long as they do not touch the same bytes?
    pub(super) relaxed: bool,
}

impl Pipe {
    /// May a job that streams into `channel` start now? If nothing is under way, the order begins anew.
    pub(super) fn streams(&mut self, channel: usize, ordered: bool) -> bool {
        if self.started == 0 {
            (self.last, self.floor, self.run) = (0, 0, 0);
            self.writes.clear();
            (self.reads, self.written) = (Range::default(), Range::default());
            return true;
        }
        !self.steps && self.channel == Some(channel) && ordered
    }

    /// A word starts: it waits for those before it, and only what must follow it waits for it.
    pub(super) fn await_word(&mut self, word: Range) {
        self.words += 1;
        self.words_hull = self.words_hull.hull(word);
    }

    /// The word that is the oldest job was carried out.
    pub(super) fn word_ended(&mut self) {
        // One that had not started was not counted, and is alone then.
        self.words = self.words.saturating_sub(1);
        if self.words == 0 {
            self.words_hull = Range::default();
        }
    }

    /// Must this wait for words before it? Plain copies pass them, as long as they do not touch them: a signal says what was written before it, and
    /// nothing of what comes behind.
    pub(super) fn waits_for_words(&self, relaxed: bool, touches: impl Fn(Range) -> bool) -> bool {
        self.words > 0 && (!relaxed || touches(self.words_hull))
    }

    /// Does it read what a job before it may still be writing?
    pub(super) fn reads_written(&self, from: Range) -> bool {
        self.started > 0 && !from.is_apart(self.written)
    }

    /// The batch after everything of this QP.
    pub(super) fn after_all(&self) -> u64 {
        if self.started == 0 { 0 } else { self.last + 1 }
    }

    /// The batch for a copy that writes `turn.to`.
    pub(super) fn batch(&self, channel: &Channel, turn: &Turn) -> Option<u64> {
        if !turn.relaxed {
            return channel.room(self.after_all());
        }
        let number = channel.room(self.floor.max(self.run))?;
        let touches = number == self.run
            && (self.writes.overlaps(turn.to)
                || self.writes.overlaps(turn.from)
                || !turn.to.is_apart(self.reads));
        if touches {
            channel.room(number + 1)
        } else {
            Some(number)
        }
    }

    /// The copy was put there.
    pub(super) fn put(&mut self, number: u64, turn: &Turn) {
        self.written = self.written.hull(turn.to);
        self.last = self.last.max(number);
        if !turn.relaxed {
            self.floor = number + 1;
            return;
        }
        if number != self.run {
            self.run = number;
            self.writes.clear();
            self.reads = Range::default();
        }
        self.writes.insert(turn.to);
        self.reads = self.reads.hull(turn.from);
    }

    /// Copies up to batch `last` were put, of a job that keeps its distance on both sides.
    pub(super) fn put_all(&mut self, last: u64, to: Range) {
        self.written = self.written.hull(to);
        self.last = self.last.max(last);
        self.floor = self.last + 1;
    }
}
