//! When a job may begin, and how its pieces become copies in batches.

use std::{sync::Arc, time::Instant};

use super::{
    DmaOp,
    channel::{Channel, JobId, Op, Role},
    job::{DmaFailure, Pieces, Range},
    pipeline::{DmaCore, WriteOrder},
    route::{CpuDst, CpuSrc, Route, route},
    state::{Plan, State, Task},
    words::Words,
};

impl DmaCore {
    /// May the job begin (or go on)? If so, settles where it stands in the QP's order.
    pub(super) fn begin(&mut self, qp: u32, id: JobId, now: Instant) -> bool {
        let plan = self.plan(id);
        match self.try_begin(qp, id, plan, now) {
            Ok(begun) => begun,
            Err(failure) => {
                self.fail(id, &failure);
                false
            }
        }
    }

    pub(super) fn try_begin(
        &mut self,
        qp: u32,
        id: JobId,
        plan: Plan,
        now: Instant,
    ) -> Result<bool, Arc<DmaFailure>> {
        let (Some(state), Some(pipe)) = (&mut self.jobs[id as usize], self.pipes.get_mut(&qp))
        else {
            return Ok(false);
        };
        if state.started {
            return Ok(true);
        }
        let channel = plan.channel.map(|c| &self.channels[c]);
        let behind = pipe.started > 0;
        let streams = !plan.steps
            && !pipe.steps
            && plan.channel == pipe.channel
            && channel.is_some_and(|c| c.ordered);
        let (ranges, signal) = match &state.task {
            Task::Copy {
                pieces: Pieces::One(piece),
                signal,
                ..
            } => (Some(piece.ranges()), *signal),
            _ => (None, true),
        };
        // Does it read what a job before it is still writing?
        let reads_written = ranges.is_none_or(|(from, _)| !from.is_apart(pipe.written));
        if behind && (!streams || (plan.eager && reads_written)) {
            return Ok(false);
        }
        if let Some(failure) = channel.and_then(|c| c.stalled.clone()) {
            return Err(failure);
        }
        if let Task::Atomic(atomic) = &mut state.task {
            let foreign = atomic.dma.words();
            let Some(lock) = foreign
                .as_ref()
                .unwrap_or(Words::own())
                .try_lock(atomic.addr)
            else {
                let (addr, waited) = (atomic.addr, now.saturating_duration_since(state.since));
                let late = waited >= self.config.stall;
                return if late {
                    Err(Arc::new(DmaFailure::Locked { addr, waited }))
                } else {
                    Ok(false)
                };
            };
            atomic.lock = Some(lock);
        }
        let relaxed = self.config.order == WriteOrder::Relaxed && !signal && !pipe.signal;
        let free = relaxed
            && ranges.is_some_and(|(from, to)| from.is_apart(pipe.hull) && to.is_apart(pipe.hull));
        let writes = ranges.map_or(
            Range {
                start: 0,
                end: u64::MAX,
            },
            |(_, to)| to,
        );
        if behind {
            state.earliest = pipe.last + u64::from(!free);
            state.earliest_read = if reads_written { pipe.last + 1 } else { 0 };
            pipe.hull = if free { pipe.hull.hull(writes) } else { writes };
            pipe.written = pipe.written.hull(writes);
        } else {
            (pipe.hull, pipe.written) = (writes, writes);
            pipe.last = 0;
        }
        pipe.channel = plan.channel;
        pipe.steps = plan.steps;
        pipe.signal = signal;
        state.started = true;
        Ok(true)
    }

    pub(super) fn plan(&mut self, id: JobId) -> Plan {
        let nothing = Plan {
            channel: None,
            steps: true,
            eager: false,
        };
        let Some(state) = &mut self.jobs[id as usize] else {
            return nothing;
        };
        if let Some(plan) = state.plan {
            return plan;
        }
        // Taken out, so that channels can be made meanwhile.
        let Some(mut state) = self.jobs[id as usize].take() else {
            return nothing;
        };
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
        match &state.task {
            Task::Atomic(atomic) => add(Some(self.channel(&atomic.dma)), true, false),
            Task::Copy { pieces, .. } => {
                for piece in (0..).map_while(|i| pieces.get(i)) {
                    match route(&piece.src, &piece.dst, piece.len) {
                        Route::Cpu { .. } => add(None, true, false),
                        Route::Straight { dma, .. } | Route::Bounce { dma, .. } => {
                            add(Some(self.channel(dma)), false, false)
                        }
                        Route::Fill { dma, src, .. } => {
                            add(
                                Some(self.channel(dma)),
                                false,
                                matches!(src, CpuSrc::Host(_)),
                            );
                        }
                        Route::Land { dma, .. } | Route::Cross { from: dma, .. } => {
                            add(Some(self.channel(dma)), true, false)
                        }
                    }
                }
            }
        }
        let plan = plan.unwrap_or(nothing);
        state.plan = Some(plan);
        self.jobs[id as usize] = Some(state);
        plan
    }

    /// Puts copies of a job into batches, as far as there is room; sets `issued` when it was far enough.
    pub(super) fn put_pieces(&mut self, id: JobId) -> Result<(), Arc<DmaFailure>> {
        let Some(mut state) = self.jobs[id as usize].take() else {
            return Ok(());
        };
        let result = match &mut state.task {
            Task::Copy { .. } => self.put_copy(id, &mut state),
            Task::Atomic(_) => self.put_atomic(id, &mut state),
        };
        self.jobs[id as usize] = Some(state);
        result.map_err(|why| Arc::new(DmaFailure::Engine(why)))
    }

    pub(super) fn put_copy(&mut self, id: JobId, state: &mut State) -> Result<(), String> {
        let State {
            task:
                Task::Copy {
                    pieces,
                    piece: at,
                    offset,
                    ..
                },
            earliest,
            earliest_read,
            last,
            ops,
            issued,
            ..
        } = state
        else {
            return Ok(());
        };
        let mut put =
            |channel: &mut Channel, number: u64, copy: DmaOp, role: Role, ops: &mut u32| {
                *ops += 1;
                *last = number.max(*last);
                channel.put(
                    number,
                    Op {
                        copy,
                        job: id,
                        role,
                        skip: false,
                    },
                );
            };
        while let Some(piece) = pieces.get(*at) {
            let (skipped, left) = (*offset, piece.len - *offset);
            if left == 0 {
                (*at, *offset) = (*at + 1, 0);
                continue;
            }
            let moved = match route(&piece.src, &piece.dst, piece.len) {
                Route::Cpu { src, dst } => {
                    // SAFETY: the job's ranges were checked and are valid until it is retired; jobs with a part for the CPU
                    // start when those before them have ended.
                    unsafe {
                        src.copy(0, dst.ptr(), piece.len);
                        dst.settle(piece.len);
                    }
                    self.counters.mapped += u64::from(matches!(dst, CpuDst::Mapped(_)));
                    piece.len
                }
                Route::Straight { dma, src, dst } => {
                    let channel = self.channel(dma);
                    let channel = &mut self.channels[channel];
                    let Some(number) = channel.room(*earliest) else {
                        return Ok(());
                    };
                    put(
                        channel,
                        number,
                        DmaOp {
                            dst,
                            src,
                            len: left,
                        },
                        Role::Move,
                        ops,
                    );
                    left
                }
                Route::Fill { dma, src, dst } => {
                    let channel = self.channel(dma);
                    let channel = &mut self.channels[channel];
                    let Some(number) = channel.room(*earliest) else {
                        return Ok(());
                    };
                    let Some((slot, len)) = channel.pool.take(&**dma, left)? else {
                        return Ok(());
                    };
                    // SAFETY: the source has `left` bytes from `skipped` on; the buffer is ours and has `len`.
                    unsafe { src.copy(skipped, slot.ptr(), len) };
                    let copy = DmaOp {
                        dst: dst + skipped,
                        src: slot.addr(),
                        len,
                    };
                    put(channel, number, copy, Role::Out(slot), ops);
                    self.counters.bounced += 1;
                    len
                }
                Route::Bounce { dma, src, dst } => {
                    let channel = self.channel(dma);
                    let channel = &mut self.channels[channel];
                    let rooms = channel
                        .room(*earliest_read)
                        .and_then(|first| Some((first, channel.room((first + 1).max(*earliest))?)));
                    let Some((first, second)) = rooms else {
                        return Ok(());
                    };
                    let Some((slot, len)) = channel.pool.take(&**dma, left)? else {
                        return Ok(());
                    };
                    let gather = DmaOp {
                        dst: slot.addr(),
                        src: src + skipped,
                        len,
                    };
                    let out = DmaOp {
                        dst: dst + skipped,
                        src: slot.addr(),
                        len,
                    };
                    put(channel, first, gather, Role::Gather, ops);
                    put(channel, second, out, Role::Out(slot), ops);
                    self.counters.bounced += 1;
                    len
                }
                Route::Cross { from, src, to, dst } => {
                    let (from_index, to) = (self.channel(from), self.channel(to));
                    let channel = &mut self.channels[from_index];
                    let Some(number) = channel.room(*earliest) else {
                        return Ok(());
                    };
                    let Some((slot, len)) = channel.pool.take(&**from, left)? else {
                        return Ok(());
                    };
                    let copy = DmaOp {
                        dst: slot.addr(),
                        src: src + skipped,
                        len,
                    };
                    put(
                        channel,
                        number,
                        copy,
                        Role::Forward(slot, to, dst + skipped, len),
                        ops,
                    );
                    self.counters.bounced += 1;
                    len
                }
                Route::Land { dma, src, dst } => {
                    let channel = self.channel(dma);
                    let channel = &mut self.channels[channel];
                    let Some(number) = channel.room(*earliest) else {
                        return Ok(());
                    };
                    let Some((slot, len)) = channel.pool.take(&**dma, left)? else {
                        return Ok(());
                    };
                    let copy = DmaOp {
                        dst: slot.addr(),
                        src: src + skipped,
                        len,
                    };
                    // SAFETY: `skipped` bytes further on is still inside the job's range.
                    let dst = unsafe { dst.byte_add(skipped as usize) };
                    put(channel, number, copy, Role::Land(slot, dst, len), ops);
                    self.counters.bounced += 1;
                    len
                }
            };
            *offset += moved;
        }
        *issued = true;
        Ok(())
    }
}
