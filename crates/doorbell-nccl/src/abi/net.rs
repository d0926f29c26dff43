//! What NCCL asks about a virtual NIC, the handle that device code gets, and the table of a network plug-in.

use std::ffi::{c_char, c_int, c_void};

use super::{Logger, Status, layout};

/// A GIN backend whose requests the CPU carries out (`NCCL_NET_DEVICE_GIN_PROXY`).
pub const TYPE_PROXY: c_int = 2;
/// A GIN backend whose queues the GPU writes (`NCCL_NET_DEVICE_GIN_GDAKI`).
pub const TYPE_GDAKI: c_int = 3;
/// The version that NCCL's own GDAKI backend puts into its handle; device code does not read it.
pub const GDAKI_VERSION: c_int = 200;
/// The same up to 2.29.7.
pub const GDAKI_VERSION_OLD: c_int = 100;
/// A network whose requests the host makes (`NCCL_NET_DEVICE_HOST`).
pub const TYPE_HOST: c_int = 0;

/// `ncclNetVDeviceProps`: the physical NICs of a virtual one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtualDevice {
    /// How many.
    pub count: c_int,
    /// Which.
    pub devices: [c_int; 8],
}

layout! {
    /// `ncclNetProperties_v12_t`.
    #[derive(Clone, Copy, Debug)]
    pub struct NetPropertiesV12 = "ncclNetProperties_v12_t", 23003 ..= 99999, 128 bytes {
        /// The key of the NIC in NCCL's topology: unique.
        name: *const c_char = "name" @ 0,
        /// Path of the PCI device; null: a virtual NIC of the first CPU.
        pci_path: *const c_char = "pciPath" @ 8,
        /// Number of the NIC.
        guid: u64 = "guid" @ 16,
        /// `PTR_*` bits.
        ptr_support: c_int = "ptrSupport" @ 24,
        /// A registration is not tied to a communicator.
        reg_is_global: c_int = "regIsGlobal" @ 28,
        /// Receives need a flush.
        force_flush: c_int = "forceFlush" @ 32,
        /// Mbit/s.
        speed: c_int = "speed" @ 36,
        /// Port number.
        port: c_int = "port" @ 40,
        /// Microseconds.
        latency: f32 = "latency" @ 44,
        /// Communicators at most.
        max_comms: c_int = "maxComms" @ 48,
        /// Grouped receives at most.
        max_recvs: c_int = "maxRecvs" @ 52,
        /// `TYPE_*`.
        device_type: c_int = "netDeviceType" @ 56,
        /// Version of that.
        device_version: c_int = "netDeviceVersion" @ 60,
        /// What it consists of.
        virtual_device: VirtualDevice = "vProps" @ 64,
        /// Bytes of a transfer at most.
        max_p2p_bytes: usize = "maxP2pBytes" @ 104,
        /// Bytes of a collective transfer at most.
        max_coll_bytes: usize = "maxCollBytes" @ 112,
        /// Requests in one.
        max_multi_request: c_int = "maxMultiRequestSize" @ 120,
        /// -1: none.
        rail: i16 = "railId" @ 124,
        /// -1: none.
        plane: i16 = "planeId" @ 126,
    }
}

/// `ncclNetVDeviceProps` before release 2.30: room for four.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtualDeviceOld {
    /// How many.
    pub count: c_int,
    /// Which.
    pub devices: [c_int; 4],
}

layout! {
    /// `ncclNetProperties_v11_t`.
    #[derive(Clone, Copy, Debug)]
    pub struct NetPropertiesV11 = "ncclNetProperties_v11_t", 22807 ..= 99999, 112 bytes {
        /// The key of the NIC in NCCL's topology: unique.
        name: *const c_char = "name" @ 0,
        /// Path of the PCI device; null: a virtual NIC of the first CPU.
        pci_path: *const c_char = "pciPath" @ 8,
        /// Number of the NIC.
        guid: u64 = "guid" @ 16,
        /// `PTR_*` bits.
        ptr_support: c_int = "ptrSupport" @ 24,
        /// A registration is not tied to a communicator.
        reg_is_global: c_int = "regIsGlobal" @ 28,
        /// Receives need a flush.
        force_flush: c_int = "forceFlush" @ 32,
        /// Mbit/s.
        speed: c_int = "speed" @ 36,
        /// Port number.
        port: c_int = "port" @ 40,
        /// Microseconds.
        latency: f32 = "latency" @ 44,
        /// Communicators at most.
        max_comms: c_int = "maxComms" @ 48,
        /// Grouped receives at most.
        max_recvs: c_int = "maxRecvs" @ 52,
        /// `TYPE_*`.
        device_type: c_int = "netDeviceType" @ 56,
        /// Version of that.
        device_version: c_int = "netDeviceVersion" @ 60,
        /// What it consists of.
        virtual_device: VirtualDeviceOld = "vProps" @ 64,
        /// Bytes of a transfer at most.
        max_p2p_bytes: usize = "maxP2pBytes" @ 88,
        /// Bytes of a collective transfer at most.
        max_coll_bytes: usize = "maxCollBytes" @ 96,
        /// Requests in one.
        max_multi_request: c_int = "maxMultiRequestSize" @ 104,
    }
}

layout! {
    /// `ncclNetDeviceHandle_v11_t`: what `createContext` gives, and must keep until `destroyContext`.
    #[derive(Clone, Copy, Debug)]
    pub struct DeviceHandle = "ncclNetDeviceHandle_v11_t", 22807 ..= 99999, 32 bytes {
        /// `TYPE_*`: which device code is run.
        device_type: c_int = "netDeviceType" @ 0,
        /// Version of that.
        device_version: c_int = "netDeviceVersion" @ 4,
        /// Address of the contexts in memory that the GPU reads.
        handle: *mut c_void = "handle" @ 8,
        /// Not read.
        size: usize = "size" @ 16,
        /// 1: NCCL calls `ginProgress` in a loop.
        needs_progress: c_int = "needsProxyProgress" @ 24,
    }
}

layout! {
    /// `ncclNet_v11_t`: the network part that a library must have before its `ncclGinPlugin_v11` is looked for.
    #[derive(Debug)]
    pub struct NetV11 = "ncclNet_v11_t", 22807 ..= 99999, 176 bytes {
        /// For logs.
        name: *const c_char = "name" @ 0,
        /// Once a communicator.
        init: Option<
            unsafe extern "C" fn(*mut *mut c_void, u64, *mut c_void, Logger, *mut c_void) -> Status,
        > = "init" @ 8,
        /// How many NICs there are.
        devices: Option<unsafe extern "C" fn(*mut c_int) -> Status> = "devices" @ 16,
        /// What one NIC is.
        get_properties: Option<unsafe extern "C" fn(c_int, *mut NetPropertiesV11) -> Status> = "getProperties" @ 24,
        /// Makes a handle.
        listen: *const c_void = "listen" @ 32,
        /// Towards a handle.
        connect: *const c_void = "connect" @ 40,
        /// The other side of it.
        accept: *const c_void = "accept" @ 48,
        /// Registers memory.
        reg_mr: *const c_void = "regMr" @ 56,
        /// Registers memory by a descriptor.
        reg_mr_dma_buf: *const c_void = "regMrDmaBuf" @ 64,
        /// Ends that.
        dereg_mr: *const c_void = "deregMr" @ 72,
        /// Begins a send.
        isend: *const c_void = "isend" @ 80,
        /// Begins a receive.
        irecv: *const c_void = "irecv" @ 88,
        /// Begins a flush.
        iflush: *const c_void = "iflush" @ 96,
        /// Looks whether it is done.
        test: *const c_void = "test" @ 104,
        /// Ends a sending side.
        close_send: *const c_void = "closeSend" @ 112,
        /// Ends a receiving side.
        close_recv: *const c_void = "closeRecv" @ 120,
        /// Ends what `listen` made.
        close_listen: *const c_void = "closeListen" @ 128,
        /// For device code.
        get_device_mr: *const c_void = "getDeviceMr" @ 136,
        /// From device code.
        irecv_consumed: *const c_void = "irecvConsumed" @ 144,
        /// Several NICs as one.
        make_v_device: *const c_void = "makeVDevice" @ 152,
        /// Ends what `init` made.
        finalize: Option<unsafe extern "C" fn(*mut c_void) -> Status> = "finalize" @ 160,
        /// A hint.
        set_net_attr: *const c_void = "setNetAttr" @ 168,
    }
}
