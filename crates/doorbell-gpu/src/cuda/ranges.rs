//! Which memory an address is in, and whether kernels reach it, remembered.
//!
//! The copier must know, since a copy of the driver's within one GPU never ends behind a kernel that fills it. The driver's answer costs
//! more than the copy's share of a batch, so it is asked once an allocation.
//!
//! What the copy engine reaches a kernel may not: the driver copies between any two addresses it knows, while a load or store of memory that is
//! not mapped for the GPU ends the context of its owner with everything in it. So [`Ranges::reached`] says yes only of what is known: memory that
//! was allocated in the context itself (another context of the same GPU has page tables of its own), mappings and pools that the driver says the GPU may
//! use, what was opened for this GPU, and host memory that it has at the same address.

use std::ffi::{c_int, c_uint, c_void};

use super::context::Current;
use super::memory;
use super::types::*;
use crate::{GpuError, Result};

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Page-locked host memory.
    Host,
    /// Memory of the GPU with this ordinal.
    Device(c_int),
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
    place: Place,
    /// Kernels of this GPU are known to reach it.
    reached: bool,
    /// It is a mapping, of what `cuMemCreate` made: others may lie beside it.
    mapped: bool,
}

/// Allocations met so far, or mappings, sorted by address, not overlapping.
#[derive(Default)]
pub(crate) struct Ranges {
    known: Vec<Range>,
    /// What was opened for this GPU, by another process's handle: start and end.
    opened: Vec<(u64, u64)>,
}

/// Beyond this many, start over: someone copies to and from ever new memory.
const MOST: usize = 4096;

impl Ranges {
    /// Forgets everything, because memory was freed or unregistered.
    pub(crate) fn clear(&mut self) {
        self.known.clear();
    }

    /// Memory of another process was opened for this GPU.
    pub(crate) fn opened(&mut self, start: u64, len: u64) {
        self.opened.push((start, start.saturating_add(len)));
    }

    /// It is closed.
    pub(crate) fn closed(&mut self, start: u64) {
        self.opened.retain(|&(s, _)| s != start);
    }

    /// As much memory around a range as is known to be reached by kernels of the context's GPU: start and end. The range has a [`Ranges::place`].
    pub(crate) fn reached(
        &mut self,
        current: &Current<'_>,
        addr: u64,
        len: u64,
    ) -> Option<(u64, u64)> {
        let end = addr.checked_add(len)?;
        let mut opened = self.opened.iter().copied();
        if let Some(opened) = opened.find(|&(s, e)| s <= addr && end <= e) {
            return Some(opened);
        }
        let first = self.around(current, addr).ok()?;
        let mut last = first;
        while last.reached {
            if end <= last.end {
                return Some((first.start, last.end));
            }
            last = self.around(current, last.end).ok()?;
        }
        None
    }

    /// The place of a whole range, and start and end of what it lies in: an allocation, or mappings side by side that are in one place. An error
    /// otherwise.
    #[inline]
    pub(crate) fn place(
        &mut self,
        current: &Current<'_>,
        addr: u64,
        len: u64,
    ) -> Result<(Place, u64, u64)> {
        let unknown = || GpuError::UnknownMemory { addr, len };
        let end = addr.checked_add(len).ok_or_else(unknown)?;
        let first = self.around(current, addr).map_err(|error| match error {
            GpuError::UnknownMemory { .. } => unknown(),
            error => error,
        })?;
        let mut last = first;
        while last.end < end {
            // An access past the end of an allocation is as unknown as any.
            let next = self.around(current, last.end).map_err(|_| unknown())?;
            if !(last.mapped && next.mapped && next.place == first.place) {
                return Err(unknown());
            }
            last = next;
        }
        Ok((first.place, first.start, last.end))
    }

    /// The allocation or mapping that an address is in.
    #[inline]
    fn around(&mut self, current: &Current<'_>, addr: u64) -> Result<Range> {
        if let Some(range) = find(&self.known, addr) {
            return Ok(range);
        }
        let mut range = ask(current, addr, 0)?;
        // Of mapped memory the driver tells the reserved range, in which anything may be mapped.
        let bounds = (range.start, range.end);
        if let Some((start, end, reached)) = memory::mapping(current, addr, bounds) {
            range = Range {
                start,
                end,
                reached,
                mapped: true,
                ..range
            };
        }
        insert(&mut self.known, range);
        find(&self.known, addr).ok_or(GpuError::UnknownMemory { addr, len: 0 })
    }
}

/// Remembers where the last address was: those of one end of many copies are mostly in one allocation.
#[derive(Default)]
pub(crate) struct Near {
    place: Option<(Place, u64, u64)>,
    reached: (u64, u64),
}

impl Near {
    /// [`Ranges::place`].
    #[inline]
    pub(crate) fn place(
        &mut self,
        ranges: &mut Ranges,
        current: &Current<'_>,
        addr: u64,
        len: u64,
    ) -> Result<Place> {
        if let Some((place, start, end)) = self.place
            && lies_in(addr, len, (start, end))
        {
            return Ok(place);
        }
        let found = ranges.place(current, addr, len)?;
        self.place = Some(found);
        Ok(found.0)
    }

    /// May a kernel of the context's GPU load from and store to a whole range, which has a place?
    #[inline]
    pub(crate) fn is_reached(
        &mut self,
        ranges: &mut Ranges,
        current: &Current<'_>,
        addr: u64,
        len: u64,
    ) -> bool {
        if lies_in(addr, len, self.reached) {
            return true;
        }
        let found = ranges.reached(current, addr, len);
        self.reached = found.unwrap_or_default();
        found.is_some()
    }
}

#[inline]
fn lies_in(addr: u64, len: u64, (start, end): (u64, u64)) -> bool {
    start <= addr && addr < end && len <= end - addr
}

#[inline]
fn find(known: &[Range], addr: u64) -> Option<Range> {
    let after = known.partition_point(|r| r.start <= addr);
    let range = known.get(after.checked_sub(1)?)?;
    (addr < range.end).then_some(*range)
}

fn insert(known: &mut Vec<Range>, range: Range) {
    if known.len() >= MOST {
        known.clear();
    }
    // What overlaps was freed and its addresses used again.
    known.retain(|r| r.end <= range.start || r.start >= range.end);
    let at = known.partition_point(|r| r.start < range.start);
    known.insert(at, range);
}

/// Start and bytes of the device allocation that a whole range lies in.
pub(super) fn allocation(current: &Current<'_>, addr: u64, len: u64) -> Result<(u64, u64)> {
    let range = ask(current, addr, len)?;
    let inside = addr.checked_add(len).is_some_and(|end| end <= range.end);
    match range.place {
        Place::Device(_) if inside => Ok((range.start, range.end - range.start)),
        _ => Err(GpuError::UnknownMemory { addr, len }),
    }
}

/// Whether the driver has page-locked a whole range of host memory already.
pub(super) fn pinned(current: &Current<'_>, addr: u64, len: u64) -> bool {
    let end = addr.checked_add(len);
    ask(current, addr, len)
        .is_ok_and(|range| range.place == Place::Host && end.is_some_and(|end| end <= range.end))
}

fn ask(current: &Current<'_>, addr: u64, len: u64) -> Result<Range> {
    let mut kind: c_uint = 0;
    let mut managed: c_uint = 0;
    let mut ordinal: c_int = -1;
    let mut start = 0u64;
    let mut size = 0usize;
    let mut for_kernels = 0u64;
    let mut owner = CuContext::NULL;
    let mut which = [
        pointer::MEMORY_TYPE,
        pointer::IS_MANAGED,
        pointer::DEVICE_ORDINAL,
        pointer::RANGE_START_ADDR,
        pointer::RANGE_SIZE,
        pointer::DEVICE_POINTER,
        pointer::CONTEXT,
    ];
    let mut out: [*mut c_void; 7] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast(),
        (&raw mut for_kernels).cast(),
        (&raw mut owner).cast(),
    ];
    // SAFETY: as many out parameters as attributes, each of the attribute's type; any address may be asked about.
    let code = unsafe {
        let n = which.len() as c_uint;
        (current.cuPointerGetAttributes)(n, which.as_mut_ptr(), out.as_mut_ptr(), addr)
    };
    // The plural form answers zeroes, not an error, for memory that it does not know.
    let unknown = GpuError::UnknownMemory { addr, len };
    if code != SUCCESS || size == 0 {
        return Err(unknown);
    }
    let place = match kind {
        _ if managed & 0xff != 0 => {
            return Err(GpuError::Unsupported {
                what: "a copy of managed memory",
                device: format!("the copy engine (address {addr:#x})"),
                remedy: "it may migrate under the copy: use device or pinned host memory",
            });
        }
        MEMORY_HOST => Place::Host,
        MEMORY_DEVICE => Place::Device(ordinal),
        _ => return Err(unknown),
    };
    let reached = match place {
        _ if for_kernels != addr => false,
        Place::Host => true,
        // What `cuMemAlloc` makes is in its context; another GPU's is reached only where peer access was enabled, which the driver does not say.
        Place::Device(ordinal) => {
            let in_ours = || owner == current.raw();
            let in_pool = || owner == CuContext::NULL && is_of_open_pool(current, addr);
            ordinal == current.device() && (in_ours() || in_pool())
        }
    };
    Ok(Range {
        start,
        end: start.saturating_add(size as u64),
        place,
        reached,
        mapped: false,
    })
}

/// Is it memory of a pool (`cudaMallocAsync`), which is in no context, and may the context's GPU use that pool?
fn is_of_open_pool(current: &Current<'_>, addr: u64) -> bool {
    let mut pool = CuMemPool::NULL;
    let (mut which, mut out) = (pointer::MEMPOOL_HANDLE, (&raw mut pool).cast::<c_void>());
    // SAFETY: one out parameter of the attribute's type. In a call of its own: older drivers refuse all attributes if they do not know one.
    let code = unsafe { (current.cuPointerGetAttributes)(1, &mut which, &mut out, addr) };
    let Some(access) = current.cuMemPoolGetAccess else {
        return false;
    };
    if code != SUCCESS || pool == CuMemPool::NULL {
        return false;
    }
    let here = CuMemLocation {
        kind: LOCATION_DEVICE,
        id: current.device(),
    };
    let mut flags = 0;
    // SAFETY: an out parameter, a pool that the driver has just named, and a filled structure.
    let code = unsafe { access(&mut flags, pool, &here) };
    code == SUCCESS && flags == ACCESS_READ_WRITE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(ranges: &[(u64, u64, Place)]) -> Vec<Range> {
        let mut known = Vec::new();
        for &(start, end, place) in ranges {
            let range = Range {
                start,
                end,
                place,
                reached: true,
                mapped: false,
            };
            insert(&mut known, range);
        }
        known
    }

    fn place(known: &[Range], addr: u64) -> Option<Place> {
        find(known, addr).map(|r| r.place)
    }

    #[test]
    fn finds_what_an_address_is_in() {
        let known = known(&[(200, 300, Place::Device(0)), (100, 200, Place::Host)]);
        for addr in [100, 199] {
            assert_eq!(place(&known, addr), Some(Place::Host));
        }
        for addr in [200, 299] {
            assert_eq!(place(&known, addr), Some(Place::Device(0)));
        }
        for addr in [0, 99, 300, u64::MAX] {
            assert_eq!(place(&known, addr), None, "{addr}");
        }
        for (addr, len, inside) in [
            (100, 100, true),
            (100, 101, false),
            (199, 1, true),
            (200, 0, false),
            (99, 1, false),
            (150, u64::MAX, false),
        ] {
            assert_eq!(lies_in(addr, len, (100, 200)), inside, "{addr}+{len}");
        }
    }

    #[test]
    fn newer_knowledge_replaces_older() {
        let known = known(&[
            (100, 200, Place::Host),
            (200, 300, Place::Host),
            (150, 250, Place::Device(1)),
        ]);
        assert_eq!(place(&known, 100), None);
        assert_eq!(place(&known, 299), None);
        assert_eq!(place(&known, 150), Some(Place::Device(1)));
    }
}
