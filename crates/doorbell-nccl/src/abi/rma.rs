//! The table by which NCCL's CPU proxy calls an RMA plug-in.

use std::ffi::{c_char, c_int, c_void};

use super::gin::{Connect, Devices, Init, Listen, One, QueryLastError, Two};
use super::net::NetPropertiesV12;
use super::{Status, layout};

/// `regMrSym` of an RMA plug-in, which has no device handle.
pub type RegMrSym =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void) -> Status;
/// `regMrSymDmaBuf`, likewise.
pub type RegMrSymDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
) -> Status;
/// `iput`, and `iget` with the remote side first: context object, context, source offset and handle, bytes, target offset and
/// handle, rank, request.
pub type Put = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    *mut *mut c_void,
) -> Status;
/// `iputSignal`: as [`Put`], with offset, handle, value, operation and strength of the signal before the request.
pub type PutSignal = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u64,
    *mut c_void,
    usize,
    u64,
    *mut c_void,
    u32,
    u64,
    *mut c_void,
    u64,
    u32,
    bool,
    *mut *mut c_void,
) -> Status;
/// `iflush`.
pub type Flush =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void) -> Status;
/// `test`: communicator, request, done.
pub type Test = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int) -> Status;

layout! {
    /// `ncclRma_v14_t`: NCCL 2.30.7 to 2.32.3.
    #[derive(Debug)]
    pub struct RmaV14 = "ncclRma_v14_t", 23007 ..= 99999, 168 bytes {
        /// For logs.
        name: *const c_char = "name" @ 0,
        /// Once a communicator.
        init: Option<Init> = "init" @ 8,
        /// How many virtual NICs there are.
        devices: Option<Devices> = "devices" @ 16,
        /// What one virtual NIC is.
        get_properties: Option<unsafe extern "C" fn(c_int, *mut NetPropertiesV12) -> Status> = "getProperties" @ 24,
        /// Makes a handle.
        listen: Option<Listen> = "listen" @ 32,
        /// Collective; its first argument may be anything.
        connect: Option<Connect> = "connect" @ 40,
        /// Collective.
        create_context: Option<
            unsafe extern "C" fn(*mut c_void, *mut RmaConfigV14, *mut *mut c_void) -> Status,
        > = "createContext" @ 48,
        /// Collective.
        reg_mr_sym: Option<RegMrSym> = "regMrSym" @ 56,
        /// Collective.
        reg_mr_sym_dma_buf: Option<RegMrSymDmaBuf> = "regMrSymDmaBuf" @ 64,
        /// Ends what a registration made.
        dereg_mr_sym: Option<Two> = "deregMrSym" @ 72,
        /// Ends what `createContext` made.
        destroy_context: Option<One> = "destroyContext" @ 80,
        /// Ends what `connect` made.
        close_coll: Option<One> = "closeColl" @ 88,
        /// Ends what `listen` made.
        close_listen: Option<One> = "closeListen" @ 96,
        /// Begins a put.
        iput: Option<Put> = "iput" @ 104,
        /// Begins a put with a signal behind it.
        iput_signal: Option<PutSignal> = "iputSignal" @ 112,
        /// Begins a get.
        iget: Option<Put> = "iget" @ 120,
        /// Makes gets visible.
        iflush: Option<Flush> = "iflush" @ 128,
        /// Looks whether a request is done.
        test: Option<Test> = "test" @ 136,
        /// In a loop.
        rma_progress: Option<One> = "rmaProgress" @ 144,
        /// From `ncclCommGetAsyncError`.
        query_last_error: Option<QueryLastError> = "queryLastError" @ 152,
        /// Ends what `init` made.
        finalize: Option<One> = "finalize" @ 160,
    }
}

layout! {
    /// `ncclRmaConfig_v14_t`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RmaConfigV14 = "ncclRmaConfig_v14_t", 23007 ..= 99999, 12 bytes {
        /// Contexts on this connection.
        contexts: c_int = "nContexts" @ 0,
        /// -1: none.
        traffic_class: c_int = "trafficClass" @ 4,
        /// Only every so-manieth rank is used.
        rank_stride: c_int = "rankStride" @ 8,
    }
}
