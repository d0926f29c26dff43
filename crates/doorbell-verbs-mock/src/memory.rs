//! Protection domains and the memory that is registered in them.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null_mut;

use doorbell_verbs::abi::*;

use crate::calls::{device_of, refused};
use crate::world::{Mapped, Region, world};

const PAGE: usize = 4096;
/// From here on there is no memory of this process: addresses of a GPU, to tests.
const GPU: u64 = 1 << 48;

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut RawContext) -> *mut RawPd {
    let handle = world().number();
    Box::into_raw(Box::new(RawPd { context, handle }))
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut RawPd) -> c_int {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(pd) });
    0
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut RawPd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut RawMr {
    // SAFETY: passed on.
    unsafe { reg_mr_iova2(pd, addr, len, addr.addr() as u64, access as c_uint) }
}

pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut RawPd,
    addr: *mut c_void,
    length: usize,
    base: u64,
    access: c_uint,
) -> *mut RawMr {
    // SAFETY: passed on.
    unsafe { register(pd, addr, length, base, access, None) }
}

/// A dma-buf is any descriptor that can be mapped here: what it has is the memory.
pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut RawPd,
    offset: u64,
    length: usize,
    base: u64,
    fd: c_int,
    access: c_int,
) -> *mut RawMr {
    // SAFETY: the caller's.
    let device = unsafe { device_of((*pd).context) };
    if !world().devices[&device].config.dmabuf {
        return refused(libc::EOPNOTSUPP);
    }
    // Mappings begin at pages, regions where they like.
    let before = offset as usize % PAGE;
    let whole = before + length;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let from = (offset as usize - before) as libc::off_t;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let map = unsafe { libc::mmap(null_mut(), whole, rights, libc::MAP_SHARED, fd, from) };
    if map == libc::MAP_FAILED {
        return null_mut();
    }
    let mapped = Mapped {
        at: map.expose_provenance(),
        len: whole,
    };
    let addr = map.wrapping_byte_add(before);
    // SAFETY: passed on; the mapping is the region's.
    unsafe { register(pd, addr, length, base, access as c_uint, Some(mapped)) }
}

unsafe fn register(
    pd: *mut RawPd,
    addr: *mut c_void,
    length: usize,
    base: u64,
    access: c_uint,
    mapped: Option<Mapped>,
) -> *mut RawMr {
    // SAFETY: the caller's.
    let (context, pd_number) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: the caller's.
    let device = unsafe { device_of(context) };
    let mut world = world();
    let own = &world.devices[&device];
    if own.removed {
        return refused(libc::EIO);
    }
    if let Some(errno) = own.refuse_memory {
        return refused(errno);
    }
    if mapped.is_none() && addr.addr() as u64 >= GPU {
        // Without a kernel module for it, the device's driver finds no such pages.
        return refused(libc::EFAULT);
    }
    if let Some(srd) = own.config.srd {
        let has = |has, right| if has { right } else { 0 };
        let rights = access::LOCAL_WRITE
            | has(srd.reads, access::REMOTE_READ)
            | has(srd.writes, access::REMOTE_WRITE);
        if access & !rights != 0 {
            return refused(libc::EOPNOTSUPP);
        }
    }
    let remote = access & (access::REMOTE_WRITE | access::REMOTE_ATOMIC);
    if remote != 0 && access & access::LOCAL_WRITE == 0 {
        return refused(libc::EINVAL);
    }
    let key = world.number();
    let region = Region {
        device,
        pd: pd_number,
        at: addr.expose_provenance() as u64,
        base,
        len: length as u64,
        access,
        _mapped: mapped,
    };
    world.regions.insert(key, region);
    Box::into_raw(Box::new(RawMr {
        context,
        pd,
        addr,
        length,
        handle: key,
        lkey: key,
        rkey: key,
    }))
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut RawMr) -> c_int {
    // SAFETY: made above.
    let mr = unsafe { Box::from_raw(mr) };
    match world().regions.remove(&mr.handle) {
        Some(_) => 0,
        None => libc::EINVAL,
    }
}
