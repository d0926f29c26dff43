//! When a job may begin, and how its pieces become copies in batches.
//!
//! Most jobs are one piece that becomes one or two copies: they are put into their batches as they come
//! ([`DmaCore::put_at_once`]). What is larger, has several pieces or needs the CPU in between waits in line.

use std::{sync::Arc, time::Instant};

use super::{
    Dma, DmaOp,
    channel::{JobId, Op, Role},
    job::{DmaFailure, Piece, Pieces, Range},
    pipeline::DmaCore,
    route::{CpuDst, CpuSrc, Route, route},
    staging::{LARGE, Slot},
    state::{Plan, Rest, Task, Turn},
    words::Words,
};

/// A piece that is one copy.
enum Simple<'a> {
    Move { src: u64, dst: u64 },
    Fill { src: CpuSrc<'a>, dst: u64 },
}

/// Why a piece is not put into its batches as a simple one.
pub(super) enum NotNow {
    /// It will be, but its turn has not come: those before it, words, or the batches and buffers that are full.
    Later,
    /// It is another kind of job.
    Otherwise,
}

fn simple(piece: &Piece) -> Option<(&Arc<dyn Dma>, Simple<'_>)> {
    let fits = piece.len <= LARGE as u64;
    Some(match route(&piece.src, &piece.dst, piece.len) {
        Route::Straight { dma, src, dst } => (dma, Simple::Move { src, dst }),
        Route::Fill { dma, src, dst } if fits && matches!(src, CpuSrc::Inline(_)) => {
            (dma, Simple::Fill { src, dst })
        }
        _ => return None,
    })
}

impl DmaCore {
    /// Puts a simple piece into its batch if its turn has come.
    pub(super) fn put_at_once(
        &mut self,
        qp: u32,
        id: JobId,
        piece: &Piece,
        signal: bool,
    ) -> Result<(), NotNow> {
        let (dma, what) = (piece.len > 0)
            .then(|| simple(piece))
            .flatten()
            .ok_or(NotNow::Otherwise)?;
        let index = self.channel(dma);
        let (channel, pipe) = (&mut self.channels[index], &mut self.pipes[qp as usize]);
        if channel.stalled.is_some() || pipe.dead {
            return Err(NotNow::Otherwise);
        }
        if !pipe.streams(index, channel.ordered) {
            return Err(NotNow::Later);
        }
        let (from, to) = piece.ranges();
        let relaxed = self.config.order.relaxes(signal);
        let turn = Turn { from, to, relaxed };
        if pipe.waits_for_words(relaxed, |words| piece.touches(words)) {
            return Err(NotNow::Later);
        }
        let len = piece.len;
        let number = pipe.batch(channel, &turn).ok_or(NotNow::Later)?;
        let (copy, role) = match what {
            Simple::Move { src, dst } => (DmaOp { dst, src, len }, Role::Move),
            Simple::Fill { src, dst } => {
                let slot = match channel.pool.take(&**dma, len) {
                    Ok(Some((slot, _))) => slot,
                    Ok(None) => return Err(NotNow::Later),
                    Err(_) => return Err(NotNow::Otherwise),
                };
                // SAFETY: the source has `len` bytes; the buffer is ours and has room for them.
                unsafe { src.copy(0, slot.ptr(), len) };
                self.counters.bounced += 1;
                let src = slot.addr();
                (DmaOp { dst, src, len }, Role::Out(slot))
            }
        };
        channel.put(number, Op::new(id, copy, role));
        pipe.put(number, &turn);
        (pipe.channel, pipe.steps) = (Some(index), false);
        Ok(())
    }

    /// Starts and continues jobs of a QP as far as possible.
    pub(super) fn issue(&mut self, qp: u32, now: Instant) {
        loop {
            let pipe = &mut self.pipes[qp as usize];
            let next = pipe.jobs.get(pipe.started).filter(|_| !pipe.dead);
            let next = next.copied().filter(|&id| {
                let state = self.jobs[id as usize].as_ref();
                state.is_some_and(|state| state.failed.is_none())
            });
            let Some(id) = next else {
                pipe.listed = false;
                return;
            };
            match self.put(qp, id, now) {
                Ok(true) => {
                    self.pipes[qp as usize].started += 1;
                    self.advance(id);
                }
                Ok(false) => break,
                Err(failure) => self.fail(id, &failure),
            }
        }
        self.waiting.push_back(qp);
    }

    /// Puts a waiting job into batches; `false`: not all of it yet.
    fn put(&mut self, qp: u32, id: JobId, now: Instant) -> Result<bool, Arc<DmaFailure>> {
        let Some(mut rest) = self.jobs[id as usize]
            .as_mut()
            .and_then(|state| state.rest.take())
        else {
            return Ok(false);
        };
        if let Task::Word(word) = &rest.task {
            // It is carried out when it is the oldest.
            self.pipes[qp as usize].await_word(word.range());
            if let Some(state) = &mut self.jobs[id as usize] {
                state.rest = Some(rest);
            }
            return Ok(true);
        }
        // It may be simple, and have waited only for those before it.
        let at_once = match (rest.begun, &rest.task) {
            (
                false,
                Task::Copy {
                    pieces: Pieces::One(piece),
                    signal,
                    ..
                },
            ) => self.put_at_once(qp, id, piece, *signal),
            _ => Err(NotNow::Otherwise),
        };
        match (at_once, &mut self.jobs[id as usize]) {
            (Ok(()), Some(state)) => {
                (state.ops, state.issued) = (1, true);
                return Ok(true);
            }
            (Err(NotNow::Later), Some(state)) => {
                // It does not begin as anything else: that would cost it a batch of its own, and those behind it theirs.
                state.rest = Some(rest);
                return Ok(false);
            }
            _ => {}
        }
        let put = match self.begin(qp, &mut rest, now) {
            Ok(true) => self.put_pieces(id, &mut rest),
            other => other,
        };
        let pipe = &mut self.pipes[qp as usize];
        if rest.begun {
            let to = match &rest.task {
                Task::Copy {
                    pieces: Pieces::One(piece),
                    ..
                } => piece.ranges().1,
                _ => Range {
                    start: 0,
                    end: u64::MAX,
                },
            };
            pipe.put_all(rest.last, to);
        }
        if let Some(state) = &mut self.jobs[id as usize] {
            state.issued |= put == Ok(true);
            // An atomic goes on by itself, step by step.
            let kept = put == Ok(false) || matches!(rest.task, Task::Atomic(_));
            state.rest = kept.then_some(rest);
        }
        put
    }

    /// May the job begin (or go on)? If so, settles where it stands in the QP's order: after all before it.
    fn begin(&mut self, qp: u32, rest: &mut Rest, now: Instant) -> Result<bool, Arc<DmaFailure>> {
        if rest.begun {
            return Ok(true);
        }
        let plan = self.plan(rest);
        let pipe = &mut self.pipes[qp as usize];
        let channel = plan.channel.map(|c| &self.channels[c]);
        let behind = pipe.started > 0;
        let streams = match (plan.channel, channel) {
            (Some(index), Some(channel)) => pipe.streams(index, channel.ordered) && !plan.steps,
            _ => false,
        };
        let from = match &rest.task {
            Task::Copy {
                pieces: Pieces::One(piece),
                ..
            } => piece.ranges().0,
            _ => Range {
                start: 0,
                end: u64::MAX,
            },
        };
        let reads_written = pipe.reads_written(from);
        let relaxed = rest.task.is_relaxed(self.config.order);
        let waits = (plan.eager && reads_written)
            || pipe.waits_for_words(relaxed, |words| rest.task.touches(words));
        if behind && (!streams || waits) {
            return Ok(false);
        }
        if let Some(failure) = channel.and_then(|c| c.stalled.clone()) {
            return Err(failure);
        }
        if let Task::Atomic(atomic) = &mut rest.task {
            let foreign = atomic.dma.words();
            let words = foreign.as_ref().unwrap_or(Words::own());
            let Some(lock) = words.try_lock(atomic.addr) else {
                let waited = now.saturating_duration_since(rest.since);
                let addr = atomic.addr;
                return if waited >= self.config.stall {
                    Err(Arc::new(DmaFailure::Locked { addr, waited }))
                } else {
                    Ok(false)
                };
            };
            atomic.lock = Some(lock);
        }
        rest.earliest = pipe.after_all();
        rest.begun = true;
        (pipe.channel, pipe.steps) = (plan.channel, plan.steps);
        Ok(true)
    }

    fn plan(&mut self, rest: &mut Rest) -> Plan {
        if let Some(plan) = rest.plan {
            return plan;
        }
        let mut plan: Option<Plan> = None;
        let mut add = |channel: Option<usize>, steps: bool, eager: bool| {
            plan = Some(match plan {
                None => Plan {
                    channel,
                    steps,
                    eager,
                },
                Some(p) => Plan {
                    channel,
                    steps: steps || p.steps || p.channel != channel,
                    eager: eager || p.eager,
                },
            });
        };
        match &rest.task {
            Task::Atomic(atomic) => add(Some(self.channel(&atomic.dma)), true, false),
            // The pipe has those.
            Task::Word(_) => add(None, true, false),
            Task::Copy { pieces, .. } => {
                for piece in (0..).map_while(|i| pieces.get(i)) {
                    match route(&piece.src, &piece.dst, piece.len) {
                        Route::Cpu { .. } => add(None, true, false),
                        Route::Straight { dma, .. } => {
                            add(Some(self.channel(dma)), false, false);
                        }
                        Route::Fill { dma, src, .. } => {
                            let eager = matches!(src, CpuSrc::Host(_));
                            add(Some(self.channel(dma)), false, eager);
                        }
                        Route::Land { dma, .. } | Route::Cross { from: dma, .. } => {
                            add(Some(self.channel(dma)), true, false);
                        }
                    }
                }
            }
        }
        let plan = plan.unwrap_or(Plan {
            channel: None,
            steps: true,
            eager: false,
        });
        rest.plan = Some(plan);
        plan
    }

    /// Puts copies of a job into batches, as far as there is room. `true`: that was all.
    fn put_pieces(&mut self, id: JobId, rest: &mut Rest) -> Result<bool, Arc<DmaFailure>> {
        let put = match &rest.task {
            Task::Copy { .. } => self.put_copy(id, rest),
            Task::Atomic(_) => self.put_atomic(id, rest),
            Task::Word(_) => Ok(true),
        };
        put.map_err(|why| Arc::new(DmaFailure::Engine(why)))
    }

    /// Puts a copy of the job into a batch.
    pub(super) fn put_op(
        &mut self,
        id: JobId,
        channel: usize,
        number: u64,
        copy: DmaOp,
        role: Role,
    ) {
        self.channels[channel].put(number, Op::new(id, copy, role));
        if let Some(state) = &mut self.jobs[id as usize] {
            state.ops += 1;
        }
    }

    fn put_copy(&mut self, id: JobId, rest: &mut Rest) -> Result<bool, String> {
        let Rest {
            task,
            earliest,
            last,
            ..
        } = rest;
        let Task::Copy {
            pieces,
            piece: at,
            offset,
            ..
        } = task
        else {
            return Ok(true);
        };
        while let Some(piece) = pieces.get(*at) {
            let (skipped, left) = (*offset, piece.len - *offset);
            if left == 0 {
                (*at, *offset) = (*at + 1, 0);
                continue;
            }
            let next = match route(&piece.src, &piece.dst, piece.len) {
                Route::Cpu { src, dst } => {
                    // SAFETY: the job's ranges were checked and are valid until it is retired; jobs with a part for the CPU
                    // start when those before them have ended.
                    unsafe {
                        src.copy(0, dst.ptr(), piece.len);
                        dst.settle(piece.len);
                    }
                    self.counters.mapped += u64::from(matches!(dst, CpuDst::Mapped(_)));
                    *offset += left;
                    continue;
                }
                Route::Straight { dma, src, dst } => {
                    self.room(dma, *earliest).map(|(channel, number)| {
                        let (dst, src, len) = (dst + skipped, src + skipped, left);
                        (channel, number, DmaOp { dst, src, len }, Role::Move)
                    })
                }
                Route::Fill { dma, src, dst } => {
                    let staged = self.staged(dma, *earliest, left)?;
                    staged.map(|(channel, number, slot, len)| {
                        // SAFETY: the source has `left` bytes from `skipped` on; the buffer is ours and has `len`.
                        unsafe { src.copy(skipped, slot.ptr(), len) };
                        let (dst, src) = (dst + skipped, slot.addr());
                        (channel, number, DmaOp { dst, src, len }, Role::Out(slot))
                    })
                }
                Route::Land { dma, src, dst } => {
                    let staged = self.staged(dma, *earliest, left)?;
                    staged.map(|(channel, number, slot, len)| {
                        // SAFETY: `skipped` bytes further on is still inside the job's range.
                        let to = unsafe { dst.byte_add(skipped as usize) };
                        let (dst, src) = (slot.addr(), src + skipped);
                        let role = Role::Land(Box::new((slot, to, len)));
                        (channel, number, DmaOp { dst, src, len }, role)
                    })
                }
                Route::Cross { from, src, to, dst } => {
                    let other = self.channel(to);
                    let staged = self.staged(from, *earliest, left)?;
                    staged.map(|(channel, number, slot, len)| {
                        let at = slot.addr();
                        let role = Role::Forward(Box::new((slot, other, dst + skipped, len)));
                        let (dst, src) = (at, src + skipped);
                        (channel, number, DmaOp { dst, src, len }, role)
                    })
                }
            };
            let Some((channel, number, copy, role)) = next else {
                return Ok(false);
            };
            self.counters.bounced += u64::from(!matches!(role, Role::Move));
            self.put_op(id, channel, number, copy, role);
            *last = number.max(*last);
            *offset += copy.len;
        }
        Ok(true)
    }

    /// The channel of an engine, and its first batch from `earliest` on that has room.
    fn room(&mut self, dma: &Arc<dyn Dma>, earliest: u64) -> Option<(usize, u64)> {
        let channel = self.channel(dma);
        Some((channel, self.channels[channel].room(earliest)?))
    }

    /// As [`DmaCore::room`], with a buffer for as many of `len` bytes as it says. `None`: one or the other is full.
    fn staged(
        &mut self,
        dma: &Arc<dyn Dma>,
        earliest: u64,
        len: u64,
    ) -> Result<Option<(usize, u64, Slot, u64)>, String> {
        let Some((channel, number)) = self.room(dma, earliest) else {
            return Ok(None);
        };
        let taken = self.channels[channel].pool.take(&**dma, len)?;
        Ok(taken.map(|(slot, len)| (channel, number, slot, len)))
    }
}
