//! What doorbell-gpu does not offer yet: freeing later, and words of registered memory.
//!
//! Stand-ins with the names and meaning that the GPU crate is to have; this file goes when it has them.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use doorbell_gpu::{Gpu, Registered};

use crate::Result;

pub(crate) trait Defer {
    fn defer(&self, f: impl FnOnce() + Send + 'static);
}

impl Defer for Gpu {
    fn defer(&self, f: impl FnOnce() + Send + 'static) {
        f();
    }
}

pub(crate) trait Bytes {
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()>;
    fn write(&self, offset: usize, from: &[u8]) -> Result<()>;
    fn fill(&self, value: u8) -> Result<()>;
}

fn at(memory: &Registered, offset: usize) -> &AtomicU8 {
    assert!(offset < memory.len());
    // SAFETY: inside registered memory, which is shared by atomics only.
    unsafe { AtomicU8::from_ptr(memory.host_ptr().as_ptr().add(offset)) }
}

impl Bytes for Registered {
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        for (i, b) in into.iter_mut().enumerate() {
            *b = at(self, offset + i).load(Relaxed);
        }
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        for (i, b) in from.iter().enumerate() {
            at(self, offset + i).store(*b, Relaxed);
        }
        Ok(())
    }

    fn fill(&self, value: u8) -> Result<()> {
        for i in 0..self.len() {
            at(self, i).store(value, Relaxed);
        }
        Ok(())
    }
}
