//! What arrived for memory that a copy engine reaches: the bytes of one message's packets, as far as they follow each other, are one
//! copy. Copies settle in order; each has a ticket, and acknowledgements wait for it.
//!
//! While any is under way, what is for host memory waits behind it: it may be the signal of what came before, or overwrite it. A WRITE short
//! enough to have been sent inline is taken for a signal, since packets do not tell.

use std::collections::VecDeque;
use std::time::Instant;

use doorbell_roce::{Atomic, Refusal};
use doorbell_wire::Width;

use super::memory::QpMemory;
use super::staged::{Ended, IN};
use crate::dma::{Buffer, Job, LARGE, Piece, Pieces, Source, Word, Work};
use crate::engine::exec::SIGNAL;
use crate::engine::lane;
use crate::mem::Place;
use crate::raw::Shared;

/// Bytes that wait to be copied for one queue pair, at most; more is dropped, and comes again.
const BEHIND: usize = 4 << 20;
/// Results of atomics kept; the connection asks for each once, and for few at a time.
const RESULTS: usize = 1024;

/// Whose bytes they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A WRITE's, which may be a signal.
    Write {
        /// Is it?
        signal: bool,
    },
    /// A SEND's: its receive announces it.
    Send,
    /// An atomic of the peer's, by its number.
    Atomic(u64),
    /// What a READ or atomic of ours brought back.
    Answer,
}

/// Where the bytes of a run are gathered.
#[derive(Debug)]
enum Data {
    /// In a buffer that the engine reaches.
    Buffer(Buffer),
    /// Anywhere: for host memory, and where no buffer is free.
    Heap(Vec<u8>),
}

/// Bytes that follow each other, gathered.
struct Run {
    dst: Place,
    len: usize,
    room: usize,
    data: Data,
    kind: Kind,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes, {:?}", self.len, self.room, self.kind)
    }
}

impl Run {
    /// Does a piece at `dst` follow, and is there room?
    fn takes(&self, dst: &Place, len: usize, kind: Kind) -> bool {
        let follows = match (&self.dst, dst) {
            (Place::Host(a), Place::Host(b)) => a.addr() + self.len == b.addr(),
            (
                Place::Device { addr: a, dma: one },
                Place::Device {
                    addr: b,
                    dma: other,
                },
            ) => a + self.len as u64 == *b && one.identity() == other.identity(),
            _ => false,
        };
        follows && self.kind == kind && self.len + len <= self.room
    }

    fn put(&mut self, bytes: &[u8]) {
        match &mut self.data {
            // SAFETY: the buffer is ours until its copy begins, and `takes` found room.
            Data::Buffer(buffer) => unsafe {
                crate::copy::write(buffer.ptr().add(self.len), bytes);
            },
            Data::Heap(heap) => heap.extend_from_slice(bytes),
        }
        self.len += bytes.len();
    }
}

/// What arrives.
#[derive(Debug, Default)]
pub(in crate::engine) struct Inward {
    /// Copies begun: the newest ticket. An open run will have the next.
    issued: u64,
    /// The newest that has settled.
    settled: u64,
    run: Option<Run>,
    /// Of each copy under way, oldest first: whose, and how many bytes.
    under_way: VecDeque<(Kind, usize)>,
    /// Bytes of them and of the run.
    bytes: usize,
    /// Values before atomics, until they are asked for.
    results: VecDeque<(u64, u64)>,
    /// Of the WRITE that is being received: bytes to come, and whether it may be a signal.
    rest: usize,
    signal: bool,
    /// A copy failed; nothing more will settle.
    failed: bool,
    /// It was an answer's.
    answer_failed: bool,
}

impl Inward {
    pub(super) fn is_busy(&self) -> bool {
        self.settled != self.issued || self.run.is_some()
    }

    pub(super) fn is_open(&self) -> bool {
        self.run.is_some()
    }

    /// Is so much waiting that packets are better dropped?
    pub(super) fn is_behind(&self) -> bool {
        self.bytes > BEHIND
    }

    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Did what a READ or atomic of ours brought back not reach its memory?
    pub(super) fn answer_failed(&self) -> bool {
        self.answer_failed
    }

    pub(super) fn ended(&mut self, cookie: u64, well: bool, old: u64) -> Ended {
        let Some((kind, len)) = self.under_way.pop_front() else {
            return Ended::Well;
        };
        debug_assert_eq!(cookie, self.settled + 1, "copies of a lane end in order");
        self.bytes -= len;
        if !well {
            self.failed = true;
            self.answer_failed = kind == Kind::Answer;
            return match kind {
                Kind::Write { .. } | Kind::Send => Ended::Lost {
                    settled: self.settled,
                },
                // Whoever asks for the result is told.
                Kind::Answer | Kind::Atomic(_) => Ended::Well,
            };
        }
        self.settled = cookie;
        if let Kind::Atomic(id) = kind {
            if self.results.len() == RESULTS {
                self.results.pop_front();
            }
            self.results.push_back((id, old));
        }
        Ended::Well
    }

    /// Lets go of the open run.
    pub(super) fn abandon(&mut self) -> Option<Buffer> {
        match self.run.take()?.data {
            Data::Buffer(buffer) => Some(buffer),
            Data::Heap(_) => None,
        }
    }

    /// The value before an atomic; `None`: not known yet.
    pub(super) fn result(&mut self, id: u64) -> Result<Option<u64>, Refusal> {
        if let Some(at) = self.results.iter().position(|(known, _)| *known == id) {
            return Ok(self.results.remove(at).map(|(_, old)| old));
        }
        let waits = |(kind, _): &(Kind, usize)| *kind == Kind::Atomic(id);
        if !self.failed && self.under_way.iter().any(waits) {
            return Ok(None);
        }
        Err(Refusal::Operational)
    }
}

impl QpMemory<'_, '_> {
    /// A WRITE of `len` bytes begins.
    pub(super) fn begin_write(&mut self, len: u32) {
        self.flush();
        let inward = &mut self.staged().inward;
        (inward.rest, inward.signal) = (len as usize, len <= SIGNAL);
    }

    /// Bytes for `dst`, after everything before them; `expected` of the same kind are to come, these included. Returns their ticket.
    pub(super) fn deposit(
        &mut self,
        dst: Place,
        bytes: &[u8],
        expected: usize,
        kind: Kind,
    ) -> Result<u64, Refusal> {
        let inward = &mut self.staged().inward;
        if inward.failed {
            return Err(Refusal::Operational);
        }
        if !inward
            .run
            .as_ref()
            .is_some_and(|r| r.takes(&dst, bytes.len(), kind))
        {
            self.flush();
            self.open(dst, bytes.len(), expected, kind)?;
        }
        let inward = &mut self.staged().inward;
        if let Some(run) = &mut inward.run {
            run.put(bytes);
        }
        inward.bytes += bytes.len();
        let ticket = inward.issued + 1;
        if inward.run.as_ref().is_some_and(|r| r.len == r.room) {
            self.flush();
        }
        Ok(ticket)
    }

    /// As [`Self::deposit`], for bytes of the WRITE that is being received.
    pub(super) fn deposit_write(&mut self, dst: Place, bytes: &[u8]) -> Result<u64, Refusal> {
        let inward = &mut self.staged().inward;
        let expected = inward.rest;
        inward.rest = inward.rest.saturating_sub(bytes.len());
        let signal = inward.signal;
        self.deposit(dst, bytes, expected, Kind::Write { signal })
    }

    fn open(&mut self, dst: Place, len: usize, expected: usize, kind: Kind) -> Result<(), Refusal> {
        let room = expected.clamp(len, LARGE.max(len));
        let heap = || (Data::Heap(Vec::with_capacity(room)), room);
        let (data, room) = match &dst {
            Place::Host(_) => heap(),
            Place::Device { dma, .. } => match self.cx.dma.buffer(dma, room as u64) {
                Ok(Some((buffer, got))) if got >= len as u64 => {
                    (Data::Buffer(buffer), got as usize)
                }
                Ok(Some((buffer, _))) => {
                    self.cx.dma.release(buffer);
                    heap()
                }
                Ok(None) => heap(),
                Err(why) => {
                    self.report(why);
                    return Err(Refusal::Operational);
                }
            },
        };
        let inward = &mut self.staged().inward;
        inward.run = Some(Run {
            dst,
            len: 0,
            room,
            data,
            kind,
        });
        Ok(())
    }

    /// What was gathered goes on. At the latest at the end of the round, since it holds an address.
    pub(in crate::engine) fn flush(&mut self) {
        let Some(run) = self.staged().inward.run.take() else {
            return;
        };
        let Run { dst, len, kind, .. } = run;
        let signal = kind == Kind::Write { signal: true };
        let (src, buffer) = match run.data {
            Data::Heap(heap) => (Source::Inline(heap.into()), None),
            Data::Buffer(buffer) => match Shared::from_ptr(buffer.ptr()) {
                Some(ptr) => (Source::Place(Place::Host(ptr)), Some(buffer)),
                None => return,
            },
        };
        let pieces = Pieces::One(Piece {
            src,
            dst,
            len: len as u64,
        });
        self.begin(Work::Copy { pieces, signal }, buffer, kind, len);
    }

    /// Begins an atomic that waits its turn, or whose word a copy engine reaches.
    pub(super) fn begin_atomic(&mut self, id: u64, word: Place, op: Atomic) -> Result<(), Refusal> {
        if self.staged().inward.failed {
            return Err(Refusal::Operational);
        }
        let new = move |old: u64| match op {
            Atomic::FetchAdd { add } => old.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if old == compare => swap,
            Atomic::CompareSwap { .. } => old,
        };
        let work = match word {
            Place::Host(at) => Work::Word(Word {
                at,
                width: Width::Eight,
                sink: None,
                new: Box::new(new),
            }),
            Place::Device { addr, dma } => Work::Atomic {
                addr,
                dma,
                width: Width::Eight,
                new: Box::new(new),
                sink: None,
            },
        };
        self.flush();
        self.begin(work, None, Kind::Atomic(id), 0);
        Ok(())
    }

    fn begin(&mut self, work: Work, buffer: Option<Buffer>, kind: Kind, len: usize) {
        let qp = lane(self.cx.slot, IN);
        let hold = self.cx.acknowledger.issued();
        let inward = &mut self.staged().inward;
        inward.issued += 1;
        inward.under_way.push_back((kind, len));
        let cookie = inward.issued;
        let job = Job {
            qp,
            cookie,
            hold,
            work,
        };
        self.cx.dma.start_with(job, buffer, Instant::now());
    }
}
