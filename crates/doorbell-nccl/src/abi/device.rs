//! What NCCL's device code reads: contexts, tables, window handles, queue pairs. All of it lies in GPU memory.
//!
//! Keys are big-endian here, as device code copies them into work requests; addresses are those the GPU uses. The queue pair of
//! today's headers is [`doorbell_device::layout::GpuQp`].

use std::mem::{offset_of, size_of};

use doorbell_device::layout::{GpuCq, GpuQp};

use super::{Layout, layout};

/// `ncclGinGdakiGlobalGPUBufferTable`: words that device code polls, and the keys by which peers reach theirs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The first word of this context.
    pub buffer: u64,
    /// Array of the ranks' keys, big-endian.
    pub rkeys: u64,
    /// The own key, big-endian.
    pub lkey: u32,
    /// Index of the first word of this context in the whole table.
    pub offset: u32,
}

layout! {
    /// `ncclGinGdakiGPUContext` since 2.30.5; 2.30.3 and 2.30.4 have its first 72 bytes. An array of them is indexed by context.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Context2 = "ncclGinGdakiGPUContext", 23005 ..= 99999, 88 bytes {
        /// Array of the queue pairs to all ranks, the own one included.
        qps: u64 = "gdqp" @ 0,
        /// Array of their companions, which count.
        companions: u64 = "companion_gdqp" @ 8,
        /// Counters.
        counters: Table = "counters_table" @ 16,
        /// Signals.
        signals: Table = "signals_table" @ 40,
        /// Key, big-endian, of eight bytes that take what nobody reads.
        sink_lkey: u32 = "sink_buffer_lkey" @ 64,
        /// 2.32: not 0: a flush after gets appends a DUMP. Padding before that.
        use_dump: u8 = "" @ 68,
        /// Zero.
        reserved: [u8; 3] = "" @ 69,
        /// Array of words a rank: ticket of the last get.
        last_issued_get: u64 = "last_issued_get" @ 72,
        /// Array of words a rank: ticket of the last get that a flush has made visible.
        last_visible_get: u64 = "last_visible_get" @ 80,
    }
}

/// Bytes of a context for device code of 2.30.3 and 2.30.4.
pub const CONTEXT1: usize = offset_of!(Context2, last_issued_get);

/// The table before 2.30: one context a connection, and no offset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableOld {
    /// The first word.
    pub buffer: u64,
    /// Array of the ranks' keys, big-endian.
    pub rkeys: u64,
    /// The own key, big-endian.
    pub lkey: u32,
    /// Zero.
    pub reserved: u32,
}

layout! {
    /// `ncclGinGdakiGPUContext` up to 2.29.7: one a connection.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Context0 = "ncclGinGdakiGPUContext", 22807 ..= 22907, 72 bytes {
        /// Array of the queue pairs to all ranks.
        qps: u64 = "gdqp" @ 0,
        /// Array of their companions.
        companions: u64 = "companion_gdqp" @ 8,
        /// Counters.
        counters: TableOld = "counters_table" @ 16,
        /// Signals.
        signals: TableOld = "signals_table" @ 40,
        /// Key, big-endian, of eight bytes that take what nobody reads.
        sink_lkey: u32 = "sink_buffer_lkey" @ 64,
        /// Zero.
        reserved: u32 = "" @ 68,
    }
}

layout! {
    /// `ncclGinGdakiMemHandle`: a window.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MemHandle = "ncclGinGdakiMemHandle", 22807 ..= 99999, 16 bytes {
        /// Array of the ranks' keys, big-endian.
        rkeys: u64 = "rkeys" @ 0,
        /// The own key, big-endian.
        lkey: u32 = "lkey" @ 8,
        /// Zero.
        reserved: u32 = "" @ 12,
    }
}

/// `doorbell_gpu_dev_verbs_cq` of the old queue pair: 56 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OldCq {
    /// Address of the CQEs.
    pub cqe_daddr: u64,
    /// CQ number.
    pub cq_num: u32,
    /// CQEs.
    pub cqe_num: u32,
    /// Address of the doorbell record; never written.
    pub dbrec: u64,
    /// Consumer index.
    pub cqe_ci: u64,
    /// `cqe_num - 1`.
    pub cqe_mask: u32,
    /// Bytes in a CQE.
    pub cqe_size: u8,
    /// Zero.
    pub reserved0: [u8; 3],
    /// Zero.
    pub cqe_rsvd: u64,
    /// Where the CQEs lie.
    pub mem_type: i32,
    /// Zero.
    pub reserved1: u32,
}

layout! {
    /// `doca_gpu_dev_verbs_qp` in NCCL 2.28.7 to 2.29.7.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OldQp = "doca_gpu_dev_verbs_qp", 22807 ..= 22907, 280 bytes {
        /// As in [`GpuQp`].
        sq_rsvd_index: u64 = "sq_rsvd_index" @ 0,
        /// As in [`GpuQp`].
        sq_ready_index: u64 = "sq_ready_index" @ 8,
        /// As in [`GpuQp`].
        sq_wqe_pi: u64 = "sq_wqe_pi" @ 16,
        /// As in [`GpuQp`].
        sq_num: u32 = "sq_num" @ 24,
        /// As in [`GpuQp`].
        sq_num_shift8: u32 = "sq_num_shift8" @ 28,
        /// As in [`GpuQp`].
        sq_num_shift8_be: u32 = "sq_num_shift8_be" @ 32,
        /// One to four segments; [`GpuQp`] has five.
        sq_num_shift8_be_ds: [u32; 4] = "sq_num_shift8_be_1ds" @ 36,
        /// As in [`GpuQp`], one word earlier.
        sq_lock: i32 = "sq_lock" @ 52,
        /// As in [`GpuQp`], one word earlier.
        sq_wqe_num: u16 = "sq_wqe_num" @ 56,
        /// As in [`GpuQp`], one word earlier.
        sq_wqe_mask: u16 = "sq_wqe_mask" @ 58,
        /// Zero.
        reserved0: u32 = "" @ 60,
        /// As in [`GpuQp`].
        sq_wqe_daddr: u64 = "sq_wqe_daddr" @ 64,
        /// As in [`GpuQp`].
        sq_dbrec: u64 = "sq_dbrec" @ 72,
        /// As in [`GpuQp`].
        sq_db: u64 = "sq_db" @ 80,
        /// The receive queue, which NCCL does not use: zero.
        rq: [u64; 9] = "rq_num" @ 88,
        /// As in [`GpuQp`], eight bytes shorter.
        cq_sq: OldCq = "cq_sq" @ 160,
        /// Zero.
        cq_rq: OldCq = "cq_rq" @ 216,
        /// How to ring.
        nic_handler: i32 = "nic_handler" @ 272,
        /// Where the ring lies.
        mem_type: i32 = "mem_type" @ 276,
    }
}

impl From<&GpuQp> for OldQp {
    fn from(qp: &GpuQp) -> Self {
        let [ds1, ds2, ds3, ds4, _] = qp.sq_num_shift8_be_ds;
        Self {
            sq_rsvd_index: qp.sq_rsvd_index,
            sq_ready_index: qp.sq_ready_index,
            sq_wqe_pi: qp.sq_wqe_pi,
            sq_num: qp.sq_num,
            sq_num_shift8: qp.sq_num_shift8,
            sq_num_shift8_be: qp.sq_num_shift8_be,
            sq_num_shift8_be_ds: [ds1, ds2, ds3, ds4],
            sq_lock: qp.sq_lock,
            sq_wqe_num: qp.sq_wqe_num,
            sq_wqe_mask: qp.sq_wqe_mask,
            reserved0: 0,
            sq_wqe_daddr: qp.sq_wqe_daddr,
            sq_dbrec: qp.sq_dbrec,
            sq_db: qp.sq_db,
            rq: [0; 9],
            cq_sq: OldCq {
                cqe_daddr: qp.cq_sq.cqe_daddr,
                cq_num: qp.cq_sq.cq_num,
                cqe_num: qp.cq_sq.cqe_num,
                dbrec: qp.cq_sq.dbrec,
                cqe_ci: qp.cq_sq.cqe_ci,
                cqe_mask: qp.cq_sq.cqe_mask,
                cqe_size: qp.cq_sq.cqe_size,
                cqe_rsvd: qp.cq_sq.cqe_rsvd,
                mem_type: qp.cq_sq.mem_type,
                ..OldCq::default()
            },
            cq_rq: OldCq::default(),
            nic_handler: qp.nic_handler,
            mem_type: qp.mem_type,
        }
    }
}

const _: () = {
    assert!(size_of::<Table>() == 24 && size_of::<TableOld>() == 24);
    assert!(size_of::<OldCq>() == 56 && size_of::<GpuCq>() == 64);
    assert!(CONTEXT1 == 72);
};

/// The queue pair of today's headers, for the comparison with them.
pub fn gpu_qp_layout() -> Layout {
    Layout {
        c_name: "doca_gpu_dev_verbs_qp",
        releases: (23003, 99999),
        size: size_of::<GpuQp>(),
        fields: vec![
            ("sq_rsvd_index", offset_of!(GpuQp, sq_rsvd_index)),
            ("sq_ready_index", offset_of!(GpuQp, sq_ready_index)),
            ("sq_wqe_pi", offset_of!(GpuQp, sq_wqe_pi)),
            ("sq_num", offset_of!(GpuQp, sq_num)),
            ("sq_num_shift8", offset_of!(GpuQp, sq_num_shift8)),
            ("sq_num_shift8_be", offset_of!(GpuQp, sq_num_shift8_be)),
            (
                "sq_num_shift8_be_1ds",
                offset_of!(GpuQp, sq_num_shift8_be_ds),
            ),
            ("sq_lock", offset_of!(GpuQp, sq_lock)),
            ("sq_wqe_num", offset_of!(GpuQp, sq_wqe_num)),
            ("sq_wqe_mask", offset_of!(GpuQp, sq_wqe_mask)),
            ("sq_wqe_daddr", offset_of!(GpuQp, sq_wqe_daddr)),
            ("sq_dbrec", offset_of!(GpuQp, sq_dbrec)),
            ("sq_db", offset_of!(GpuQp, sq_db)),
            ("cq_sq", offset_of!(GpuQp, cq_sq)),
            ("cq_sq.cqe_daddr", offset_of!(GpuQp, cq_sq)),
            (
                "cq_sq.cqe_ci",
                offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_ci),
            ),
            (
                "cq_sq.cqe_mask",
                offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_mask),
            ),
            (
                "cq_sq.cqe_rsvd",
                offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_rsvd),
            ),
            ("nic_handler", offset_of!(GpuQp, nic_handler)),
            ("mem_type", offset_of!(GpuQp, mem_type)),
        ],
    }
}
