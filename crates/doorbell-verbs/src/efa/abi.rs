//! What libefa lays out in memory, declared anew, and the numbers that EFA uses differently from other devices.
//!
//! Structures of this library grow at their ends and are passed with the size that the caller knows. What is used here has been there since
//! rdma-core 27, but for the capability to write remotely, which came with 46.

#![allow(missing_docs, reason = "names are those of libefa's manual pages")]

use crate::abi::{RawContext, RawQp};

/// The PCI vendor of EFA devices.
pub const VENDOR: u32 = 0x1d0f;

/// `EFADV_DEVICE_ATTR_CAPS_*`.
pub mod caps {
    pub const RDMA_READ: u32 = 1;
    pub const RNR_RETRY: u32 = 1 << 1;
    pub const CQ_WITH_SGID: u32 = 1 << 2;
    pub const RDMA_WRITE: u32 = 1 << 3;
    pub const UNSOLICITED_WRITE_RECV: u32 = 1 << 4;
}

/// `EFADV_QP_DRIVER_TYPE_SRD`.
pub const DRIVER_TYPE_SRD: u32 = 0;

/// What the device says of a completion (`vendor_err`), as far as something depends on it.
pub mod status {
    /// There is no such queue pair (yet), or it is in error.
    pub const BAD_DEST_QPN: u32 = 9;
    /// It has no receive posted.
    pub const RNR: u32 = 10;
    /// It has no address handle for this side, which remote reads and writes need.
    pub const UNKNOWN_PEER: u32 = 14;
    /// Nothing has ever come back from there.
    pub const UNREACHABLE: u32 = 15;
}

/// `struct efadv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawEfaAttr {
    pub comp_mask: u64,
    pub max_sq_wr: u32,
    pub max_rq_wr: u32,
    pub max_sq_sge: u16,
    pub max_rq_sge: u16,
    pub inline_buf_size: u16,
    /// Since rdma-core 63; zero before.
    pub inline_buf_size_ex: u16,
    pub device_caps: u32,
    pub max_rdma_size: u32,
}

/// `struct efadv_qp_init_attr`, as far as every release knows it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RawEfaQpInit {
    pub comp_mask: u64,
    pub driver_qp_type: u32,
    /// Flags and a service level since rdma-core 52; zero is what there was before.
    pub flags: u16,
    pub sl: u8,
    pub reserved: u8,
}

pub type QueryDevice = unsafe extern "C" fn(*mut RawContext, *mut RawEfaAttr, u32) -> i32;
pub type CreateQpEx = unsafe extern "C" fn(
    *mut RawContext,
    *mut crate::abi::QpInitAttrEx,
    *mut RawEfaQpInit,
    u32,
) -> *mut RawQp;

/// As [`crate::abi::LAYOUT`], without sizes: newer releases append.
pub const FIELDS: &[(&str, &str, usize)] = {
    use core::mem::offset_of;
    macro_rules! rows {
        ($($c:literal $ty:ident { $($field:ident,)* })*) => {
            &[$($(($c, stringify!($field), offset_of!($ty, $field)),)*)*]
        };
    }
    rows! {
        "efadv_device_attr" RawEfaAttr { comp_mask, max_sq_wr, max_rq_wr, max_sq_sge, max_rq_sge, inline_buf_size, device_caps, max_rdma_size, }
        "efadv_qp_init_attr" RawEfaQpInit { comp_mask, driver_qp_type, }
    }
};

const _: () = {
    assert!(size_of::<RawEfaAttr>() == 32);
    assert!(core::mem::offset_of!(RawEfaAttr, device_caps) == 24);
    assert!(size_of::<RawEfaQpInit>() == 16);
};
