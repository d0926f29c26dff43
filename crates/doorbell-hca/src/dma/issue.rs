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
    staging::{LARGE, Pool},
    state::{Plan, Rest, Task, Turn},
    words::Words,
};

/// A piece that is one copy, or two one after the other, all by one engine.
enum Simple<'a> {
    Move { src: u64, dst: u64 },
    Fill { src: CpuSrc<'a>, dst: u64 },
    Bounce { src: u64, dst: u64 },
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
        Route::Bounce { dma, src, dst } if fits => (dma, Simple::Bounce { src, dst }),
        Route::Fill { dma, src, dst } if fits && matches!(src, CpuSrc::Inline(_)) => {
            (dma, Simple::Fill { src, dst })
        }
        _ => return None,
    })
}

impl DmaCore {
    /// Puts a simple piece into its batches if its turn has come: how many copies it is.
    pub(super) fn put_at_once(
        &mut self,
        qp: u32,
        id: JobId,
        piece: &Piece,
        signal: bool,
    ) -> Result<u32, NotNow> {
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
        let buffer = |pool: &mut Pool| match pool.take(&**dma, len) {
            Ok(Some((slot, _))) => Ok(slot),
            Ok(None) => Err(NotNow::Later),
            Err(_) => Err(NotNow::Otherwise),
        };
        let (number, ops) = match what {
            Simple::Move { src, dst } => {
                let number = pipe.batch(channel, &turn, 0).ok_or(NotNow::Later)?;
                channel.put(number, Op::new(id, DmaOp { dst, src, len }, Role::Move));
                (number, 1)
            }
            Simple::Fill { src, dst } => {
                let number = pipe.batch(channel, &turn, 0).ok_or(NotNow::Later)?;
                let slot = buffer(&mut channel.pool)?;
                // SAFETY: the source has `len` bytes; the buffer is ours and has room for them.
                unsafe { src.copy(0, slot.ptr(), len) };
                let copy = DmaOp {
                    dst,
                    src: slot.addr(),
                    len,
                };
                channel.put(number, Op::new(id, copy, Role::Out(slot)));
                self.counters.bounced += 1;
                (number, 1)
            }
            Simple::Bounce { src, dst } => {
                let least = if pipe.reads_written(from) {
                    pipe.after_all()
                } else {
                    0
                };
                let first = channel.room(least).ok_or(NotNow::Later)?;
                let number = pipe.batch(channel, &turn, first + 1);
                let number = number.ok_or(NotNow::Later)?;
                let slot = buffer(&mut channel.pool)?;
                let (gather, out) = (
                    DmaOp {
                        dst: slot.addr(),
                        src,
                        len,
                    },
                    DmaOp {
                        dst,
                        src: slot.addr(),
                        len,
                    },
                );
                channel.put(first, Op::new(id, gather, Role::Gather));
                channel.put(number, Op::new(id, out, Role::Out(slot)));
                self.counters.bounced += 1;
                (number, 2)
            }
        };
        pipe.put(number, &turn);
        (pipe.channel, pipe.steps) = (Some(index), false);
        Ok(ops)
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
            (Ok(ops), Some(state)) => {
                (state.ops, state.issued) = (ops, true);
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
        rest.earliest_read = if reads_written { pipe.after_all() } else { 0 };
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
                        Route::Straight { dma, .. } | Route::Bounce { dma, .. } => {
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
            earliest_read,
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
            let way = route(&piece.src, &piece.dst, piece.len);
            if let Route::Cpu { src, dst } = way {
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
            let (Route::Straight { dma, .. }
            | Route::Fill { dma, .. }
            | Route::Bounce { dma, .. }
            | Route::Land { dma, .. }
            | Route::Cross { from: dma, .. }) = way
            else {
                continue;
            };
            let index = self.channel(dma);
            let other = match way {
                Route::Cross { to, .. } => self.channel(to),
                _ => index,
            };
            let channel = &mut self.channels[index];
            if let Route::Straight { src, dst, .. } = way {
                let Some(number) = channel.room(*earliest) else {
                    return Ok(false);
                };
                let copy = DmaOp {
                    dst: dst + skipped,
                    src: src + skipped,
                    len: left,
                };
                self.put_op(id, index, number, copy, Role::Move);
                *last = number.max(*last);
                *offset += left;
                continue;
            }
            // The others go through a buffer. First what reads into it, then what comes out of it.
            let least = if matches!(way, Route::Bounce { .. }) {
                *earliest_read
            } else {
                *earliest
            };
            let Some(first) = channel.room(least) else {
                return Ok(false);
            };
            let Some(second) = channel.room((first + 1).max(*earliest)) else {
                return Ok(false);
            };
            let Some((slot, len)) = channel.pool.take(&**dma, left)? else {
                return Ok(false);
            };
            let inward = |src: u64| DmaOp {
                dst: slot.addr(),
                src: src + skipped,
                len,
            };
            let outward = |dst: u64| DmaOp {
                dst: dst + skipped,
                src: slot.addr(),
                len,
            };
            let number = match way {
                Route::Fill { src, dst, .. } => {
                    // SAFETY: the source has `left` bytes from `skipped` on; the buffer is ours and has `len`.
                    unsafe { src.copy(skipped, slot.ptr(), len) };
                    self.put_op(id, index, first, outward(dst), Role::Out(slot));
                    first
                }
                Route::Bounce { src, dst, .. } => {
                    self.put_op(id, index, first, inward(src), Role::Gather);
                    self.put_op(id, index, second, outward(dst), Role::Out(slot));
                    second
                }
                Route::Land { src, dst, .. } => {
                    // SAFETY: `skipped` bytes further on is still inside the job's range.
                    let dst = unsafe { dst.byte_add(skipped as usize) };
                    let copy = inward(src);
                    self.put_op(
                        id,
                        index,
                        first,
                        copy,
                        Role::Land(Box::new((slot, dst, len))),
                    );
                    first
                }
                Route::Cross { src, dst, .. } => {
                    let copy = inward(src);
                    let role = Role::Forward(Box::new((slot, other, dst + skipped, len)));
                    self.put_op(id, index, first, copy, role);
                    first
                }
                Route::Cpu { .. } | Route::Straight { .. } => first,
            };
            self.counters.bounced += 1;
            *last = number.max(*last);
            *offset += len;
        }
        Ok(true)
    }
}
