//! Local keys as the device knows them: ours are checked here, and its own go into requests.

use core::sync::atomic::Ordering;

use doorbell_verbs::abi;
use doorbell_wire::Local;

use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::{Access, End};
use crate::verbs::VerbsPort;

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

/// The keys used last.
#[derive(Debug)]
pub(in crate::engine) struct LocalKeys {
    known: [Known; KEPT],
    /// The key table's epoch when they were looked up.
    epoch: u64,
}

impl Default for LocalKeys {
    fn default() -> Self {
        let nothing = Known {
            key: 0,
            access: Access::NONE,
            base: 0,
            len: 0,
            device_base: 0,
            lkey: 0,
        };
        Self {
            known: [nothing; KEPT],
            epoch: 0,
        }
    }
}

impl LocalKeys {
    /// Forgets what is known if any region has gone since. To be called before keys are used, once for those used together.
    #[inline]
    pub(in crate::engine) fn refresh(&mut self, inner: &Inner) {
        let epoch = inner.regions.view().epoch().load(Ordering::Acquire);
        if self.epoch != epoch {
            *self = Self {
                epoch,
                ..Self::default()
            };
        }
    }

    /// A piece of memory whose key is known, with the rights and inside the bounds. `None`: [`Self::piece`] says why not.
    #[inline(always)]
    pub(in crate::engine) fn find(
        &self,
        key: u32,
        addr: u64,
        length: u32,
        need: Access,
    ) -> Option<abi::Sge> {
        let known = &self.known[key as usize % KEPT];
        let (offset, len) = (addr.wrapping_sub(known.base), u64::from(length));
        let fits = known.key == key
            && known.access.contains(need)
            && len <= known.len
            && offset <= known.len - len;
        // An empty place has no bytes, and a piece has some.
        (fits && length != 0).then(|| abi::Sge {
            addr: known.device_base.wrapping_add(offset),
            length,
            lkey: known.lkey,
        })
    }

    /// A local piece as the device knows it, checked. Its region is registered with the device if it was not.
    #[inline]
    pub(in crate::engine) fn piece(
        &mut self,
        inner: &Inner,
        port: &VerbsPort,
        pd: u32,
        local: &Local,
        need: Access,
    ) -> Result<abi::Sge, Fault> {
        match self.find(local.key.0, local.addr, local.len, need) {
            Some(piece) => Ok(piece),
            None => self.learn(inner, port, pd, local, need),
        }
    }

    #[cold]
    fn learn(
        &mut self,
        inner: &Inner,
        port: &VerbsPort,
        pd: u32,
        local: &Local,
        need: Access,
    ) -> Result<abi::Sge, Fault> {
        let key = local.key.0;
        // SAFETY: this is an engine in a round; the region is not used beyond this call.
        let region = unsafe { inner.regions.region(End::Local, key, pd, need) }?;
        let keys = port.keys(region).map_err(|e| {
            tracing::error!("a region of {} bytes: {e}", region.memory.len());
            inner.events.push(crate::Event::DeviceRefused {
                device: port.config().to_string(),
                reason: e.to_string(),
            });
            if e.is_gone() {
                port.set_gone();
                return Fault::PortDown;
            }
            Fault::Unsupported
        })?;
        let (base, len) = (region.base, region.memory.len() as u64);
        self.known[key as usize % KEPT] = Known {
            key,
            access: region.access,
            base,
            len,
            device_base: keys.base,
            lkey: keys.lkey,
        };
        let (offset, wanted) = (local.addr.wrapping_sub(base), u64::from(local.len));
        if wanted > len || offset > len - wanted {
            return Err(Fault::LkeyRange);
        }
        Ok(abi::Sge {
            addr: keys.base.wrapping_add(offset),
            length: local.len,
            lkey: keys.lkey,
        })
    }
}
