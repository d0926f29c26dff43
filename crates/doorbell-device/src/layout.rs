//! The structures a kernel gets: a queue pair as DOCA GPUNetIO lays it out, and what Doorbell adds beside it.
//!
//! [`GpuQp`] has the 296 bytes and offsets of `doca_gpu_dev_verbs_qp` (DOCA GPUNetIO 2.0.1 to 4.1, NCCL 2.30.3 to 2.32.3,
//! NVSHMEM 3.8), so NVIDIA's public headers drive our queues unchanged. Everything of ours lives in [`QpExt`], which may be absent.
//! All are plain bytes: the host library fills them in and copies them to memory on which the GPU's atomics work.

use core::mem::{offset_of, size_of};

/// `sq_rsvd_index` with this bit set: a thread of ours saw an error on the QP, and every later post is refused at once.
///
/// The reservation reads that word anyway, so the check costs nothing. Only device code of ours sets it, and only on a QP
/// that is already in error; a reset by the host (which rewrites the structure) clears it.
pub const POISON: u64 = 1 << 63;

/// `sq_ready_index` with this bit set: a thread of ours is ringing, and will ring again for whatever is published meanwhile.
///
/// Clear whenever no call of ours is in flight, so foreign code may use the QP before and after ours, not at the same time.
pub const RINGING: u64 = 1 << 63;

/// Largest ring, in 64-byte slots: `sq_wqe_num` has 16 bits, and a 16-bit CQE counter must tell a full ring from an empty one.
pub const MAX_DEPTH: u32 = 32_768;

/// A send queue and its completion queue, as DOCA's `doca_gpu_dev_verbs_qp` lays them out (296 bytes).
///
/// Fields are in the host's byte order unless named `_be`. The GPU changes `sq_rsvd_index`, `sq_ready_index`, `sq_wqe_pi`,
/// `sq_lock` and `cq_sq.cqe_ci`; the rest is constant while kernels run.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuQp {
    /// Next slot to hand out, counted since the last reset (see [`POISON`]).
    pub sq_rsvd_index: u64,
    /// Slots below this one hold finished WQEs (see [`RINGING`]).
    pub sq_ready_index: u64,
    /// Slots below this one have been rung.
    pub sq_wqe_pi: u64,
    /// QP number, 24 bits.
    pub sq_num: u32,
    /// `sq_num << 8`.
    pub sq_num_shift8: u32,
    /// `sq_num << 8`, big-endian.
    pub sq_num_shift8_be: u32,
    /// `sq_num << 8 | n`, big-endian, for WQEs of n = 1 to 5 sixteen-byte segments.
    pub sq_num_shift8_be_ds: [u32; 5],
    /// DOCA's submission lock: 0 free, 1 held.
    pub sq_lock: i32,
    /// Slots in the ring; a power of two, at most [`MAX_DEPTH`].
    pub sq_wqe_num: u16,
    /// `sq_wqe_num - 1`.
    pub sq_wqe_mask: u16,
    /// Address of the ring.
    pub sq_wqe_daddr: u64,
    /// Address of the send doorbell record (a big-endian u32).
    pub sq_dbrec: u64,
    /// Address of the doorbell word (u64), or of the producer word with [`NicHandler::ProducerWord`].
    pub sq_db: u64,
    /// Zero.
    pub reserved0: [u8; 72],
    /// The completion queue of this send queue.
    pub cq_sq: GpuCq,
    /// Zero.
    pub reserved1: [u8; 64],
    /// How to ring: a [`NicHandler`] value.
    pub nic_handler: i32,
    /// Where the ring lies: a [`MemType`] value (DOCA only asserts on it).
    pub mem_type: i32,
}

/// A completion queue inside a [`GpuQp`] (64 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuCq {
    /// Address of the CQEs (64 bytes each).
    pub cqe_daddr: u64,
    /// CQ number, 24 bits.
    pub cq_num: u32,
    /// CQEs in the ring; equal to the depth of the send queue, for a collapsed CQ too.
    pub cqe_num: u32,
    /// Address of the CQ's doorbell record; never written (completion overrun is ignored).
    pub dbrec: u64,
    /// Consumer index: every send slot below it is known to be complete.
    pub cqe_ci: u64,
    /// `cqe_num - 1`.
    pub cqe_mask: u32,
    /// Bytes in a CQE: 64.
    pub cqe_size: u8,
    /// Bit 0: collapsed (a [`CqKind`] value).
    pub cq_type: u8,
    /// Zero.
    pub reserved0: [u8; 2],
    /// DOCA's count of reserved CQEs; zero.
    pub cqe_rsvd: u64,
    /// A [`MemType`] value.
    pub mem_type: i32,
    /// Zero.
    pub reserved1: [u8; 12],
}

/// How posted WQEs are announced (`nic_handler`).
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NicHandler {
    /// A u64 in memory holds the producer index in native byte order; a CPU thread reads it (DOCA: CPU_PROXY).
    ProducerWord = 1,
    /// Doorbell record, then the doorbell word (DOCA: GPU_SM_DB).
    DoorbellRecord = 2,
    /// The doorbell word alone (DOCA: GPU_SM_NO_DBR).
    DoorbellOnly = 10,
}

impl NicHandler {
    /// The handler that DOCA's device code takes `value` for: whatever is not 2 or 10 is the producer word.
    #[inline(always)]
    pub const fn from_raw(value: i32) -> Self {
        match value {
            2 => Self::DoorbellRecord,
            10 => Self::DoorbellOnly,
            _ => Self::ProducerWord,
        }
    }
}

/// How completions are written (`cq_type`, bit 0).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CqKind {
    /// CQE number i lies in slot i modulo `cqe_num`: takes signalled one-slot WQEs only, so that CQE and WQE indexes agree.
    PerSlot = 0,
    /// One CQE, overwritten by each completion.
    Collapsed = 1,
}

impl CqKind {
    /// The kind that a `cq_type` byte names.
    #[inline(always)]
    pub const fn from_raw(value: u8) -> Self {
        if value & 1 == 0 {
            Self::PerSlot
        } else {
            Self::Collapsed
        }
    }
}

/// Where a queue lies (`mem_type`).
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemType {
    /// DOCA leaves the choice open.
    Auto = 0,
    /// Host memory that the GPU reads and writes.
    Host = 1,
    /// GPU memory.
    Gpu = 2,
}

/// What [`GpuQp::new`] needs. Addresses are those the kernel uses.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// QP number, 24 bits.
    pub qpn: u32,
    /// Address of the send ring, 64-byte aligned.
    pub ring: u64,
    /// Slots in the ring; a power of two from 1 to [`MAX_DEPTH`].
    pub depth: u32,
    /// Where the ring lies.
    pub ring_mem: MemType,
    /// Address of the CQEs, 64-byte aligned: `depth` of them, or one for a collapsed CQ. Initialise byte 63 of each to 0xf1.
    pub cq: u64,
    /// CQ number, 24 bits.
    pub cqn: u32,
    /// Where the CQEs lie.
    pub cq_mem: MemType,
    /// How completions are written.
    pub cq_kind: CqKind,
    /// Address of the doorbell record; 0 if the handler uses none.
    pub dbrec: u64,
    /// Address of the doorbell or producer word.
    pub db: u64,
    /// How to ring.
    pub handler: NicHandler,
}

impl GpuQp {
    /// An idle QP.
    ///
    /// # Panics
    /// If `depth` is not a power of two from 1 to [`MAX_DEPTH`], or a number has more than 24 bits: the caller builds them.
    pub fn new(init: &QpInit) -> Self {
        assert!(
            init.depth.is_power_of_two() && init.depth <= MAX_DEPTH,
            "send queue depth {} is not a power of two from 1 to {MAX_DEPTH}",
            init.depth
        );
        assert!(
            init.qpn >> 24 == 0,
            "QP number {:#x} has more than 24 bits",
            init.qpn
        );
        assert!(
            init.cqn >> 24 == 0,
            "CQ number {:#x} has more than 24 bits",
            init.cqn
        );
        let shifted = init.qpn << 8;
        let ds = |n: u32| (shifted | n).to_be();
        Self {
            sq_rsvd_index: 0,
            sq_ready_index: 0,
            sq_wqe_pi: 0,
            sq_num: init.qpn,
            sq_num_shift8: shifted,
            sq_num_shift8_be: shifted.to_be(),
            sq_num_shift8_be_ds: [ds(1), ds(2), ds(3), ds(4), ds(5)],
            sq_lock: 0,
            sq_wqe_num: init.depth as u16,
            sq_wqe_mask: (init.depth - 1) as u16,
            sq_wqe_daddr: init.ring,
            sq_dbrec: init.dbrec,
            sq_db: init.db,
            reserved0: [0; 72],
            cq_sq: GpuCq {
                cqe_daddr: init.cq,
                cq_num: init.cqn,
                cqe_num: init.depth,
                dbrec: 0,
                cqe_ci: 0,
                cqe_mask: init.depth - 1,
                cqe_size: 64,
                cq_type: init.cq_kind as u8,
                reserved0: [0; 2],
                cqe_rsvd: 0,
                mem_type: init.cq_mem as i32,
                reserved1: [0; 12],
            },
            reserved1: [0; 64],
            nic_handler: init.handler as i32,
            mem_type: init.ring_mem as i32,
        }
    }

    /// The bytes to copy to the GPU.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: repr(C) with every gap named, so no byte is uninitialised (sizes and offsets are asserted below).
        unsafe { core::mem::transmute(*self) }
    }
}

/// First word of a [`QpExt`]: "DBQX" in memory order.
pub const EXT_MAGIC: u32 = u32::from_le_bytes(*b"DBQX");
/// Version of [`QpExt`] that this code reads and writes.
pub const EXT_VERSION: u32 = 2;

/// [`QpExt::flags`]: only the doorbell triggers the engine, which never acts on the record alone (a software HCA). The record
/// may then be written ahead of the fence, and one fence orders WQEs, record and doorbell.
pub const EXT_SOFT_ENGINE: u32 = 1;

/// [`QpExt::state`]: in order.
pub const STATE_READY: u32 = 1;
/// [`QpExt::state`]: a thread of ours saw an error; [`QpExt::error`] says which.
pub const STATE_ERROR: u32 = 2;

/// What Doorbell keeps beside a QP, in GPU memory (256 bytes, 64-byte aligned). Ours; versioned.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpExt {
    /// [`EXT_MAGIC`].
    pub magic: u32,
    /// [`EXT_VERSION`].
    pub version: u32,
    /// [`STATE_READY`] or [`STATE_ERROR`]; changed by device code, for the host to look at.
    pub state: u32,
    /// `EXT_*` flags.
    pub flags: u32,
    /// The first error that device code saw, an [`ErrorWord`] value; set once (compare-and-swap from 0) and kept.
    pub error: u64,
    /// Address of the host's [`ErrorWord`] for this QP, or 0.
    pub host_error: u64,
    /// Address (or offset, for a zero-based region) of 8 bytes that take what atomics return when nobody asks for it.
    pub sink_addr: u64,
    /// Key of the sink's region, host byte order.
    pub sink_key: u32,
    /// Zero.
    pub reserved0: u32,
    /// Address of the companion's [`GpuQp`], or 0: the QP on which `put_counter` waits and counts.
    pub companion_qp: u64,
    /// Address of the companion's [`QpExt`], or 0.
    pub companion_ext: u64,
    /// Receive queue: address of the ring, 16-byte aligned; 0 if the QP has none.
    pub rq_addr: u64,
    /// Receive queue: address of its doorbell record (a big-endian u32 of 16 bits).
    pub rq_dbrec: u64,
    /// Receive queue: slots - 1.
    pub rq_mask: u32,
    /// Receive queue: bytes a slot, 16 times a power of two.
    pub rq_stride: u32,
    /// Receive queue: next receive to hand out (see [`POISON`], which here only receive calls set).
    pub rq_pi: u64,
    /// Receive queue: every receive below it is known to be complete.
    pub rq_ci: u64,
    /// Receive queue: its completion queue, one CQE a receive ([`CqKind::PerSlot`]); its own consumer index is not used.
    pub rq_cq: GpuCq,
    /// Receive queue: every receive below it is in the doorbell record.
    pub rq_ready: u64,
    /// Receive queue: the first error of a receive that device code saw, an [`ErrorWord`] value; set once and kept.
    pub rq_error: u64,
    /// Address of a [`WaitNote`] in host memory, or 0.
    pub wait_note: u64,
    /// Zero.
    pub reserved1: [u8; 48],
}

/// [`WaitNote::kind`]: a 64-bit word is waited for.
pub const WAIT_WORD: u64 = 1;
/// [`WaitNote::kind`]: a WQE's completion is.
pub const WAIT_TICKET: u64 = 2;
/// [`WaitNote::kind`]: a receive's is.
pub const WAIT_RECEIVE: u64 = 3;
/// [`WaitNote::kind`] with this bit set: the wait gave up at its deadline.
pub const WAIT_OVER: u64 = 1 << 8;

/// What a thread of ours waits for, written once the wait is long, in host memory (64 bytes).
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitNote {
    /// `WAIT_*`; 0 while nobody waits long, and while the note changes.
    pub kind: u64,
    /// Address of the word, as the kernel has it, or number of the queue pair.
    pub at: u64,
    /// The value that is waited for; the index of a WQE or a receive.
    pub wanted: u64,
    /// What was there last; how many are complete.
    pub have: u64,
    /// Nanoseconds of the kernel's clock when the wait was first noted.
    pub since: u64,
    /// The same when it was noted last.
    pub seen: u64,
    /// Zero.
    pub reserved: [u64; 2],
}

/// What [`QpExt::set_rq`] needs. Addresses are those the kernel uses.
#[derive(Clone, Copy, Debug)]
pub struct RqInit {
    /// Address of the ring of receives, 16-byte aligned.
    pub ring: u64,
    /// Receives in it; a power of two from 1 to [`MAX_DEPTH`].
    pub depth: u32,
    /// Bytes from one receive to the next: 16 times a power of two.
    pub stride: u32,
    /// Address of the doorbell record.
    pub dbrec: u64,
    /// Address of the CQEs, 64-byte aligned: `depth` of them. Initialise byte 63 of each to 0xf1.
    pub cq: u64,
    /// CQ number, 24 bits.
    pub cqn: u32,
    /// Where the CQEs lie.
    pub cq_mem: MemType,
}

impl QpExt {
    /// An extension with nothing in it but magic, version and state.
    pub const fn new() -> Self {
        Self {
            magic: EXT_MAGIC,
            version: EXT_VERSION,
            state: STATE_READY,
            flags: 0,
            error: 0,
            host_error: 0,
            sink_addr: 0,
            sink_key: 0,
            reserved0: 0,
            companion_qp: 0,
            companion_ext: 0,
            rq_addr: 0,
            rq_dbrec: 0,
            rq_mask: 0,
            rq_stride: 0,
            rq_pi: 0,
            rq_ci: 0,
            rq_cq: GpuCq {
                cqe_daddr: 0,
                cq_num: 0,
                cqe_num: 0,
                dbrec: 0,
                cqe_ci: 0,
                cqe_mask: 0,
                cqe_size: 0,
                cq_type: 0,
                reserved0: [0; 2],
                cqe_rsvd: 0,
                mem_type: 0,
                reserved1: [0; 12],
            },
            rq_ready: 0,
            rq_error: 0,
            wait_note: 0,
            reserved1: [0; 48],
        }
    }

    /// Gives it an idle receive queue.
    ///
    /// # Panics
    /// If the depth or the stride is not a power of two in its range: the caller builds them.
    pub fn set_rq(&mut self, init: &RqInit) {
        assert!(
            init.depth.is_power_of_two() && init.depth <= MAX_DEPTH,
            "receive queue depth {} is not a power of two from 1 to {MAX_DEPTH}",
            init.depth
        );
        assert!(
            init.stride.is_power_of_two() && init.stride >= 16,
            "a receive of {} bytes is not 16 times a power of two",
            init.stride
        );
        self.rq_addr = init.ring;
        self.rq_dbrec = init.dbrec;
        self.rq_mask = init.depth - 1;
        self.rq_stride = init.stride;
        self.rq_cq = GpuCq {
            cqe_daddr: init.cq,
            cq_num: init.cqn,
            cqe_num: init.depth,
            cqe_mask: init.depth - 1,
            cqe_size: 64,
            cq_type: CqKind::PerSlot as u8,
            mem_type: init.cq_mem as i32,
            ..self.rq_cq
        };
        (self.rq_pi, self.rq_ready, self.rq_ci, self.rq_error) = (0, 0, 0, 0);
    }

    /// The bytes to copy to the GPU.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: repr(C) with every gap named, so no byte is uninitialised (sizes and offsets are asserted below).
        unsafe { core::mem::transmute(*self) }
    }
}

impl Default for QpExt {
    fn default() -> Self {
        Self::new()
    }
}

/// What a kernel is given to use a QP. Addresses are those the kernel uses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpHandle {
    /// The queue pair.
    pub qp: *mut GpuQp,
    /// Doorbell's part, or null for a bare 296-byte QP made by someone else.
    pub ext: *mut QpExt,
}

// SAFETY: two addresses; using them is unsafe in itself.
unsafe impl Send for QpHandle {}
// SAFETY: as above.
unsafe impl Sync for QpHandle {}

/// The first error of a QP in one word: written once by the engine (in host memory, before the error CQE) and once by
/// device code (in [`QpExt::error`]). Zero means none.
///
/// | bits | what |
/// |---|---|
/// | 0..8 | kind: an [`ErrorKind`] value |
/// | 8..16 | syndrome (mlx5's) |
/// | 16..24 | vendor syndrome (Doorbell's) |
/// | 24..32 | opcode of the WQE |
/// | 32..48 | index of the WQE, modulo 2^16 |
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ErrorWord(pub u64);

/// What an [`ErrorWord`] reports.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing.
    None = 0,
    /// A WQE completed in error.
    Completion = 1,
    /// The host closed or destroyed the QP.
    Closed = 2,
    /// The engine that executed the QP is gone.
    EngineDown = 3,
}

impl ErrorWord {
    /// No error.
    pub const NONE: Self = Self(0);

    /// A completion error.
    #[inline(always)]
    pub const fn completion(syndrome: u8, vendor: u8, opcode: u8, wqe_index: u16) -> Self {
        Self(
            ErrorKind::Completion as u64
                | (syndrome as u64) << 8
                | (vendor as u64) << 16
                | (opcode as u64) << 24
                | (wqe_index as u64) << 32,
        )
    }

    /// An error that is not a WQE's.
    #[inline(always)]
    pub const fn state(kind: ErrorKind) -> Self {
        Self(kind as u64)
    }

    /// What it reports; an unknown kind counts as [`ErrorKind::Closed`].
    #[inline(always)]
    pub const fn kind(self) -> ErrorKind {
        match self.0 as u8 {
            0 => ErrorKind::None,
            1 => ErrorKind::Completion,
            3 => ErrorKind::EngineDown,
            _ => ErrorKind::Closed,
        }
    }

    /// mlx5 syndrome.
    #[inline(always)]
    pub const fn syndrome(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Vendor syndrome.
    #[inline(always)]
    pub const fn vendor(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Opcode of the WQE.
    #[inline(always)]
    pub const fn opcode(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// Index of the WQE, modulo 2^16.
    #[inline(always)]
    pub const fn wqe_index(self) -> u16 {
        (self.0 >> 32) as u16
    }
}

macro_rules! at {
    ($t:ty { $($f:ident = $o:expr),+ $(,)? } size $s:expr) => {
        const _: () = {
            $(assert!(offset_of!($t, $f) == $o);)+
            assert!(size_of::<$t>() == $s);
        };
    };
}

at!(GpuQp {
    sq_rsvd_index = 0, sq_ready_index = 8, sq_wqe_pi = 16, sq_num = 24, sq_num_shift8 = 28, sq_num_shift8_be = 32,
    sq_num_shift8_be_ds = 36, sq_lock = 56, sq_wqe_num = 60, sq_wqe_mask = 62, sq_wqe_daddr = 64, sq_dbrec = 72,
    sq_db = 80, reserved0 = 88, cq_sq = 160, reserved1 = 224, nic_handler = 288, mem_type = 292,
} size 296);

at!(GpuCq {
    cqe_daddr = 0, cq_num = 8, cqe_num = 12, dbrec = 16, cqe_ci = 24, cqe_mask = 32, cqe_size = 36, cq_type = 37,
    reserved0 = 38, cqe_rsvd = 40, mem_type = 48, reserved1 = 52,
} size 64);

at!(QpExt {
    magic = 0, version = 4, state = 8, flags = 12, error = 16, host_error = 24, sink_addr = 32, sink_key = 40,
    reserved0 = 44, companion_qp = 48, companion_ext = 56, rq_addr = 64, rq_dbrec = 72, rq_mask = 80, rq_stride = 84,
    rq_pi = 88, rq_ci = 96, rq_cq = 104, rq_ready = 168, rq_error = 176, wait_note = 184,
    reserved1 = 192,
} size 256);

at!(WaitNote { kind = 0, at = 8, wanted = 16, have = 24, since = 32, seen = 40, reserved = 48 } size 64);

at!(QpHandle { qp = 0, ext = 8 } size 16);

#[cfg(test)]
mod tests {
    use super::*;

    fn init() -> QpInit {
        QpInit {
            qpn: 0x12_3456,
            ring: 0x1000,
            depth: 128,
            ring_mem: MemType::Host,
            cq: 0x2000,
            cqn: 7,
            cq_mem: MemType::Gpu,
            cq_kind: CqKind::Collapsed,
            dbrec: 0x3004,
            db: 0x3100,
            handler: NicHandler::DoorbellOnly,
        }
    }

    #[test]
    fn exported_bytes_are_where_doca_reads_them() {
        let bytes = GpuQp::new(&init()).to_bytes();
        assert_eq!(bytes[24..28], 0x12_3456_u32.to_le_bytes());
        assert_eq!(bytes[32..36], [0x12, 0x34, 0x56, 0]);
        assert_eq!(
            bytes[44..48],
            [0x12, 0x34, 0x56, 3],
            "the word of a three-segment WQE"
        );
        assert_eq!(bytes[60..64], [128, 0, 127, 0]);
        assert_eq!(bytes[80..88], 0x3100_u64.to_le_bytes());
        assert_eq!(bytes[160..168], 0x2000_u64.to_le_bytes());
        assert_eq!(bytes[172..176], 128_u32.to_le_bytes());
        assert_eq!(bytes[197], 1, "collapsed");
        assert_eq!(bytes[288..292], 10_i32.to_le_bytes());
    }

    #[test]
    #[should_panic(expected = "not a power of two")]
    fn depth_must_be_a_power_of_two() {
        GpuQp::new(&QpInit {
            depth: 100,
            ..init()
        });
    }

    #[test]
    fn error_word_keeps_every_field() {
        let word = ErrorWord::completion(0x13, 0x8b, 0x08, 0xfffe);
        assert_eq!(word.kind(), ErrorKind::Completion);
        assert_eq!(
            (
                word.syndrome(),
                word.vendor(),
                word.opcode(),
                word.wqe_index()
            ),
            (0x13, 0x8b, 0x08, 0xfffe)
        );
        assert_eq!(
            ErrorWord::state(ErrorKind::EngineDown).kind(),
            ErrorKind::EngineDown
        );
        assert_eq!(
            ErrorWord(0x77).kind(),
            ErrorKind::Closed,
            "an unknown kind is still an error"
        );
        assert_eq!(ErrorWord::NONE.kind(), ErrorKind::None);
    }

    #[test]
    fn foreign_values_name_the_handler_doca_would_use() {
        assert_eq!(NicHandler::from_raw(0), NicHandler::ProducerWord);
        assert_eq!(NicHandler::from_raw(2), NicHandler::DoorbellRecord);
        assert_eq!(NicHandler::from_raw(10), NicHandler::DoorbellOnly);
        assert_eq!(
            CqKind::from_raw(3),
            CqKind::Collapsed,
            "DOCA 4.1's collapsed CQ in host memory"
        );
    }
}
