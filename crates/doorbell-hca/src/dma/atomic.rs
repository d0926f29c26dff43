//! Atomics on device memory: read the word into a buffer, change it, write it back, hand out the old value.
//!
//! The owner of the memory serialises them, among all its cores and its peers, by locks that are only ever tried (`words.rs`).

use std::sync::Arc;

use doorbell_wire::Width;

use super::{
    Dma, DmaOp,
    channel::{JobId, Op, Role},
    job::{DmaFailure, old_bytes, put_old},
    pipeline::DmaCore,
    route::{CpuDst, mapped},
    staging::Slot,
    state::{State, Task},
    words::WordLock,
};
use crate::mem::Place;

pub(super) struct Atomic {
    pub(super) addr: u64,
    pub(super) dma: Arc<dyn Dma>,
    pub(super) width: Width,
    pub(super) new: Option<Box<dyn FnOnce(u64) -> u64 + Send>>,
    pub(super) sink: Place,
    pub(super) old: u64,
    pub(super) lock: Option<WordLock>,
    /// The old value has been read, and written back changed.
    pub(super) written: bool,
}

impl DmaCore {
    /// The first half of an atomic: read the word.
    pub(super) fn put_atomic(&mut self, id: JobId, state: &mut State) -> Result<(), String> {
        let State {
            task: Task::Atomic(atomic),
            ops,
            last,
            issued,
            ..
        } = state
        else {
            return Ok(());
        };
        let bytes = u64::from(atomic.width.bytes());
        if let Some(word) = mapped(&atomic.dma, atomic.addr, bytes) {
            let Some(new) = atomic.new.take() else {
                return Ok(());
            };
            let dst = CpuDst::Mapped(word);
            // SAFETY: the mapping covers the word; the lock keeps other atomics of this process off it.
            unsafe {
                let mut old = [0u8; 8];
                crate::copy::copy(old.as_mut_ptr(), dst.ptr(), bytes as usize);
                atomic.old = u64::from_le_bytes(old);
                crate::copy::copy(
                    dst.ptr(),
                    new(atomic.old).to_le_bytes().as_ptr(),
                    bytes as usize,
                );
                dst.settle(bytes);
            }
            self.counters.mapped += 1;
            return self.sink(id, state);
        }
        let channel = self.channel(&atomic.dma);
        let channel = &mut self.channels[channel];
        let Some(number) = channel.room(0) else {
            return Ok(());
        };
        let Some((slot, _)) = channel.pool.take(&*atomic.dma, bytes)? else {
            return Ok(());
        };
        let copy = DmaOp {
            dst: slot.addr(),
            src: atomic.addr,
            len: bytes,
        };
        channel.put(
            number,
            Op {
                copy,
                job: id,
                role: Role::Modify(slot),
                skip: false,
            },
        );
        *ops += 1;
        *last = number;
        // What remains follows by itself.
        *issued = true;
        Ok(())
    }

    /// The old value of an atomic has been read: change it and write it back.
    pub(super) fn modify(&mut self, id: JobId, slot: Slot) {
        let Some(State {
            task: Task::Atomic(atomic),
            ..
        }) = &mut self.jobs[id as usize]
        else {
            return;
        };
        let bytes = u64::from(atomic.width.bytes());
        let mut value = [0u8; 8];
        // SAFETY: the buffer is ours and no copy uses it now.
        unsafe { crate::copy::copy(value.as_mut_ptr(), slot.ptr(), bytes as usize) };
        let old = u64::from_le_bytes(value);
        atomic.old = old;
        let Some(new) = atomic.new.take() else { return };
        let new = match atomic.width {
            Width::Eight => new(old),
            Width::Four => new(old) & 0xffff_ffff,
        };
        if new == old {
            // Nothing to write: whoever stores the word meanwhile is not overwritten.
            self.give(slot);
            return self.written(id);
        }
        let addr = atomic.addr;
        // SAFETY: as above.
        unsafe { crate::copy::copy(slot.ptr(), new.to_le_bytes().as_ptr(), bytes as usize) };
        let copy = DmaOp {
            dst: addr,
            src: slot.addr(),
            len: bytes,
        };
        self.put_last(
            slot.pool,
            Op {
                copy,
                job: id,
                role: Role::Out(slot),
                skip: false,
            },
        );
    }

    /// A copy out of a buffer has ended; for an atomic that is the word, and then the sink.
    pub(super) fn written(&mut self, id: JobId) {
        let Some(mut state) = self.jobs[id as usize].take() else {
            return;
        };
        let outcome = self.sink(id, &mut state);
        self.jobs[id as usize] = Some(state);
        if let Err(why) = outcome {
            self.fail(id, &Arc::new(DmaFailure::Engine(why)));
        }
    }

    /// Hands the old value of an atomic to its sink, once.
    pub(super) fn sink(&mut self, id: JobId, state: &mut State) -> Result<(), String> {
        let State {
            task: Task::Atomic(atomic),
            ops,
            issued,
            ..
        } = state
        else {
            return Ok(());
        };
        if std::mem::replace(&mut atomic.written, true) {
            return Ok(());
        }
        *issued = true;
        // The word is done; the sink is this QP's own.
        drop(atomic.lock.take());
        let bytes = u64::from(atomic.width.bytes());
        match &atomic.sink {
            Place::Host(at) => {
                // SAFETY: the sink was checked and is valid until the job is retired.
                unsafe { put_old(*at, atomic.width, atomic.old) };
            }
            Place::Device { addr, dma } => {
                let value = old_bytes(atomic.width, atomic.old);
                if let Some(ptr) = mapped(dma, *addr, bytes) {
                    // SAFETY: the mapping covers the sink.
                    unsafe {
                        crate::copy::copy(ptr.as_ptr(), value.as_ptr(), bytes as usize);
                        CpuDst::Mapped(ptr).settle(bytes);
                    }
                    return Ok(());
                }
                let index = self.channel(dma);
                let channel = &mut self.channels[index];
                let slot = channel.pool.take(&**dma, bytes)?;
                let (slot, _) =
                    slot.ok_or("no staging buffer is free for the result of an atomic")?;
                // SAFETY: the buffer is ours.
                unsafe { crate::copy::copy(slot.ptr(), value.as_ptr(), bytes as usize) };
                let copy = DmaOp {
                    dst: *addr,
                    src: slot.addr(),
                    len: bytes,
                };
                let number = channel.room_at_last();
                channel.put(
                    number,
                    Op {
                        copy,
                        job: id,
                        role: Role::Out(slot),
                        skip: false,
                    },
                );
                *ops += 1;
            }
        }
        Ok(())
    }
}
