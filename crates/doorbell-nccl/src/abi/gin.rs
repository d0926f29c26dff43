//! The tables by which NCCL calls a GIN plug-in, and what it passes to `createContext`.

use std::ffi::{c_char, c_int, c_void};

use super::net::{DeviceHandle, NetPropertiesV11, NetPropertiesV12};
use super::{Logger, Status, layout};

/// `init` of every table.
pub type Init = unsafe extern "C" fn(*mut *mut c_void, u64, Logger) -> Status;
/// `devices`.
pub type Devices = unsafe extern "C" fn(*mut c_int) -> Status;
/// `listen`: context, device, handle to fill, listening object.
pub type Listen = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Status;
/// `connect`: context, handles, ranks, rank, listening object, communicator.
pub type Connect = unsafe extern "C" fn(
    *mut c_void,
    *mut *mut c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `regMrSym`: communicator, address, bytes, kind of memory, flags, host handle, device handle.
pub type RegMrSym = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// `regMrSymDmaBuf`: as [`RegMrSym`] with offset and descriptor before the flags.
pub type RegMrSymDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
/// A call with an object and a handle: `deregMrSym`.
pub type Two = unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status;
/// A call with an object alone: `destroyContext`, `closeColl`, `closeListen`, `ginProgress`, `finalize`.
pub type One = unsafe extern "C" fn(*mut c_void) -> Status;
/// `queryLastError`.
pub type QueryLastError = unsafe extern "C" fn(*mut c_void, *mut bool) -> Status;

layout! {
    /// `ncclGin_v14_t`: NCCL 2.30.7 to 2.32.3.
    #[derive(Debug)]
    pub struct GinV14 = "ncclGin_v14_t", 23007 ..= 99999, 136 bytes {
        /// For logs.
        name: *const c_char = "name" @ 0,
        /// Once a communicator.
        init: Option<Init> = "init" @ 8,
        /// How many virtual NICs there are.
        devices: Option<Devices> = "devices" @ 16,
        /// What kinds of signals there are.
        get_gin_properties: Option<unsafe extern "C" fn(*mut GinPropertiesV14) -> Status> = "getGinProperties" @ 24,
        /// What one virtual NIC is.
        get_properties: Option<unsafe extern "C" fn(c_int, *mut NetPropertiesV12) -> Status> = "getProperties" @ 32,
        /// Makes a handle.
        listen: Option<Listen> = "listen" @ 40,
        /// Collective.
        connect: Option<Connect> = "connect" @ 48,
        /// Collective.
        create_context: Option<
            unsafe extern "C" fn(
                *mut c_void,
                *mut GinConfigV14,
                *mut *mut c_void,
                *mut *mut DeviceHandle,
            ) -> Status,
        > = "createContext" @ 56,
        /// Collective.
        reg_mr_sym: Option<RegMrSym> = "regMrSym" @ 64,
        /// Never called for GIN.
        reg_mr_sym_dma_buf: Option<RegMrSymDmaBuf> = "regMrSymDmaBuf" @ 72,
        /// Ends what `regMrSym` made.
        dereg_mr_sym: Option<Two> = "deregMrSym" @ 80,
        /// Ends what `createContext` made.
        destroy_context: Option<One> = "destroyContext" @ 88,
        /// Ends what `connect` made.
        close_coll: Option<One> = "closeColl" @ 96,
        /// Ends what `listen` made.
        close_listen: Option<One> = "closeListen" @ 104,
        /// In a loop, if a context asked for it.
        gin_progress: Option<One> = "ginProgress" @ 112,
        /// From `ncclCommGetAsyncError`.
        query_last_error: Option<QueryLastError> = "queryLastError" @ 120,
        /// Ends what `init` made.
        finalize: Option<One> = "finalize" @ 128,
    }
}

layout! {
    /// `ncclGinConfig_v14_t`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct GinConfigV14 = "ncclGinConfig_v14_t", 23007 ..= 99999, 28 bytes {
        /// Signals of each context.
        signals: c_int = "nSignals" @ 0,
        /// Counters of each context.
        counters: c_int = "nCounters" @ 4,
        /// Contexts on this connection.
        contexts: c_int = "nContexts" @ 8,
        /// Slots of a send queue; 0 leaves it to the plug-in.
        queue_depth: c_int = "queueDepth" @ 12,
        /// -1: none.
        traffic_class: c_int = "trafficClass" @ 16,
        /// Which context structure the application's device code reads.
        backend_version: c_int = "backendVersion" @ 20,
        /// Only every so-manieth rank, counted from the own one, is ever used.
        rank_stride: c_int = "rankStride" @ 24,
    }
}

layout! {
    /// `ncclGinProperties_v14_t`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct GinPropertiesV14 = "ncclGinProperties_v14_t", 23007 ..= 99999, 2 bytes {
        /// A signal becomes visible after everything before it on its connection.
        strong_signals: bool = "supportsStrongSignals" @ 0,
        /// A signal may be any word of a window.
        va_signals: bool = "supportsVASignals" @ 1,
    }
}

layout! {
    /// `ncclGin_v11_t`: NCCL 2.28.7 to 2.29.3, inside a network plug-in; 2.29.7 to 2.30.4 by itself.
    #[derive(Debug)]
    pub struct GinV11 = "ncclGin_v11_t", 22807 ..= 22903, 152 bytes {
        /// For logs.
        name: *const c_char = "name" @ 0,
        /// Twice a communicator.
        init: Option<Init> = "init" @ 8,
        /// How many virtual NICs there are.
        devices: Option<Devices> = "devices" @ 16,
        /// What one virtual NIC is.
        get_properties: Option<unsafe extern "C" fn(c_int, *mut NetPropertiesV11) -> Status> = "getProperties" @ 24,
        /// Makes a handle.
        listen: Option<Listen> = "listen" @ 32,
        /// Collective.
        connect: Option<Connect> = "connect" @ 40,
        /// Collective: communicator, signals, counters.
        create_context: Option<
            unsafe extern "C" fn(
                *mut c_void,
                c_int,
                c_int,
                *mut *mut c_void,
                *mut *mut DeviceHandle,
            ) -> Status,
        > = "createContext" @ 48,
        /// Collective.
        reg_mr_sym: Option<RegMrSym> = "regMrSym" @ 56,
        /// Never called for GIN.
        reg_mr_sym_dma_buf: Option<RegMrSymDmaBuf> = "regMrSymDmaBuf" @ 64,
        /// Ends what `regMrSym` made.
        dereg_mr_sym: Option<Two> = "deregMrSym" @ 72,
        /// Ends what `createContext` made.
        destroy_context: Option<One> = "destroyContext" @ 80,
        /// Ends what `connect` made.
        close_coll: Option<One> = "closeColl" @ 88,
        /// Ends what `listen` made.
        close_listen: Option<One> = "closeListen" @ 96,
        /// Of the proxy type only.
        iput: *const c_void = "iput" @ 104,
        /// Of the proxy type only.
        iput_signal: *const c_void = "iputSignal" @ 112,
        /// Of the proxy type only.
        test: *const c_void = "test" @ 120,
        /// In a loop, if a context asked for it.
        gin_progress: Option<One> = "ginProgress" @ 128,
        /// From `ncclCommGetAsyncError`.
        query_last_error: Option<QueryLastError> = "queryLastError" @ 136,
        /// Ends what `init` made.
        finalize: Option<One> = "finalize" @ 144,
    }
}
