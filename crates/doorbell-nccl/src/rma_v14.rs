//! `ncclRmaPlugin_v14`: NCCL's own CPU proxy over Doorbell's links, NCCL 2.30.7 to 2.32.3 (`NCCL_RMA_PLUGIN`, `NCCL_GIN_TYPE=2`).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::abi::net::{NetPropertiesV12, TYPE_PROXY};
use crate::abi::rma::{RmaConfigV14, RmaV14};
use crate::abi::{Shared, Status};
use crate::comm::Comm;
use crate::entry::{self, give, guard, look, present, store, take};
use crate::rma::{Part, RmaContexts, RmaRequest, RmaWindow};
use crate::{Error, Result};

/// `NCCL_NET_SIGNAL_OP_INC`.
const OP_INC: u32 = 1;
/// `NCCL_NET_SIGNAL_OP_ADD`.
const OP_ADD: u32 = 2;
/// NCCL has 32 times as many requests under way to a rank: as many as fit into half a queue.
const MAX_RECEIVES: c_int = 16;

unsafe extern "C" fn properties(dev: c_int, to: *mut NetPropertiesV12) -> Status {
    guard("getProperties", || {
        entry::only_device("getProperties", dev)?;
        let properties = NetPropertiesV12 {
            name: c"doorbell_rma0".as_ptr(),
            device_type: TYPE_PROXY,
            max_recvs: MAX_RECEIVES,
            ..entry::properties()
        };
        // SAFETY: NCCL's out parameter.
        unsafe { store("getProperties", "props", to, properties) }
    })
}

unsafe extern "C" fn create_context(
    comm: *mut c_void,
    config: *mut RmaConfigV14,
    context: *mut *mut c_void,
) -> Status {
    const CALL: &str = "createContext";
    guard(CALL, || {
        // SAFETY: what `connect` gave, and NCCL does not close it meanwhile.
        let comm = unsafe { look::<Arc<Comm>>(CALL, comm)? };
        // The other ranks are told, instead of being left waiting.
        let read = present(
            CALL,
            &[("rmaCtx", context.cast()), ("config", config.cast())],
        );
        // SAFETY: NCCL's configuration, if there is one.
        let new = RmaContexts::create(comm, read.map(|()| unsafe { config.read() }))?;
        // SAFETY: not null, or `create` had failed.
        unsafe { store(CALL, "rmaCtx", context, give(new)) }
    })
}

unsafe extern "C" fn reg_mr_sym(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    window: *mut *mut c_void,
) -> Status {
    const CALL: &str = "regMrSym";
    guard(CALL, || {
        // SAFETY: what `connect` gave, and NCCL does not close it meanwhile.
        let comm = unsafe { look::<Arc<Comm>>(CALL, comm)? };
        // The other ranks are told, instead of being left waiting.
        let given = present(CALL, &[("mhandle", window.cast())]);
        // SAFETY: NCCL keeps the memory until it deregisters it.
        let new = unsafe { RmaWindow::register(comm, given, data.cast(), size, kind, flags)? };
        // SAFETY: not null, or `register` had failed.
        unsafe { store(CALL, "mhandle", window, give(new)) }
    })
}

unsafe extern "C" fn dereg_mr_sym(comm: *mut c_void, window: *mut c_void) -> Status {
    const CALL: &str = "deregMrSym";
    guard(CALL, || {
        // SAFETY: as for `regMrSym`.
        let comm = unsafe { look::<Arc<Comm>>(CALL, comm)? };
        // SAFETY: what `regMrSym` gave; NCCL ends it once.
        unsafe { take::<RmaWindow>(CALL, window)? }.deregister(comm)
    })
}

unsafe extern "C" fn destroy_context(context: *mut c_void) -> Status {
    guard("destroyContext", || {
        // SAFETY: what `createContext` gave; NCCL ends it once.
        unsafe { take::<RmaContexts>("destroyContext", context) }.map(drop)
    })
}

/// A part of a window, where one is named.
///
/// # Safety
/// `window` is null or came from `regMrSym`, and is not ended while the answer is used.
unsafe fn part<'a>(call: &'static str, window: *mut c_void, offset: u64) -> Result<Part<'a>> {
    // SAFETY: the caller's promise.
    Ok((unsafe { look::<RmaWindow>(call, window)? }, offset))
}

/// Begins something and stores its request.
///
/// # Safety
/// `context` came from `createContext`; `request` is null or valid for a write.
unsafe fn begin(
    call: &'static str,
    context: *mut c_void,
    request: *mut *mut c_void,
    what: impl FnOnce(&RmaContexts) -> Result<RmaRequest>,
) -> Status {
    guard(call, || {
        // SAFETY: the caller's promise.
        let context = unsafe { look::<RmaContexts>(call, context)? };
        present(call, &[("request", request.cast())])?;
        // SAFETY: checked above.
        unsafe { store(call, "request", request, give(what(context)?)) }
    })
}

unsafe extern "C" fn iput(
    context: *mut c_void,
    number: c_int,
    from: u64,
    src: *mut c_void,
    size: usize,
    to: u64,
    dst: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's objects.
    unsafe {
        begin("iput", context, request, |c| {
            let put = (
                part("iput", src, from)?,
                part("iput", dst, to)?,
                size as u64,
            );
            c.put("iput", (number, rank), Some(put), None)
        })
    }
}

unsafe extern "C" fn iput_signal(
    context: *mut c_void,
    number: c_int,
    from: u64,
    src: *mut c_void,
    size: usize,
    to: u64,
    dst: *mut c_void,
    rank: u32,
    signal_at: u64,
    signal: *mut c_void,
    value: u64,
    operation: u32,
    _strong: bool,
    request: *mut *mut c_void,
) -> Status {
    const CALL: &str = "iputSignal";
    // SAFETY: NCCL's objects.
    unsafe {
        begin(CALL, context, request, |c| {
            let add = match operation {
                OP_INC => 1,
                OP_ADD => value,
                _ => {
                    return Err(Error::Argument {
                        call: CALL,
                        object: "signalOp",
                        value: operation.to_string(),
                        remedy: "pass 1 (increment) or 2 (add)",
                    });
                }
            };
            // A signal alone names no memory.
            let put = match size {
                0 => None,
                _ => Some((part(CALL, src, from)?, part(CALL, dst, to)?, size as u64)),
            };
            let signal = part(CALL, signal, signal_at)?;
            c.put(CALL, (number, rank), put, Some((signal, add)))
        })
    }
}

unsafe extern "C" fn iget(
    context: *mut c_void,
    number: c_int,
    from: u64,
    src: *mut c_void,
    size: usize,
    to: u64,
    dst: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> Status {
    // SAFETY: NCCL's objects.
    unsafe {
        begin("iget", context, request, |c| {
            let (src, dst) = (part("iget", src, from)?, part("iget", dst, to)?);
            c.get("iget", (number, rank), src, dst, size as u64)
        })
    }
}

/// A get is visible when its request is done: there is nothing to flush, and so no request.
unsafe extern "C" fn iflush(
    context: *mut c_void,
    _: c_int,
    _: *mut c_void,
    _: u32,
    request: *mut *mut c_void,
) -> Status {
    guard("iflush", || {
        // SAFETY: NCCL's objects.
        unsafe {
            look::<RmaContexts>("iflush", context)?;
            store("iflush", "request", request, std::ptr::null_mut())
        }
    })
}

unsafe extern "C" fn test(_: *mut c_void, request: *mut c_void, done: *mut c_int) -> Status {
    const CALL: &str = "test";
    guard(CALL, || {
        present(CALL, &[("done", done.cast())])?;
        // SAFETY: what a put or get gave, and NCCL looks at it from one thread.
        let ended = unsafe { look::<RmaRequest>(CALL, request)? }.test();
        if !matches!(ended, Ok(false)) {
            // Whether it ended well or not, NCCL does not come back for it.
            // SAFETY: as above, once.
            drop(unsafe { take::<RmaRequest>(CALL, request)? });
        }
        // SAFETY: checked above.
        unsafe { store(CALL, "done", done, c_int::from(ended?)) }
    })
}

unsafe extern "C" fn progress(context: *mut c_void) -> Status {
    guard("rmaProgress", || {
        // SAFETY: what `createContext` gave, and NCCL does not destroy it meanwhile.
        unsafe { look::<RmaContexts>("rmaProgress", context)? }.progress()
    })
}

unsafe extern "C" fn query_last_error(context: *mut c_void, has_error: *mut bool) -> Status {
    const CALL: &str = "queryLastError";
    guard(CALL, || {
        // SAFETY: what `createContext` gave, and NCCL does not destroy it meanwhile.
        let failed = unsafe { look::<RmaContexts>(CALL, context)? }.has_failed();
        // SAFETY: NCCL's out parameter.
        unsafe { store(CALL, "hasError", has_error, failed) }
    })
}

/// The table that NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclRmaPlugin_v14: Shared<RmaV14> = Shared(RmaV14 {
    name: c"Doorbell".as_ptr(),
    init: Some(entry::init),
    devices: Some(entry::devices),
    get_properties: Some(properties),
    listen: Some(entry::listen),
    connect: Some(entry::connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(reg_mr_sym),
    // `ptrSupport` does not ask for it.
    reg_mr_sym_dma_buf: None,
    dereg_mr_sym: Some(dereg_mr_sym),
    destroy_context: Some(destroy_context),
    close_coll: Some(entry::close_coll),
    close_listen: Some(entry::close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal),
    iget: Some(iget),
    iflush: Some(iflush),
    test: Some(test),
    rma_progress: Some(progress),
    query_last_error: Some(query_last_error),
    finalize: Some(entry::finalize),
});
