//! The queue memory of a queue pair, for those who look at it from the host: a debugger, `doorbell explain`.
//!
//! Copies only, taken without stopping anybody: while a kernel posts, a slot may be half written.

use super::QpCore;
use crate::{Error, Result};

impl QpCore {
    /// A copy of slot `index` of the send ring (64 bytes), modulo its depth.
    pub fn peek_wqe(&self, index: u64) -> Result<[u8; 64]> {
        let mut slot = [0; 64];
        let at = (index % u64::from(self.depth())) as usize * slot.len();
        self.inner.queue.ring.read(at, &mut slot)?;
        Ok(slot)
    }

    /// The bytes of the doorbell record as they lie in memory: the producer index modulo 2^16, big-endian.
    pub fn peek_record(&self) -> Result<[u8; 4]> {
        self.inner.queue.read_record()
    }

    /// The bytes of the doorbell word (or, with [`Handler::Producer`](super::Handler::Producer), of the producer word) as they
    /// lie in memory.
    pub fn peek_doorbell(&self) -> Result<[u8; 8]> {
        match self.inner.provider.peek_doorbell() {
            Some(word) => Ok(word.to_ne_bytes()),
            None => Err(Error::Unsupported {
                what: "reading back a doorbell",
                remedy: "a device's doorbell page is write-only; look at the record",
            }),
        }
    }
}
