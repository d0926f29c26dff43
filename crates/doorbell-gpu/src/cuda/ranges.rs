//! Which memory an address is in, remembered.
//!
//! The copier must know, since a copy within one GPU never ends behind a kernel that fills it. The driver's answer costs
//! more than the copy's share of a batch, so it is asked once an allocation.

use std::ffi::{c_int, c_uint, c_void};

use super::context::Current;
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
}

/// Allocations met so far, sorted by address, not overlapping.
#[derive(Default)]
pub(crate) struct Ranges {
    known: Vec<Range>,
}

/// Beyond this many, start over: someone copies to and from ever new memory.
const MOST: usize = 4096;

impl Ranges {
    /// Forgets everything, because memory was freed or unregistered.
    pub(crate) fn clear(&mut self) {
        self.known.clear();
    }

    /// The place of a whole range; an error unless it lies in one allocation.
    #[inline]
    pub(crate) fn place(&mut self, current: &Current<'_>, addr: u64, len: u64) -> Result<Place> {
        if let Some(place) = self.find(addr, len) {
            return Ok(place);
        }
        let range = ask(current, addr, len)?;
        self.insert(range);
        // An access past the end of what was just learnt is as unknown as any.
        self.find(addr, len)
            .ok_or(GpuError::UnknownMemory { addr, len })
    }

    #[inline]
    fn find(&self, addr: u64, len: u64) -> Option<Place> {
        let end = addr.checked_add(len)?;
        let after = self.known.partition_point(|r| r.start <= addr);
        let range = self.known.get(after.checked_sub(1)?)?;
        (end <= range.end && addr < range.end).then_some(range.place)
    }

    fn insert(&mut self, range: Range) {
        if self.known.len() >= MOST {
            self.known.clear();
        }
        // What overlaps was freed and its addresses used again.
        self.known
            .retain(|r| r.end <= range.start || r.start >= range.end);
        let at = self.known.partition_point(|r| r.start < range.start);
        self.known.insert(at, range);
    }
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
    let mut which = [
        pointer::MEMORY_TYPE,
        pointer::IS_MANAGED,
        pointer::DEVICE_ORDINAL,
        pointer::RANGE_START_ADDR,
        pointer::RANGE_SIZE,
    ];
    let mut out: [*mut c_void; 5] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast(),
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
    Ok(Range {
        start,
        end: start.saturating_add(size as u64),
        place,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64, place: Place) -> Range {
        Range { start, end, place }
    }

    #[test]
    fn finds_only_what_lies_inside_one_allocation() {
        let mut ranges = Ranges::default();
        ranges.insert(range(200, 300, Place::Device(0)));
        ranges.insert(range(100, 200, Place::Host));
        assert_eq!(ranges.find(100, 100), Some(Place::Host));
        assert_eq!(ranges.find(199, 1), Some(Place::Host));
        assert_eq!(ranges.find(200, 0), Some(Place::Device(0)));
        assert_eq!(ranges.find(200, 100), Some(Place::Device(0)));
        for (addr, len) in [
            (99, 1),
            (150, 51),
            (199, 2),
            (250, 51),
            (300, 0),
            (u64::MAX, 2),
        ] {
            assert_eq!(ranges.find(addr, len), None, "{addr}+{len}");
        }
    }

    #[test]
    fn newer_knowledge_replaces_older() {
        let mut ranges = Ranges::default();
        ranges.insert(range(100, 200, Place::Host));
        ranges.insert(range(200, 300, Place::Host));
        ranges.insert(range(150, 250, Place::Device(1)));
        assert_eq!(ranges.find(100, 1), None);
        assert_eq!(ranges.find(299, 1), None);
        assert_eq!(ranges.find(150, 100), Some(Place::Device(1)));
        ranges.clear();
        assert_eq!(ranges.find(150, 1), None);
    }
}
