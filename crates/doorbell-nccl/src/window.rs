//! Windows: memory that device code names by a handle, a rank and an offset.

use std::ffi::c_int;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::Arc;

use doorbell::{Access, Memory, Mr, Place};

use crate::abi::device::MemHandle;
use crate::abi::{PTR_CUDA, PTR_HOST};
use crate::comm::Comm;
use crate::{Error, Result, memfd};

/// Writes in their order, even without a signal between them (`NCCL_NET_MR_FLAG_FORCE_SO`).
pub(crate) const FLAG_STRICT: u64 = 1;
/// Signals of NCCL's own proxy, which only grow (`NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET`).
pub(crate) const FLAG_NEVER_RESET: u64 = 2;

/// What `regMrSym` makes for device code.
pub(crate) struct Window {
    region: Region,
    /// A [`MemHandle`] and the keys that it points to.
    gpu: Memory,
}

/// Registered memory and the keys under which each rank knows its own.
pub(crate) struct Region {
    pub(crate) mr: Mr,
    pub(crate) keys: Vec<u32>,
}

/// Big-endian keys, as device code copies them.
pub(crate) fn key_bytes(keys: &[u32]) -> Vec<u8> {
    keys.iter().flat_map(|k| k.to_be_bytes()).collect()
}

/// Key number `nth` of each rank's, as they came.
pub(crate) fn keys(parts: &[Vec<u8>], nth: usize) -> Vec<u32> {
    let key = |part: &Vec<u8>| Some(u32::from_le_bytes(*part.get(4 * nth..)?.first_chunk()?));
    parts.iter().map(|part| key(part).unwrap_or(0)).collect()
}

impl Region {
    /// Registers memory on this rank, together with all others. Each adds what `more` makes of its own; that comes back, a rank each. What was `given`
    /// beside the memory may be wrong: then the others are told.
    ///
    /// # Safety
    /// `addr` is valid for `size` bytes, for the GPU or the CPU as `kind` says, until the region was deregistered.
    pub(crate) unsafe fn register<T>(
        comm: &Comm,
        given: Result<()>,
        addr: *mut u8,
        size: usize,
        kind: c_int,
        flags: u64,
        more: impl FnOnce() -> Result<(T, u32)>,
    ) -> Result<(Self, T, Vec<u32>)> {
        // SAFETY: passed on.
        let mr = given
            .and_then(|()| check(addr, size, kind, flags))
            .and_then(|addr| unsafe { import(comm, addr, size, kind) })
            .and_then(|memory| {
                let strict = match flags & FLAG_STRICT {
                    0 => Access::NONE,
                    _ => Access::ORDERED,
                };
                let access = Access::ALL.union(strict);
                comm.register(&memory, access)
            })
            .and_then(|mr| Ok((mr, more()?)));
        let mine = mr.as_ref().map(|(mr, (_, key))| {
            let both = [mr.key(), *key].map(u32::to_le_bytes);
            both.concat()
        });
        let all = comm.gather("regMrSym", mine.as_ref().map(|k| &k[..]).map_err(|e| *e))?;
        let (mr, (more, _)) = mr?;
        let (keys, seconds) = (keys(&all, 0), keys(&all, 1));
        Ok((Self { mr, keys }, more, seconds))
    }

    /// Ends it: afterwards nobody reaches the memory by it.
    pub(crate) fn deregister(self, comm: &Comm) -> Result<()> {
        match comm.health.has_failed() {
            true => comm.let_go(|time| self.mr.deregister(time))?,
            // Others may stand still for a while.
            false => self.mr.deregister(comm.settings.letting_go())?,
        };
        Ok(())
    }
}

impl Window {
    /// Registers memory on this rank, together with all others.
    ///
    /// # Safety
    /// As for [`Region::register`].
    pub(crate) unsafe fn register(
        comm: &Comm,
        given: Result<()>,
        addr: *mut u8,
        size: usize,
        kind: c_int,
        flags: u64,
    ) -> Result<Self> {
        // All that may fail is done before the others are told: who fails alone afterwards leaves them waiting in what comes next.
        let room = || {
            let len = size_of::<MemHandle>() + 4 * comm.ranks;
            Ok((comm.node.device.alloc(Place::Gpu, len)?, 0))
        };
        // SAFETY: passed on.
        let (region, gpu, _) =
            unsafe { Region::register(comm, given, addr, size, kind, flags, room)? };
        // The handle first, and right behind it what it points to.
        let handle = MemHandle {
            rkeys: gpu.device_addr() + size_of::<MemHandle>() as u64,
            lkey: region.mr.key_be(),
            reserved: 0,
        };
        let mut image = Vec::with_capacity(gpu.len());
        image.extend_from_slice(&handle.rkeys.to_ne_bytes());
        image.extend_from_slice(&handle.lkey.to_ne_bytes());
        image.extend_from_slice(&[0; 4]);
        image.extend_from_slice(&key_bytes(&region.keys));
        match gpu.write(0, &image) {
            Ok(()) => Ok(Self { region, gpu }),
            // The others have their window, and hear of it as of any failure.
            Err(error) => {
                comm.health.report(&error);
                Err(error.into())
            }
        }
    }

    /// What device code is given.
    pub(crate) fn handle(&self) -> u64 {
        self.gpu.device_addr()
    }

    /// Ends it: afterwards nobody reaches the memory by it.
    pub(crate) fn deregister(self, comm: &Comm) -> Result<()> {
        self.region.deregister(comm)
    }
}

fn check(addr: *mut u8, size: usize, kind: c_int, flags: u64) -> Result<NonNull<u8>> {
    let bad = |object, value: String, remedy| {
        Err(Error::Argument {
            call: "regMrSym",
            object,
            value,
            remedy,
        })
    };
    let Some(at) = NonNull::new(addr) else {
        return bad("data", "null".to_owned(), "pass the window's address");
    };
    if size == 0 || (addr as usize).checked_add(size).is_none() {
        let value = format!("{size} bytes at {addr:p}");
        return bad("size", value, "pass the bytes of the window");
    }
    if kind != PTR_HOST && kind != PTR_CUDA {
        return bad(
            "type",
            kind.to_string(),
            "pass NCCL_PTR_HOST (1) or NCCL_PTR_CUDA (2)",
        );
    }
    if flags & !(FLAG_STRICT | FLAG_NEVER_RESET) != 0 {
        let value = format!("{flags:#x}");
        return bad("mrFlags", value, "this release knows flags 1 and 2");
    }
    Ok(at)
}

/// # Safety
/// As for [`Window::register`].
unsafe fn import(comm: &Comm, addr: NonNull<u8>, size: usize, kind: c_int) -> Result<Memory> {
    let device = &comm.node.device;
    if kind == PTR_CUDA && device.gpu().is_cuda() {
        // SAFETY: valid until deregistered, which waits for whoever uses it.
        return Ok(unsafe { device.import_gpu(addr.as_ptr() as u64, size, None)? });
    }
    if let Some(memfd) = memfd::behind(addr.as_ptr() as usize, size) {
        // SAFETY: as above, and the kernel says that these bytes are a shared mapping of that memfd.
        let shared = unsafe { device.import_shared(addr, size, memfd, Arc::new(())) };
        return Ok(shared?);
    }
    // SAFETY: as above; NCCL's host windows are seen by kernels and plain C++ only.
    Ok(unsafe { device.import_host(addr, size, Arc::new(()))? })
}
