//! What leaves from memory that a copy engine reaches: fetched ahead of the packets, in pieces as large as the messages and the buffers
//! allow, within bounds for each queue pair.
//!
//! Pieces of messages stay until their message is complete, as far as there is room: what is lost is sent again from them. Pieces of answers
//! are read once. Memory that is read for a READ is never older than its request.

use std::collections::VecDeque;
use std::time::Instant;

use doorbell_roce::Refusal;

use super::flight::Flight;
use super::memory::QpMemory;
use super::staged::OUT;
use crate::dma::{Buffer, DmaCore, Job, LARGE, Piece, Pieces, Source, Work};
use crate::engine::lane;
use crate::fault::Fault;
use crate::mem::{Access, End, Place};
use crate::raw::Shared;

/// Bytes that are kept for the messages of a queue pair, and for its answers.
const BYTES: u64 = 1 << 20;
/// Pieces, for short messages.
const PIECES: usize = 256;

/// A piece that is fetched.
#[derive(Debug)]
struct Fetched {
    /// Of which message; 0 for an answer.
    token: u64,
    /// Where in the message, or in the region.
    from: u64,
    len: u64,
    cookie: u64,
    /// When it is there.
    buffer: Option<Buffer>,
}

impl Fetched {
    fn end(&self) -> (u64, u64) {
        (self.token, self.from + self.len)
    }
}

/// Pieces in the order of what they are of.
#[derive(Debug, Default)]
struct Run {
    pieces: VecDeque<Fetched>,
    bytes: u64,
}

impl Run {
    fn push(&mut self, piece: Fetched) {
        self.bytes += piece.len;
        self.pieces.push_back(piece);
    }

    fn is_full(&self) -> bool {
        self.bytes >= BYTES || self.pieces.len() >= PIECES
    }

    /// Copies bytes from `from` on; `false` if they are not all there.
    fn copy(&self, token: u64, from: u64, out: &mut [u8]) -> bool {
        let end = from + out.len() as u64;
        let first = self.pieces.partition_point(|p| p.end() <= (token, from));
        let ready = |piece: &&Fetched| piece.token == token && piece.buffer.is_some();
        let mut at = from;
        for piece in self.pieces.iter().skip(first).take_while(ready) {
            if piece.from > at || at == end {
                break;
            }
            at = end.min(piece.from + piece.len);
        }
        if at != end {
            return false;
        }
        let mut at = from;
        for piece in self.pieces.iter().skip(first) {
            let (Some(buffer), true) = (&piece.buffer, at < end) else {
                break;
            };
            let take = end.min(piece.from + piece.len) - at;
            // SAFETY: the piece has these bytes, its copy has ended; the output is ours.
            unsafe {
                crate::copy::copy(
                    out.as_mut_ptr().add((at - from) as usize),
                    buffer.ptr().add((at - piece.from) as usize),
                    take as usize,
                );
            }
            at += take;
        }
        true
    }

    /// Lets go of the pieces that end at or before a position, while `more` says so.
    fn drop_until(
        &mut self,
        position: (u64, u64),
        dma: &mut DmaCore,
        mut more: impl FnMut(&Self) -> bool,
    ) {
        while self.pieces.front().is_some_and(|p| p.end() <= position) && more(self) {
            self.drop_front(dma);
        }
    }

    fn drop_front(&mut self, dma: &mut DmaCore) {
        if let Some(piece) = self.pieces.pop_front() {
            self.bytes -= piece.len;
            // One that is still being fetched goes back when that has ended.
            if let Some(buffer) = piece.buffer {
                dma.release(buffer);
            }
        }
    }

    fn clear(&mut self, dma: &mut DmaCore) {
        while !self.pieces.is_empty() {
            self.drop_front(dma);
        }
    }

    fn find(&mut self, cookie: u64) -> Option<&mut Fetched> {
        self.pieces.iter_mut().find(|p| p.cookie == cookie)
    }
}

/// The answer to a READ.
#[derive(Debug)]
struct Answer {
    rkey: u32,
    /// What is to be read next, where it ends, and from where on nothing has been fetched.
    at: u64,
    end: u64,
    next: u64,
    run: Run,
}

/// What leaves.
#[derive(Debug, Default)]
pub(in crate::engine) struct Outward {
    next_cookie: u64,
    messages: Run,
    /// From here on (message, offset) nothing has been fetched.
    cursor: (u64, u64),
    /// Up to here the messages have been sent.
    position: (u64, u64),
    /// Packets were asked for, so it is worth fetching ahead.
    wanted: bool,
    answers: VecDeque<Answer>,
    /// A copy failed; nothing more comes.
    failed: bool,
    /// No buffer was free.
    hungry: bool,
}

impl Outward {
    pub(super) fn ended(
        &mut self,
        cookie: u64,
        well: bool,
        buffer: Option<Buffer>,
    ) -> Option<Buffer> {
        if !well {
            self.failed = true;
            return buffer;
        }
        let mut runs = self.answers.iter_mut().map(|a| &mut a.run);
        let piece = match self.messages.find(cookie) {
            Some(piece) => Some(piece),
            None => runs.find_map(|run| run.find(cookie)),
        };
        match piece {
            Some(piece) => {
                piece.buffer = buffer;
                None
            }
            // Nobody waits for it any more.
            None => buffer,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// No pieces are kept or expected.
    pub(super) fn is_empty(&self) -> bool {
        self.messages.pieces.is_empty() && self.answers.is_empty()
    }

    /// Has anything to be fetched?
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted
    }

    pub(super) fn clear(&mut self, dma: &mut DmaCore) {
        self.messages.clear(dma);
        for mut answer in self.answers.drain(..) {
            answer.run.clear(dma);
        }
    }

    /// No buffer was free since this was last asked.
    pub(super) fn take_hunger(&mut self) -> bool {
        std::mem::take(&mut self.hungry)
    }

    /// Gives buffers back that it cannot use at present (its window is closed), since others need some; what was in them is fetched again.
    pub(super) fn yield_buffers(&mut self, dma: &mut DmaCore) {
        if self.messages.pieces.iter().any(|p| p.buffer.is_some()) {
            self.messages.clear(dma);
            self.cursor = self.position;
            self.wanted = false;
        }
    }

    /// Messages before `oldest` are complete.
    pub(super) fn complete(&mut self, oldest: u64, dma: &mut DmaCore) {
        self.messages.drop_until((oldest, 0), dma, |_| true);
    }
}

impl QpMemory<'_, '_> {
    /// Bytes of a message for a packet; `false`: not there yet, they are being fetched.
    pub(super) fn load_fetched(
        &mut self,
        token: u64,
        from: u32,
        out: &mut [u8],
    ) -> Result<bool, Fault> {
        let (from, len) = (u64::from(from), out.len() as u64);
        let outward = &mut self.staged().outward;
        if outward.messages.copy(token, from, out) {
            outward.position = (token, from + len);
            return Ok(true);
        }
        if outward.failed {
            return Err(Fault::DmaFailed);
        }
        outward.wanted = true;
        outward.position = (token, from);
        let there = |p: &Fetched| (p.token, p.from) <= (token, from) && p.end() > (token, from);
        if (token, from) < outward.cursor && !outward.messages.pieces.iter().any(there) {
            // Sent again, and not kept.
            outward.cursor = (token, from);
            let Self { staged, cx, .. } = self;
            if let Some(staged) = staged {
                staged.outward.messages.clear(cx.dma);
            }
        }
        Ok(false)
    }

    /// Fetches ahead what is to be sent.
    pub(in crate::engine) fn feed(&mut self) {
        let flight: &Flight = self.flight;
        loop {
            let outward = &mut self.staged().outward;
            if outward.failed {
                return;
            }
            let (position, cursor) = (outward.position, outward.cursor);
            let Self { staged, cx, .. } = self;
            if let Some(staged) = staged {
                let messages = &mut staged.outward.messages;
                messages.drop_until(position, cx.dma, |run| run.is_full());
                if messages.is_full() {
                    return;
                }
            }
            // The next bytes of a message that has any, and where they are.
            let Some((token, part)) = flight.source_from(cursor.0, cursor.1) else {
                return;
            };
            let (at, offset) = part;
            let len = u64::from(at.len);
            // What is wrong with it is told when it is to be sent.
            let Ok(place) = self.find(End::Local, at.key.0, at.addr, len, Access::NONE) else {
                return;
            };
            let len = match place {
                Place::Host(_) => len,
                Place::Device { .. } => {
                    let Some((cookie, got)) = self.fetch(place, len) else {
                        return;
                    };
                    self.staged().outward.messages.push(Fetched {
                        token,
                        from: offset,
                        len: got,
                        cookie,
                        buffer: None,
                    });
                    got
                }
            };
            self.staged().outward.cursor = (token, offset + len);
        }
    }

    /// A READ is to be answered: its bytes may be fetched now, if nothing that was written before is under way.
    pub(super) fn expect_read(&mut self, rkey: u32, va: u64, len: u32) {
        if !self.staged().inward.is_busy() {
            self.staged().outward.answers.push_back(Answer {
                rkey,
                at: va,
                end: va.wrapping_add(len.into()),
                next: va,
                run: Run::default(),
            });
            self.feed_answers();
        }
    }

    /// Bytes of an answer; `false`: not there yet, they are being fetched.
    pub(super) fn read_fetched(
        &mut self,
        rkey: u32,
        va: u64,
        rest: u32,
        out: &mut [u8],
    ) -> Result<bool, Refusal> {
        let end = va.wrapping_add(rest.into());
        let this = |a: &Answer| (a.rkey, a.at, a.end) == (rkey, va, end);
        let answers = &mut self.staged().outward.answers;
        // What was expected before it is not asked for any more (another part is being sent again).
        let stale = answers.iter().position(this).unwrap_or(answers.len());
        let stale: Vec<Answer> = answers.drain(..stale).collect();
        if answers.is_empty() {
            answers.push_back(Answer {
                rkey,
                at: va,
                end,
                next: va,
                run: Run::default(),
            });
        }
        for mut answer in stale {
            answer.run.clear(self.cx.dma);
        }
        let Self { staged, cx, .. } = self;
        if let Some(staged) = staged
            && let Some(answer) = staged.outward.answers.front_mut()
            && answer.run.copy(0, va, out)
        {
            answer.at = va.wrapping_add(out.len() as u64);
            answer.run.drop_until((0, answer.at), cx.dma, |_| true);
            if answer.at == end {
                staged.outward.answers.pop_front();
            }
            return Ok(true);
        }
        if self.staged().outward.failed {
            return Err(Refusal::Operational);
        }
        self.feed_answers();
        Ok(false)
    }

    fn feed_answers(&mut self) {
        for i in 0..self.staged().outward.answers.len() {
            loop {
                let outward = &self.staged().outward;
                let held: u64 = outward.answers.iter().map(|a| a.run.bytes).sum();
                let answer = &outward.answers[i];
                let (rkey, next, left) = (
                    answer.rkey,
                    answer.next,
                    answer.end.wrapping_sub(answer.next),
                );
                if outward.failed || held >= BYTES || answer.run.is_full() {
                    return;
                }
                if left == 0 {
                    break;
                }
                let len = left.min(LARGE as u64);
                let found = self.find(End::Remote, rkey, next, len, Access::REMOTE_READ);
                let Ok(place @ Place::Device { .. }) = found else {
                    return;
                };
                let Some((cookie, got)) = self.fetch(place, len) else {
                    return;
                };
                let answer = &mut self.staged().outward.answers[i];
                answer.run.push(Fetched {
                    token: 0,
                    from: next,
                    len: got,
                    cookie,
                    buffer: None,
                });
                answer.next = next.wrapping_add(got);
            }
        }
    }

    /// Begins to fetch from `place`: the copy's number, and how many bytes it brings. `None`: not now.
    fn fetch(&mut self, place: Place, len: u64) -> Option<(u64, u64)> {
        let Place::Device { dma, .. } = &place else {
            return None;
        };
        let (buffer, got) = match self.cx.dma.buffer(dma, len.min(LARGE as u64)) {
            Ok(Some(buffer)) => buffer,
            Ok(None) => {
                self.staged().outward.hungry = true;
                return None;
            }
            Err(why) => {
                self.report(why);
                self.staged().outward.failed = true;
                return None;
            }
        };
        let to = Shared::from_ptr(buffer.ptr())?;
        let outward = &mut self.staged().outward;
        let cookie = outward.next_cookie;
        outward.next_cookie += 1;
        let pieces = Pieces::One(Piece {
            src: Source::Place(place),
            dst: Place::Host(to),
            len: got,
        });
        let job = Job {
            qp: lane(self.cx.slot, OUT),
            cookie,
            hold: self.cx.acknowledger.issued(),
            work: Work::Copy {
                pieces,
                signal: false,
            },
        };
        self.cx.dma.start_with(job, Some(buffer), Instant::now());
        Some((cookie, got))
    }
}
