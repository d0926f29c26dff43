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
    state::{Rest, Task},
    words::WordLock,
};
use crate::mem::Place;

pub(super) struct Atomic {
    pub(super) addr: u64,
    pub(super) dma: Arc<dyn Dma>,
    pub(super) width: Width,
    pub(super) new: Option<Box<dyn FnOnce(u64) -> u64 + Send>>,
    pub(super) sink: Option<Place>,
    pub(super) old: u64,
    pub(super) lock: Option<WordLock>,
    /// The old value has been read, and written back changed.
    pub(super) written: bool,
}

impl DmaCore {
    /// The first half of an atomic: read the word. `false`: no room yet.
    pub(super) fn put_atomic(&mut self, id: JobId, rest: &mut Rest) -> Result<bool, String> {
        let Task::Atomic(atomic) = &mut rest.task else {
            return Ok(true);
        };
        let bytes = u64::from(atomic.width.bytes());
        if let Some(word) = mapped(&atomic.dma, atomic.addr, bytes) {
            let Some(new) = atomic.new.take() else {
                return Ok(true);
            };
            let dst = CpuDst::Mapped(word);
            // SAFETY: the mapping covers the word; the lock keeps other atomics off it.
            unsafe {
                atomic.old = load(dst.ptr(), atomic.width);
                store(dst.ptr(), atomic.width, new(atomic.old));
                dst.settle(bytes);
            }
            self.counters.mapped += 1;
            return self.sink(id, rest).map(|()| true);
        }
        let index = self.channel(&atomic.dma);
        let channel = &mut self.channels[index];
        let Some(number) = channel.room(0) else {
            return Ok(false);
        };
        let Some((slot, _)) = channel.pool.take(&*atomic.dma, bytes)? else {
            return Ok(false);
        };
        let copy = DmaOp {
            dst: slot.addr(),
            src: atomic.addr,
            len: bytes,
        };
        self.put_op(id, index, number, copy, Role::Modify(slot));
        rest.last = number;
        // What remains follows by itself.
        Ok(true)
    }

    fn rest_of(&mut self, id: JobId) -> Option<Box<Rest>> {
        self.jobs[id as usize].as_mut()?.rest.take()
    }

    fn put_back(&mut self, id: JobId, rest: Box<Rest>) {
        if let Some(state) = &mut self.jobs[id as usize] {
            state.rest = Some(rest);
        }
    }

    /// The old value of an atomic has been read: change it and write it back.
    pub(super) fn modify(&mut self, id: JobId, slot: Slot) {
        let Some(mut rest) = self.rest_of(id) else {
            return self.give(slot);
        };
        if let Task::Atomic(atomic) = &mut rest.task
            && let Some(new) = atomic.new.take()
        {
            // SAFETY: the buffer is ours and no copy uses it now.
            let old = unsafe { load(slot.ptr(), atomic.width) };
            atomic.old = old;
            let new = match atomic.width {
                Width::Eight => new(old),
                Width::Four => new(old) & 0xffff_ffff,
            };
            if new == old {
                // Nothing to write: whoever stores the word meanwhile is not overwritten.
                self.give(slot);
                self.put_back(id, rest);
                return self.written(id);
            }
            // SAFETY: as above.
            unsafe { store(slot.ptr(), atomic.width, new) };
            let copy = DmaOp {
                dst: atomic.addr,
                src: slot.addr(),
                len: u64::from(atomic.width.bytes()),
            };
            self.put_back(id, rest);
            let pool = slot.pool();
            self.put_last(pool, Op::new(id, copy, Role::Out(slot)));
        }
    }

    /// A copy out of a buffer has ended; for an atomic that is the word, and then the sink.
    pub(super) fn written(&mut self, id: JobId) {
        let Some(mut rest) = self.rest_of(id) else {
            return;
        };
        let outcome = self.sink(id, &mut rest);
        self.put_back(id, rest);
        if let Err(why) = outcome {
            self.fail(id, &Arc::new(DmaFailure::Engine(why)));
        }
    }

    /// Hands the old value of an atomic to its sink, once.
    fn sink(&mut self, id: JobId, rest: &mut Rest) -> Result<(), String> {
        let Task::Atomic(atomic) = &mut rest.task else {
            return Ok(());
        };
        if std::mem::replace(&mut atomic.written, true) {
            return Ok(());
        }
        // The word is done; the sink is this QP's own.
        drop(atomic.lock.take());
        let bytes = u64::from(atomic.width.bytes());
        if let Some(state) = &mut self.jobs[id as usize] {
            state.old = atomic.old;
        }
        let Some(sink) = &atomic.sink else {
            return Ok(());
        };
        match sink {
            Place::Host(at) => {
                // SAFETY: the sink was checked and is valid until the job is retired.
                unsafe { put_old(*at, atomic.width, atomic.old) };
            }
            Place::Device { addr, dma } => {
                let value = old_bytes(atomic.width, atomic.old);
                let value = &value[..bytes as usize];
                if let Some(ptr) = mapped(dma, *addr, bytes) {
                    // SAFETY: the mapping covers the sink.
                    unsafe {
                        crate::copy::write(ptr.as_ptr(), value);
                        CpuDst::Mapped(ptr).settle(bytes);
                    }
                    return Ok(());
                }
                let index = self.channel(dma);
                let channel = &mut self.channels[index];
                let slot = channel.pool.take(&**dma, bytes)?;
                let (slot, _) =
                    slot.ok_or("no staging buffer is free for the result of an atomic")?;
                // SAFETY: the buffer is ours and has room for a word.
                unsafe { crate::copy::write(slot.ptr(), value) };
                let copy = DmaOp {
                    dst: *addr,
                    src: slot.addr(),
                    len: bytes,
                };
                let number = channel.room_at_last();
                self.put_op(id, index, number, copy, Role::Out(slot));
            }
        }
        Ok(())
    }
}

/// The word at `at`.
///
/// # Safety
/// `at` is valid for reading the width's bytes, which belong to shared memory.
unsafe fn load(at: *const u8, width: Width) -> u64 {
    // SAFETY: the caller's promise; targets of atomics and buffers are aligned to the word.
    unsafe {
        match width {
            Width::Eight => crate::copy::load8(at),
            Width::Four => u64::from(at.cast::<u32>().read_volatile().to_le()),
        }
    }
}

/// Stores the word at `at`.
///
/// # Safety
/// `at` is valid for writing the width's bytes.
unsafe fn store(at: *mut u8, width: Width, value: u64) {
    let bytes = value.to_le_bytes();
    // SAFETY: the caller's promise.
    unsafe { crate::copy::write(at, &bytes[..width.bytes() as usize]) };
}
