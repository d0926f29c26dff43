//! `ncclGinPlugin_v14`: NCCL 2.30.7 to 2.32.3.

use std::ffi::{c_int, c_void};

use crate::abi::gin::{GinConfigV14, GinPropertiesV14, GinV14};
use crate::abi::net::{DeviceHandle, NetPropertiesV12};
use crate::abi::{Shared, Status};
use crate::context::Request;
use crate::entry::{self, guard, present, store};
use crate::{Error, Result};

unsafe extern "C" fn gin_properties(to: *mut GinPropertiesV14) -> Status {
    guard("getGinProperties", || {
        let properties = GinPropertiesV14 {
            // A signal is an atomic behind the writes of its queue pair.
            strong_signals: true,
            va_signals: true,
        };
        // SAFETY: NCCL's out parameter.
        unsafe { store("getGinProperties", "ginProps", to, properties) }
    })
}

unsafe extern "C" fn properties(dev: c_int, to: *mut NetPropertiesV12) -> Status {
    guard("getProperties", || {
        entry::only_device("getProperties", dev)?;
        // SAFETY: NCCL's out parameter.
        unsafe { store("getProperties", "props", to, entry::properties()) }
    })
}

unsafe extern "C" fn create_context(
    comm: *mut c_void,
    config: *mut GinConfigV14,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> Status {
    guard("createContext", || {
        let read = |comm: &crate::comm::Comm| -> Result<Request> {
            present("createContext", &[("config", config.cast())])?;
            // SAFETY: NCCL's configuration.
            let config = unsafe { config.read() };
            if config.rank_stride < 1 || !comm.ranks.is_multiple_of(config.rank_stride as usize) {
                return Err(Error::Argument {
                    call: "createContext",
                    object: "rankStride",
                    value: config.rank_stride.to_string(),
                    remedy: "pass a divisor of the number of ranks",
                });
            }
            Request::new(
                comm,
                config.signals,
                config.counters,
                config.contexts,
                config.queue_depth,
                entry::form(config.backend_version)?,
            )
        };
        // SAFETY: NCCL's pointers.
        unsafe { entry::create_context(comm, read, context, handle) }
    })
}

/// The table that NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclGinPlugin_v14: Shared<GinV14> = Shared(GinV14 {
    name: c"Doorbell".as_ptr(),
    init: Some(entry::init),
    devices: Some(entry::devices),
    get_gin_properties: Some(gin_properties),
    get_properties: Some(properties),
    listen: Some(entry::listen),
    connect: Some(entry::connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(entry::reg_mr_sym),
    // NCCL never calls it for GIN.
    reg_mr_sym_dma_buf: None,
    dereg_mr_sym: Some(entry::dereg_mr_sym),
    destroy_context: Some(entry::destroy_context),
    close_coll: Some(entry::close_coll),
    close_listen: Some(entry::close_listen),
    gin_progress: Some(entry::progress),
    query_last_error: Some(entry::query_last_error),
    finalize: Some(entry::finalize),
});
