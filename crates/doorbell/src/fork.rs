//! What must not be dropped in a forked child.
//!
//! Threads do not survive a fork, so whoever joins one, or waits for its answer, waits for ever; and sockets and shared
//! mappings are the parent's as much as the child's. A [`Here`] drops its value only in the process that made it.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use doorbell_gpu::Gpu;

/// A value of the process that opened `gpu`.
pub(crate) struct Here<T> {
    value: ManuallyDrop<T>,
    gpu: Gpu,
}

impl<T> Here<T> {
    pub(crate) fn new(gpu: &Gpu, value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            gpu: gpu.clone(),
        }
    }

    /// Is this the process that made it?
    pub(crate) fn is_here(&self) -> bool {
        self.gpu.is_this_process()
    }

    /// The value, in the process that made it.
    pub(crate) fn take(self) -> crate::Result<T> {
        self.gpu.check_process()?;
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the value is taken once and the GPU dropped once.
        let (value, gpu) = unsafe {
            (
                ManuallyDrop::take(&mut this.value),
                std::ptr::read(&this.gpu),
            )
        };
        drop(gpu);
        Ok(value)
    }
}

impl<T> Deref for Here<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Here<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Here<T> {
    fn drop(&mut self) {
        if self.gpu.is_this_process() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
