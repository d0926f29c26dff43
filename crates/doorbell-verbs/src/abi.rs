//! What libibverbs lays out in memory, declared anew: only what this crate reads or writes. The ABI has been stable since rdma-core 17.
//!
//! Sizes and offsets are asserted here for x86-64 and compared with the real headers by the test `layout`, where those are installed.
//! Fields that are in network byte order say so.

#![allow(missing_docs, reason = "names are those of the verbs manual pages")]

use core::ffi::{c_char, c_int, c_uint, c_void};

/// A GID, as its bytes.
pub type Gid = [u8; 16];

macro_rules! numbers {
    ($($(#[$doc:meta])* $module:ident: $ty:ty { $($(#[$own:meta])* $name:ident = $value:expr,)* })*) => {$(
        $(#[$doc])*
        pub mod $module {
            $($(#[$own])* pub const $name: $ty = $value;)*
        }
    )*};
}

numbers! {
    /// `enum ibv_wr_opcode`.
    wr_opcode: u32 {
        WRITE = 0,
        WRITE_IMM = 1,
        SEND = 2,
        SEND_IMM = 3,
        READ = 4,
        COMPARE_SWAP = 5,
        FETCH_ADD = 6,
    }
    /// `enum ibv_send_flags`.
    send_flags: u32 {
        FENCE = 1,
        SIGNALED = 2,
        SOLICITED = 4,
        INLINE = 8,
    }
    /// `enum ibv_wc_status`.
    wc_status: u32 {
        SUCCESS = 0,
        LOC_LEN_ERR = 1,
        LOC_QP_OP_ERR = 2,
        LOC_EEC_OP_ERR = 3,
        LOC_PROT_ERR = 4,
        WR_FLUSH_ERR = 5,
        MW_BIND_ERR = 6,
        BAD_RESP_ERR = 7,
        LOC_ACCESS_ERR = 8,
        REM_INV_REQ_ERR = 9,
        REM_ACCESS_ERR = 10,
        REM_OP_ERR = 11,
        RETRY_EXC_ERR = 12,
        RNR_RETRY_EXC_ERR = 13,
        REM_INV_RD_REQ_ERR = 15,
        REM_ABORT_ERR = 16,
        FATAL_ERR = 19,
        RESP_TIMEOUT_ERR = 20,
        GENERAL_ERR = 21,
    }
    /// `enum ibv_wc_opcode`.
    wc_opcode: u32 {
        SEND = 0,
        RDMA_WRITE = 1,
        RDMA_READ = 2,
        COMP_SWAP = 3,
        FETCH_ADD = 4,
        RECV = 128,
        RECV_RDMA_WITH_IMM = 129,
    }
    /// `enum ibv_wc_flags`.
    wc_flags: u32 {
        WITH_IMM = 2,
    }
    /// `enum ibv_qp_state`.
    qp_state: u32 {
        RESET = 0,
        INIT = 1,
        RTR = 2,
        RTS = 3,
        SQD = 4,
        SQE = 5,
        ERR = 6,
    }
    /// `enum ibv_qp_type`.
    qp_type: u32 {
        RC = 2,
        /// Of the driver's own kind.
        DRIVER = 0xff,
    }
    /// `enum ibv_qp_attr_mask`.
    qp_mask: i32 {
        STATE = 1,
        ACCESS_FLAGS = 1 << 3,
        PKEY_INDEX = 1 << 4,
        PORT = 1 << 5,
        QKEY = 1 << 6,
        AV = 1 << 7,
        PATH_MTU = 1 << 8,
        TIMEOUT = 1 << 9,
        RETRY_CNT = 1 << 10,
        RNR_RETRY = 1 << 11,
        RQ_PSN = 1 << 12,
        MAX_QP_RD_ATOMIC = 1 << 13,
        MIN_RNR_TIMER = 1 << 15,
        SQ_PSN = 1 << 16,
        MAX_DEST_RD_ATOMIC = 1 << 17,
        DEST_QPN = 1 << 20,
    }
    /// `enum ibv_qp_init_attr_mask`.
    init_mask: u32 {
        PD = 1,
        SEND_OPS_FLAGS = 1 << 6,
    }
    /// `enum ibv_qp_create_send_ops_flags`.
    send_ops: u64 {
        RDMA_WRITE = 1,
        RDMA_WRITE_WITH_IMM = 1 << 1,
        SEND = 1 << 2,
        SEND_WITH_IMM = 1 << 3,
        RDMA_READ = 1 << 4,
        ATOMIC_CMP_AND_SWP = 1 << 5,
        ATOMIC_FETCH_AND_ADD = 1 << 6,
    }
    /// `enum ibv_access_flags`.
    access: u32 {
        LOCAL_WRITE = 1,
        REMOTE_WRITE = 1 << 1,
        REMOTE_READ = 1 << 2,
        REMOTE_ATOMIC = 1 << 3,
    }
    /// `enum ibv_port_state`.
    port_state: u32 {
        DOWN = 1,
        INIT = 2,
        ARMED = 3,
        ACTIVE = 4,
    }
    /// Link layers of a port.
    link_layer: u8 {
        UNSPECIFIED = 0,
        INFINIBAND = 1,
        ETHERNET = 2,
    }
    /// `enum ibv_gid_type`.
    gid_type: u32 {
        IB = 0,
        ROCE_V1 = 1,
        ROCE_V2 = 2,
    }
    /// `enum ibv_atomic_cap`.
    atomic_cap: u32 {
        NONE = 0,
        HCA = 1,
        GLOB = 2,
    }
    /// `enum ibv_event_type`.
    event_type: u32 {
        CQ_ERR = 0,
        QP_FATAL = 1,
        QP_REQ_ERR = 2,
        QP_ACCESS_ERR = 3,
        DEVICE_FATAL = 8,
        PORT_ACTIVE = 9,
        PORT_ERR = 10,
    }
    /// `enum ibv_node_type`.
    node_type: i32 {
        CA = 1,
        RNIC = 4,
        USNIC = 5,
        USNIC_UDP = 6,
        UNSPECIFIED = 7,
    }
}

/// `struct ibv_device`.
#[repr(C)]
pub struct RawDevice {
    pub ops: [usize; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

pub type PollCq = unsafe extern "C" fn(*mut RawCq, c_int, *mut Wc) -> c_int;
pub type PostSend = unsafe extern "C" fn(*mut RawQp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub type PostRecv = unsafe extern "C" fn(*mut RawQp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// `struct ibv_context_ops`: what inline functions call.
#[repr(C)]
pub struct ContextOps {
    pub before_poll: [usize; 11],
    pub poll_cq: Option<PollCq>,
    pub req_notify_cq: usize,
    pub before_send: [usize; 12],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub after: [usize; 5],
}

/// `struct ibv_context`.
#[repr(C)]
pub struct RawContext {
    pub device: *mut RawDevice,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    /// All ones: this is the end of a `struct verbs_context`.
    pub abi_compat: usize,
}

pub type CreateQpEx = unsafe extern "C" fn(*mut RawContext, *mut QpInitAttrEx) -> *mut RawQp;

/// The end of `struct verbs_context`, which grows at its beginning: what lies before the context.
#[repr(C)]
pub struct ExtendedContext {
    pub create_qp_ex: Option<CreateQpEx>,
    pub between: [usize; 4],
    pub placeholder: u64,
    /// Bytes of the whole structure, the context included.
    pub size: usize,
    pub context: RawContext,
}

/// `struct ibv_pd`.
#[repr(C)]
pub struct RawPd {
    pub context: *mut RawContext,
    pub handle: u32,
}

/// `struct ibv_ah`: another port as a device knows it.
#[repr(C)]
pub struct RawAh {
    pub context: *mut RawContext,
    pub pd: *mut RawPd,
    pub handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub struct RawMr {
    pub context: *mut RawContext,
    pub pd: *mut RawPd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_cq`.
#[repr(C)]
pub struct RawCq {
    pub context: *mut RawContext,
    pub channel: *mut c_void,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

/// `struct ibv_qp`.
#[repr(C)]
pub struct RawQp {
    pub context: *mut RawContext,
    pub qp_context: *mut c_void,
    pub pd: *mut RawPd,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

/// `struct ibv_qp_ex`: a queue pair whose work requests are built by calls.
#[repr(C)]
pub struct RawQpEx {
    pub base: RawQp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: c_uint,
    pub compare_swap: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u64, u64)>,
    pub fetch_add: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u64)>,
    pub bind_mw: usize,
    pub local_inv: usize,
    pub read: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64)>,
    pub write: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64)>,
    /// The immediate is big-endian.
    pub write_imm: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u32)>,
    pub send: Option<unsafe extern "C" fn(*mut RawQpEx)>,
    /// The immediate is big-endian.
    pub send_imm: Option<unsafe extern "C" fn(*mut RawQpEx, u32)>,
    pub send_inv: usize,
    pub send_tso: usize,
    pub set_ud_addr: Option<unsafe extern "C" fn(*mut RawQpEx, *mut RawAh, u32, u32)>,
    pub set_xrc_srqn: usize,
    pub set_inline: Option<unsafe extern "C" fn(*mut RawQpEx, *mut c_void, usize)>,
    pub set_inline_list: usize,
    pub set_sge: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64, u32)>,
    pub set_sge_list: Option<unsafe extern "C" fn(*mut RawQpEx, usize, *const Sge)>,
    pub start: Option<unsafe extern "C" fn(*mut RawQpEx)>,
    pub complete: Option<unsafe extern "C" fn(*mut RawQpEx) -> c_int>,
    pub abort: Option<unsafe extern "C" fn(*mut RawQpEx)>,
}

/// `struct ibv_sge`: a piece of local memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`. `target` is a union: address, key for RDMA; address, compare or addend, swap, key for atomics.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: c_uint,
    /// Big-endian.
    pub imm: u32,
    pub target: [u64; 4],
    pub qp_type: u64,
    pub rest: [u64; 6],
}

impl SendWr {
    /// All zeroes.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        next: core::ptr::null_mut(),
        sg_list: core::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm: 0,
        target: [0; 4],
        qp_type: 0,
        rest: [0; 6],
    };
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`: a completion.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    pub wr_id: u64,
    /// [`wc_status`].
    pub status: u32,
    /// [`wc_opcode`]; of successful completions only.
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Big-endian.
    pub imm: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_init_attr_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttrEx {
    pub qp_context: *mut c_void,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *mut RawPd,
    pub xrcd: *mut c_void,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut c_void,
    pub rx_hash: [u64; 3],
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalRoute {
    pub dgid: GidBytes,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// A GID with the alignment of C's union.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub struct GidBytes(pub Gid);

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub access: c_uint,
    pub cap: QpCap,
    pub ah: AhAttr,
    pub alt_ah: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawDeviceAttr {
    pub fw_ver: [c_char; 64],
    /// Big-endian.
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub others: [c_int; 14],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`, with room for what newer releases append.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RawPortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub room: [u32; 8],
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RawGidEntry {
    pub gid: GidBytes,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// `struct ibv_async_event`. `element` is a pointer to the queue pair or CQ, or a port number.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawAsyncEvent {
    pub element: *mut c_void,
    pub event_type: u32,
}

/// (structure, field, offset) as C names them, and (structure, size): what the test `layout` compares with the headers.
pub const LAYOUT: &[(&str, &str, usize)] = {
    use core::mem::offset_of;
    macro_rules! rows {
        ($($c:literal $ty:ident { $($field:ident = $name:literal,)* })*) => {
            &[$($(($c, $name, offset_of!($ty, $field)),)* ($c, "", size_of::<$ty>()),)*]
        };
    }
    rows! {
        "ibv_device" RawDevice { node_type = "node_type", transport_type = "transport_type", name = "name", dev_name = "dev_name", dev_path = "dev_path", ibdev_path = "ibdev_path", }
        "ibv_context_ops" ContextOps { poll_cq = "poll_cq", req_notify_cq = "req_notify_cq", post_send = "post_send", post_recv = "post_recv", }
        "ibv_context" RawContext { device = "device", ops = "ops", cmd_fd = "cmd_fd", async_fd = "async_fd", num_comp_vectors = "num_comp_vectors", abi_compat = "abi_compat", }
        "ibv_pd" RawPd { context = "context", handle = "handle", }
        "ibv_ah" RawAh { context = "context", pd = "pd", handle = "handle", }
        "ibv_mr" RawMr { context = "context", pd = "pd", addr = "addr", length = "length", handle = "handle", lkey = "lkey", rkey = "rkey", }
        "ibv_cq" RawCq { context = "context", cqe = "cqe", }
        "ibv_qp" RawQp { context = "context", qp_context = "qp_context", pd = "pd", qp_num = "qp_num", state = "state", qp_type = "qp_type", }
        "ibv_sge" Sge { addr = "addr", length = "length", lkey = "lkey", }
        "ibv_send_wr" SendWr { wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode", send_flags = "send_flags", imm = "imm_data", target = "wr", qp_type = "qp_type", }
        "ibv_recv_wr" RecvWr { wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge", }
        "ibv_wc" Wc { wr_id = "wr_id", status = "status", opcode = "opcode", vendor_err = "vendor_err", byte_len = "byte_len", imm = "imm_data", qp_num = "qp_num", src_qp = "src_qp", wc_flags = "wc_flags", slid = "slid", sl = "sl", }
        "ibv_qp_cap" QpCap { max_send_wr = "max_send_wr", max_recv_wr = "max_recv_wr", max_send_sge = "max_send_sge", max_recv_sge = "max_recv_sge", max_inline_data = "max_inline_data", }
        "ibv_qp_init_attr" QpInitAttr { qp_context = "qp_context", send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", cap = "cap", qp_type = "qp_type", sq_sig_all = "sq_sig_all", }
        "ibv_qp_init_attr_ex" QpInitAttrEx { send_cq = "send_cq", cap = "cap", qp_type = "qp_type", sq_sig_all = "sq_sig_all", comp_mask = "comp_mask", pd = "pd", xrcd = "xrcd", create_flags = "create_flags", max_tso_header = "max_tso_header", rwq_ind_tbl = "rwq_ind_tbl", rx_hash = "rx_hash_conf", source_qpn = "source_qpn", send_ops_flags = "send_ops_flags", }
        "ibv_global_route" GlobalRoute { dgid = "dgid", flow_label = "flow_label", sgid_index = "sgid_index", hop_limit = "hop_limit", traffic_class = "traffic_class", }
        "ibv_ah_attr" AhAttr { grh = "grh", dlid = "dlid", sl = "sl", src_path_bits = "src_path_bits", static_rate = "static_rate", is_global = "is_global", port_num = "port_num", }
        "ibv_qp_attr" QpAttr { qp_state = "qp_state", cur_qp_state = "cur_qp_state", path_mtu = "path_mtu", path_mig_state = "path_mig_state", qkey = "qkey", rq_psn = "rq_psn", sq_psn = "sq_psn", dest_qp_num = "dest_qp_num", access = "qp_access_flags", cap = "cap", ah = "ah_attr", alt_ah = "alt_ah_attr", pkey_index = "pkey_index", en_sqd_async_notify = "en_sqd_async_notify", max_rd_atomic = "max_rd_atomic", max_dest_rd_atomic = "max_dest_rd_atomic", min_rnr_timer = "min_rnr_timer", port_num = "port_num", timeout = "timeout", retry_cnt = "retry_cnt", rnr_retry = "rnr_retry", rate_limit = "rate_limit", }
        "ibv_device_attr" RawDeviceAttr { fw_ver = "fw_ver", node_guid = "node_guid", vendor_id = "vendor_id", vendor_part_id = "vendor_part_id", hw_ver = "hw_ver", max_qp = "max_qp", max_qp_wr = "max_qp_wr", device_cap_flags = "device_cap_flags", max_sge = "max_sge", max_sge_rd = "max_sge_rd", max_cqe = "max_cqe", max_qp_rd_atom = "max_qp_rd_atom", max_qp_init_rd_atom = "max_qp_init_rd_atom", atomic_cap = "atomic_cap", max_pkeys = "max_pkeys", local_ca_ack_delay = "local_ca_ack_delay", phys_port_cnt = "phys_port_cnt", }
        "ibv_gid_entry" RawGidEntry { gid = "gid", gid_index = "gid_index", port_num = "port_num", gid_type = "gid_type", ndev_ifindex = "ndev_ifindex", }
        "ibv_async_event" RawAsyncEvent { element = "element", event_type = "event_type", }
    }
};

/// As [`LAYOUT`], of structures that are longer here or there: fields only.
pub const FIELDS: &[(&str, &str, usize)] = {
    use core::mem::offset_of;
    macro_rules! rows {
        ($($c:literal $ty:ident { $($field:ident = $name:literal,)* })*) => {
            &[$($(($c, $name, offset_of!($ty, $field)),)*)*]
        };
    }
    rows! {
        "ibv_port_attr" RawPortAttr { state = "state", max_mtu = "max_mtu", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len", max_msg_sz = "max_msg_sz", lid = "lid", sm_lid = "sm_lid", lmc = "lmc", sm_sl = "sm_sl", active_width = "active_width", active_speed = "active_speed", phys_state = "phys_state", link_layer = "link_layer", flags = "flags", }
        "ibv_qp_ex" RawQpEx { base = "qp_base", comp_mask = "comp_mask", wr_id = "wr_id", wr_flags = "wr_flags", compare_swap = "wr_atomic_cmp_swp", fetch_add = "wr_atomic_fetch_add", read = "wr_rdma_read", write = "wr_rdma_write", write_imm = "wr_rdma_write_imm", send = "wr_send", send_imm = "wr_send_imm", set_ud_addr = "wr_set_ud_addr", set_inline = "wr_set_inline_data", set_sge = "wr_set_sge", set_sge_list = "wr_set_sge_list", start = "wr_start", complete = "wr_complete", abort = "wr_abort", }
    }
};

#[cfg(target_arch = "x86_64")]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<RawDevice>() == 664);
    assert!(size_of::<ContextOps>() == 256 && offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(size_of::<RawContext>() == 328 && offset_of!(RawContext, abi_compat) == 320);
    assert!(offset_of!(ExtendedContext, context) - offset_of!(ExtendedContext, create_qp_ex) == 56);
    assert!(offset_of!(ExtendedContext, context) - offset_of!(ExtendedContext, size) == 8);
    assert!(size_of::<RawMr>() == 48 && size_of::<RawCq>() == 128 && size_of::<RawQp>() == 160);
    assert!(size_of::<SendWr>() == 128 && size_of::<RecvWr>() == 32 && size_of::<Wc>() == 48);
    assert!(size_of::<QpInitAttr>() == 64 && size_of::<QpInitAttrEx>() == 136);
    assert!(size_of::<AhAttr>() == 32 && size_of::<QpAttr>() == 144);
    assert!(size_of::<RawDeviceAttr>() == 232 && size_of::<RawGidEntry>() == 32);
    assert!(offset_of!(RawQpEx, start) == 320 && size_of::<RawQpEx>() == 344);
};
