//! The mock as a shared library, for programs that load libibverbs and libefa at run time: both names lead here.
//!
//! ```text
//! cargo build -p doorbell-verbs-mock --example mock_rdma
//! L=target/debug/examples/libmock_rdma.so
//! DOORBELL_IBVERBS=$L DOORBELL_LIBEFA=$L MOCK_RDMA=efa doorbell hwtest --device mock1
//! ```
//! It lists one device, `mock1`, which `MOCK_RDMA` makes an EFA (`efa`), an InfiniBand or iWARP one (`infiniband`, `iwarp`), one whose port is
//! `down`, one that may not be opened (`locked`), one without a way to any peer (`unreachable`), one without atomics (`noatomics`), one whose cable is pulled after some
//! requests (`falls`), one that stands still for five times a second (`slow`), or `none`; else it has RC over Ethernet. The device reaches queue pairs of its own process
//! only.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::time::Duration;

use doorbell_verbs::Api;
use doorbell_verbs::abi::*;
use doorbell_verbs::efa::abi::{RawEfaAttr, RawEfaQpInit};
use doorbell_verbs_mock::{Config, Mock, Srd, efa_api};

static LIBRARY: OnceLock<(Mock, Api)> = OnceLock::new();

fn device() -> &'static Mock {
    &LIBRARY.wait().0
}

/// Waits until the device was given so many requests.
fn after(requests: u64) {
    while device().counts().requests < requests {
        std::thread::yield_now();
    }
}

fn api() -> &'static Api {
    let made = LIBRARY.get_or_init(|| {
        let kind = std::env::var("MOCK_RDMA").unwrap_or_default();
        let is = |name| kind == name;
        let mock = Mock::new(Config {
            srd: is("efa").then(Srd::default),
            infiniband: is("infiniband"),
            iwarp: is("iwarp"),
            active: !is("down"),
            atomics: !is("noatomics"),
            refuse_open: if is("locked") { libc::EACCES } else { 0 },
            ..Config::default()
        });
        if is("unreachable") {
            mock.refuse_connection(Some(libc::ENETUNREACH));
        }
        if is("none") {
            mock.remove();
        }
        if is("falls") {
            std::thread::spawn(|| {
                after(60);
                device().pull_cable();
            });
        }
        if is("slow") {
            std::thread::spawn(|| {
                for _ in 0..5 {
                    after(device().counts().requests + 50);
                    device().stall(true);
                    std::thread::sleep(Duration::from_secs(1));
                    device().stall(false);
                }
            });
        }
        let api = *mock.verbs().api();
        (mock, api)
    });
    &made.1
}

macro_rules! export {
    ($table:expr; $($symbol:ident = $field:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {$(
        /// # Safety
        /// As for the function of that name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: passed on.
            unsafe { ($table.$field)($($arg),*) }
        }
    )*};
}

export! { api();
    ibv_get_device_list = get_device_list(count: *mut c_int) -> *mut *mut RawDevice;
    ibv_free_device_list = free_device_list(list: *mut *mut RawDevice);
    ibv_open_device = open_device(device: *mut RawDevice) -> *mut RawContext;
    ibv_close_device = close_device(context: *mut RawContext) -> c_int;
    ibv_query_device = query_device(context: *mut RawContext, out: *mut RawDeviceAttr) -> c_int;
    ibv_query_port = query_port(context: *mut RawContext, port: u8, out: *mut RawPortAttr) -> c_int;
    ibv_query_gid = query_gid(context: *mut RawContext, port: u8, index: c_int, out: *mut Gid) -> c_int;
    ibv_alloc_pd = alloc_pd(context: *mut RawContext) -> *mut RawPd;
    ibv_dealloc_pd = dealloc_pd(pd: *mut RawPd) -> c_int;
    ibv_reg_mr = reg_mr(pd: *mut RawPd, at: *mut c_void, len: usize, rights: c_int) -> *mut RawMr;
    ibv_dereg_mr = dereg_mr(mr: *mut RawMr) -> c_int;
    ibv_create_cq = create_cq(context: *mut RawContext, entries: c_int, own: *mut c_void, channel: *mut c_void, vector: c_int) -> *mut RawCq;
    ibv_destroy_cq = destroy_cq(cq: *mut RawCq) -> c_int;
    ibv_create_qp = create_qp(pd: *mut RawPd, attr: *mut QpInitAttr) -> *mut RawQp;
    ibv_modify_qp = modify_qp(qp: *mut RawQp, attr: *mut QpAttr, mask: c_int) -> c_int;
    ibv_query_qp = query_qp(qp: *mut RawQp, attr: *mut QpAttr, mask: c_int, init: *mut QpInitAttr) -> c_int;
    ibv_destroy_qp = destroy_qp(qp: *mut RawQp) -> c_int;
    ibv_get_async_event = get_async_event(context: *mut RawContext, out: *mut RawAsyncEvent) -> c_int;
    ibv_ack_async_event = ack_async_event(event: *mut RawAsyncEvent);
    ibv_wc_status_str = wc_status_str(status: u32) -> *const c_char;
}

export! { efa_api();
    efadv_query_device = query_device(context: *mut RawContext, out: *mut RawEfaAttr, size: u32) -> c_int;
    efadv_create_qp_ex = create_qp_ex(context: *mut RawContext, attr: *mut QpInitAttrEx, efa: *mut RawEfaQpInit, size: u32) -> *mut RawQp;
    ibv_create_ah = create_ah(pd: *mut RawPd, attr: *mut AhAttr) -> *mut RawAh;
    ibv_destroy_ah = destroy_ah(ah: *mut RawAh) -> c_int;
}

/// # Safety
/// As for the function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut RawPd,
    at: *mut c_void,
    len: usize,
    base: u64,
    rights: c_uint,
) -> *mut RawMr {
    match api().reg_mr_iova2 {
        // SAFETY: passed on.
        Some(reg) => unsafe { reg(pd, at, len, base, rights) },
        None => core::ptr::null_mut(),
    }
}

/// # Safety
/// As for the function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut RawContext,
    port: u32,
    index: u32,
    out: *mut RawGidEntry,
    flags: u32,
    size: usize,
) -> c_int {
    match api().query_gid_ex {
        // SAFETY: passed on.
        Some(query) => unsafe { query(context, port, index, out, flags, size) },
        None => libc::EOPNOTSUPP,
    }
}

/// # Safety
/// As for the function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut RawQp) -> *mut RawQpEx {
    match api().qp_to_qp_ex {
        // SAFETY: passed on.
        Some(convert) => unsafe { convert(qp) },
        None => core::ptr::null_mut(),
    }
}
