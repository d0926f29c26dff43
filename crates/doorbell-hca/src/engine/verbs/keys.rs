//! Local keys as the device knows them: ours are checked here, and its own go into requests.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use doorbell_verbs::abi;
use doorbell_wire::{Local, Payload, Piece};

use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::{Access, End};
use crate::verbs::{INLINE, VerbsPort};

/// Keys kept at a time. The lowest bits of a key number its region, so the regions that a program registers one after the other do not meet.
const KEPT: usize = 8;

/// A key that was looked up.
#[derive(Clone, Copy, Debug)]
struct Known {
    key: u32,
    access: Access,
    base: u64,
    /// 0 where nothing is kept.
    len: u64,
    device_base: u64,
    lkey: u32,
}

impl Known {
    const NOTHING: Self = Self {
        key: 0,
        access: Access::NONE,
        base: 0,
        len: 0,
        device_base: 0,
        lkey: 0,
    };

    /// A piece as the device knows it, if it lies inside the bounds.
    #[inline(always)]
    fn piece(&self, addr: u64, length: u32) -> Option<abi::Sge> {
        let (offset, len) = (addr.wrapping_sub(self.base), u64::from(length));
        (len <= self.len && offset <= self.len - len).then(|| abi::Sge {
            addr: self.device_base.wrapping_add(offset),
            length,
            lkey: self.lkey,
        })
    }
}

/// The local keys of a queue pair: those used last, and where others are looked up.
#[derive(Debug)]
pub(super) struct LocalKeys {
    port: Arc<VerbsPort>,
    pd: u32,
    known: [Known; KEPT],
    /// The key table's epoch when they were looked up.
    epoch: u64,
}

impl LocalKeys {
    /// Those of a queue pair of this protection domain, over this port.
    pub(super) fn new(port: &Arc<VerbsPort>, pd: u32) -> Self {
        Self {
            port: Arc::clone(port),
            pd,
            known: [Known::NOTHING; KEPT],
            epoch: 0,
        }
    }

    /// Forgets what is known if any region has gone since. To be called before keys are used, once for those used together.
    #[inline]
    pub(super) fn refresh(&mut self, inner: &Inner) {
        let epoch = inner.regions.view().epoch().load(Ordering::Acquire);
        if self.epoch != epoch {
            (self.epoch, self.known) = (epoch, [Known::NOTHING; KEPT]);
        }
    }

    /// A piece of memory whose key is known, with the rights and inside the bounds. `None`: [`Self::piece`] says why not.
    #[inline(always)]
    pub(super) fn find(&self, key: u32, addr: u64, length: u32, need: Access) -> Option<abi::Sge> {
        let known = &self.known[key as usize % KEPT];
        // An empty place has no bytes, and a piece has some.
        if known.key != key || !known.access.contains(need) || length == 0 {
            return None;
        }
        known.piece(addr, length)
    }

    /// A local piece as the device knows it, checked. Its region is registered with the device if it was not.
    #[inline]
    pub(super) fn piece(
        &mut self,
        inner: &Inner,
        local: &Local,
        need: Access,
    ) -> Result<abi::Sge, Fault> {
        match self.find(local.key.0, local.addr, local.len, need) {
            Some(piece) => Ok(piece),
            None => self.learn(inner, local, need),
        }
    }

    #[cold]
    fn learn(&mut self, inner: &Inner, local: &Local, need: Access) -> Result<abi::Sge, Fault> {
        let (key, port) = (local.key.0, &self.port);
        // SAFETY: this is an engine in a round; the region is not used beyond this call.
        let region = unsafe { inner.regions.region(End::Local, key, self.pd, need) }?;
        let keys = port.keys(region).map_err(|e| {
            tracing::error!("a region of {} bytes: {e}", region.memory.len());
            port.tell_refusal(inner, e.to_string());
            if e.is_gone() {
                port.set_gone();
                return Fault::PortDown;
            }
            Fault::Unsupported
        })?;
        let known = Known {
            key,
            access: region.access,
            base: region.base,
            len: region.memory.len() as u64,
            device_base: keys.base,
            lkey: keys.lkey,
        };
        self.known[key as usize % KEPT] = known;
        known.piece(local.addr, local.len).ok_or(Fault::LkeyRange)
    }

    /// All pieces of a payload as the device knows them, in `out`. Inline ones go by way of `place`, of [`INLINE`] bytes; returns how many bytes are there.
    ///
    /// # Safety
    /// Nothing else uses the place.
    pub(super) unsafe fn gather(
        &mut self,
        inner: &Inner,
        payload: Payload<'_>,
        need: Access,
        place: Option<(*mut u8, abi::Sge)>,
        out: &mut Vec<abi::Sge>,
    ) -> Result<usize, Fault> {
        out.clear();
        let mut copied = 0;
        for piece in payload.pieces() {
            match piece {
                // A piece of no bytes opens no key.
                Piece::Local(local) if local.len == 0 => {}
                Piece::Local(local) => out.push(self.piece(inner, &local, need)?),
                Piece::Inline(inline) if inline.is_empty() => {}
                Piece::Inline(inline) => {
                    let len = inline.len();
                    let (to, sge) = place
                        .filter(|_| copied + len <= INLINE)
                        .ok_or(Fault::BadInline)?;
                    for (i, byte) in inline.bytes().enumerate() {
                        // SAFETY: inside the place, which the caller may write.
                        unsafe { to.add(copied + i).write(byte) };
                    }
                    out.push(abi::Sge {
                        addr: sge.addr + copied as u64,
                        length: len as u32,
                        ..sge
                    });
                    copied += len;
                }
            }
        }
        Ok(copied)
    }
}
