//! Staging buffers of one copy engine: small ones for signals and inline data, large ones for bounced payloads.
//!
//! Made when first needed (pinning is slow), handed out by number, taken back when the copy that used them has ended.

use super::{Dma, Staging};

/// Bytes and number of the buffers of each class: words and inline payloads (at most 1,008 bytes), messages, pieces of bulk.
#[cfg(not(miri))]
const CLASSES: [(usize, usize); 3] = [(1 << 10, 2048), (16 << 10, 256), (LARGE, 32)];

/// An interpreter has no time for many.
#[cfg(miri)]
const CLASSES: [(usize, usize); 3] = [(1 << 10, 16), (2 << 10, 4), (LARGE, 2)];

/// Bytes of the largest buffer.
pub(crate) const LARGE: usize = if cfg!(miri) { 4 << 10 } else { 256 << 10 };

/// A buffer that is in use.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot {
    addr: usize,
    /// The channel whose pool it belongs to.
    pool: u16,
    /// Of the buffers that are handed out of the pipeline.
    lent: bool,
    class: u8,
    index: u32,
}

impl Slot {
    /// The channel whose pool it belongs to.
    pub(super) fn pool(&self) -> usize {
        usize::from(self.pool)
    }

    /// Does it belong to the pool of those that are handed out of the pipeline?
    pub(super) fn is_lent(&self) -> bool {
        self.lent
    }

    /// Its address, for the CPU and for the copy engine.
    pub(super) fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Its first byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr)
    }
}

struct Class {
    size: usize,
    count: usize,
    memory: Option<Staging>,
    free: Vec<u32>,
}

impl Class {
    fn new(size: usize, count: usize) -> Self {
        Self {
            size,
            count,
            memory: None,
            free: Vec::new(),
        }
    }
}

/// The buffers of one copy engine for one core.
pub(super) struct Pool {
    me: u16,
    lent: bool,
    classes: [Class; CLASSES.len()],
}

impl Pool {
    /// The pool of channel `me`. `lent`: of buffers that are handed out of the pipeline, so that those who keep one do not hold up copies.
    pub(super) fn new(me: usize, lent: bool) -> Self {
        Self {
            me: me as u16,
            lent,
            classes: CLASSES.map(|(size, count)| Class::new(size, count)),
        }
    }

    /// A buffer for `len` bytes, or for as many as the largest has. `None`: all are in use.
    ///
    /// # Errors
    /// What the copy engine says when it cannot make them.
    pub(super) fn take(&mut self, dma: &dyn Dma, len: u64) -> Result<Option<(Slot, u64)>, String> {
        let fits = CLASSES.iter().position(|&(size, _)| len <= size as u64);
        let class = fits.unwrap_or(CLASSES.len() - 1);
        let c = &mut self.classes[class];
        let memory = match &mut c.memory {
            Some(memory) => memory,
            none => {
                let memory = dma.staging(c.size * c.count)?;
                if memory.len < c.size * c.count {
                    return Err(format!(
                        "{memory:?}, {} bytes were asked for",
                        c.size * c.count
                    ));
                }
                c.free = (0..c.count as u32).rev().collect();
                none.insert(memory)
            }
        };
        let base = memory.ptr.as_ptr().expose_provenance();
        Ok(c.free.pop().map(|index| {
            let slot = Slot {
                addr: base + index as usize * c.size,
                pool: self.me,
                lent: self.lent,
                class: class as u8,
                index,
            };
            (slot, len.min(c.size as u64))
        }))
    }

    pub(super) fn give(&mut self, slot: Slot) {
        self.classes[usize::from(slot.class)].free.push(slot.index);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::mock::{Mock, MockMemory},
        *,
    };

    #[test]
    fn buffers_are_distinct_and_come_back() {
        let memory = MockMemory::new(64);
        let dma = Mock::new(&memory, 1);
        let mut pool = Pool::new(0, false);
        let mut taken = Vec::new();
        while let Some((slot, len)) = pool.take(&*dma, 8).unwrap() {
            assert_eq!(len, 8);
            taken.push(slot);
        }
        assert_eq!(taken.len(), CLASSES[0].1);
        let mut addrs: Vec<u64> = taken.iter().map(Slot::addr).collect();
        addrs.sort_unstable();
        assert!(
            addrs
                .windows(2)
                .all(|w| (w[1] - w[0]) as usize >= CLASSES[0].0)
        );
        let (large, len) = pool.take(&*dma, 1 << 30).unwrap().unwrap();
        assert_eq!(len, LARGE as u64);
        pool.give(large);
        pool.give(taken.pop().unwrap());
        assert!(pool.take(&*dma, CLASSES[0].0 as u64).unwrap().is_some());
        assert!(pool.take(&*dma, 1).unwrap().is_none());
    }
}
