//! `ncclGinPlugin_v11` and the network part that has to come with it: NCCL 2.28.7 to 2.29.7, which PyTorch's wheels carry.
//!
//! Those releases look for a GIN plug-in inside a network plug-in only, and then use that network for everything. So these tables are in an object of
//! their own (crate `doorbell-nccl-net`), which is loaded by who asks for it (`NCCL_NET_PLUGIN`). Its network carries nothing: ranks of one host reach each other
//! by NVLink, PCIe and shared memory, and a job that needs a network is told so.

use std::ffi::{c_int, c_void};

use crate::abi::gin::GinV11;
use crate::abi::net::{
    DeviceHandle, NetPropertiesV11, NetV11, TYPE_GDAKI, TYPE_HOST, VirtualDeviceOld,
};
use crate::abi::{Logger, PTR_CUDA, PTR_HOST, Status};
use crate::comm::Comm;
use crate::context::{Form, Request};
use crate::entry::{self, guard, store};
use crate::error::SUCCESS;
use crate::maps::Mapping;
use crate::{Error, Result, log};

fn properties_of(
    name: &'static std::ffi::CStr,
    device_type: c_int,
    ptr: c_int,
) -> NetPropertiesV11 {
    let new = entry::properties();
    NetPropertiesV11 {
        name: name.as_ptr(),
        pci_path: new.pci_path,
        guid: new.guid,
        ptr_support: ptr,
        reg_is_global: new.reg_is_global,
        force_flush: new.force_flush,
        speed: new.speed,
        port: new.port,
        latency: new.latency,
        max_comms: new.max_comms,
        max_recvs: new.max_recvs,
        device_type,
        device_version: new.device_version,
        virtual_device: VirtualDeviceOld {
            count: 1,
            devices: [0; 4],
        },
        max_p2p_bytes: new.max_p2p_bytes,
        max_coll_bytes: new.max_coll_bytes,
        max_multi_request: new.max_multi_request,
    }
}

unsafe extern "C" fn gin_properties(dev: c_int, to: *mut NetPropertiesV11) -> Status {
    guard("getProperties", || {
        entry::only_device("getProperties", dev)?;
        let properties = properties_of(c"doorbell_gin0", TYPE_GDAKI, PTR_HOST | PTR_CUDA);
        // SAFETY: NCCL's out parameter.
        unsafe { store("getProperties", "props", to, properties) }
    })
}

unsafe extern "C" fn net_properties(dev: c_int, to: *mut NetPropertiesV11) -> Status {
    guard("getProperties", || {
        entry::only_device("getProperties", dev)?;
        let properties = properties_of(c"doorbell_net0", TYPE_HOST, PTR_HOST);
        // SAFETY: NCCL's out parameter.
        unsafe { store("getProperties", "props", to, properties) }
    })
}

/// Which release of NCCL calls: its logger lies in its object, which says so.
fn release(logger: Logger) -> Option<u32> {
    let path = Mapping::at(logger? as *const () as usize)?.name?;
    // SAFETY: an object that is loaded already: nothing of it runs.
    let library = unsafe {
        libloading::os::unix::Library::open(
            Some(path),
            libloading::os::unix::RTLD_NOW | RTLD_NOLOAD,
        )
    }
    .ok()?;
    let mut version: c_int = 0;
    // SAFETY: NCCL's `ncclResult_t ncclGetVersion(int*)`, unchanged since its first release.
    let status = unsafe {
        let get = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0");
        get.ok()?(&mut version)
    };
    (status == 0).then_some(version as u32)
}

/// Only an object that is there already.
const RTLD_NOLOAD: c_int = 4;

/// Releases whose device code has the structures of this table's contexts: from the first on, up to and without the second.
const KNOWN: std::ops::Range<u32> = 22_807..23_000;

/// What the user says where NCCL does not: `2.28.9`.
fn named(text: &str) -> Option<u32> {
    let mut parts = text.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor, patch) = (parts.next()??, parts.next()??, parts.next()??);
    (minor < 100 && patch < 100 && parts.next().is_none())
        .then_some(10_000 * major + 100 * minor + patch)
}

/// What [`RELEASE`] says.
pub(crate) fn said(text: Option<String>) -> Result<Option<u32>> {
    let text = text.filter(|text| !text.is_empty());
    let said = text.map(|text| {
        named(&text).ok_or(Error::Variable {
            name: RELEASE,
            value: text,
            remedy: "give a release of NCCL, such as 2.28.9",
        })
    });
    said.transpose()
}

/// Is that release one for this table?
fn accept(found: Option<u32>, text: Option<String>) -> Result<()> {
    match found.or(said(text)?) {
        Some(release) if KNOWN.contains(&release) => Ok(()),
        Some(found) => Err(Error::Release { found }),
        None => Err(Error::UnknownRelease),
    }
}

pub(crate) const RELEASE: &str = "DOORBELL_NCCL_RELEASE";

unsafe extern "C" fn gin_init(ctx: *mut *mut c_void, _: u64, logger: Logger) -> Status {
    let check = || accept(release(logger), crate::settings::variable(RELEASE));
    // SAFETY: NCCL's out parameter.
    unsafe { entry::begin(ctx, logger, check) }
}

/// NCCL 2.28.9 ends what it did not begin, at times: a communicator's own instance, null, with its network.
unsafe extern "C" fn gin_finalize(ctx: *mut c_void) -> Status {
    match ctx.is_null() {
        true => SUCCESS,
        // SAFETY: what `init` gave; NCCL ends it once.
        false => unsafe { entry::finalize(ctx) },
    }
}

unsafe extern "C" fn create_context(
    comm: *mut c_void,
    signals: c_int,
    counters: c_int,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> Status {
    guard("createContext", || {
        let read = |comm: &Comm| Request::new(comm, signals, counters, 1, 0, Form::Version0);
        // SAFETY: NCCL's pointers.
        unsafe { entry::create_context(comm, read, context, handle) }
    })
}

unsafe extern "C" fn net_init(
    ctx: *mut *mut c_void,
    comm: u64,
    _config: *mut c_void,
    logger: Logger,
    _profiler: *mut c_void,
) -> Status {
    // SAFETY: NCCL's out parameter.
    let status = unsafe { entry::init(ctx, comm, logger) };
    if status == crate::SUCCESS {
        log::info(
            "this object takes the place of the network, for NCCL's releases before 2.30: it is for ranks of one host",
        );
    }
    status
}

/// Whatever would carry bytes.
fn carries_nothing(call: &'static str) -> Status {
    guard(call, || -> Result<()> { Err(Error::NoNetwork { call }) })
}

unsafe extern "C" fn net_listen(
    _: *mut c_void,
    _: c_int,
    _: *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    carries_nothing("listen (network)")
}

unsafe extern "C" fn net_connect(
    _: *mut c_void,
    _: c_int,
    _: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut DeviceHandle,
) -> Status {
    carries_nothing("connect (network)")
}

unsafe extern "C" fn net_accept(
    _: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut DeviceHandle,
) -> Status {
    carries_nothing("accept (network)")
}

unsafe extern "C" fn net_reg_mr(
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: *mut *mut c_void,
) -> Status {
    carries_nothing("regMr (network)")
}

unsafe extern "C" fn net_dereg_mr(_: *mut c_void, _: *mut c_void) -> Status {
    carries_nothing("deregMr (network)")
}

unsafe extern "C" fn net_isend(
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    carries_nothing("isend (network)")
}

unsafe extern "C" fn net_irecv(
    _: *mut c_void,
    _: c_int,
    _: *mut *mut c_void,
    _: *mut usize,
    _: *mut c_int,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    carries_nothing("irecv (network)")
}

unsafe extern "C" fn net_iflush(
    _: *mut c_void,
    _: c_int,
    _: *mut *mut c_void,
    _: *mut c_int,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Status {
    carries_nothing("iflush (network)")
}

unsafe extern "C" fn net_test(_: *mut c_void, _: *mut c_int, _: *mut c_int) -> Status {
    carries_nothing("test (network)")
}

unsafe extern "C" fn net_close(_: *mut c_void) -> Status {
    carries_nothing("close (network)")
}

/// The GIN table.
pub const GIN: GinV11 = GinV11 {
    name: c"Doorbell".as_ptr(),
    init: Some(gin_init),
    devices: Some(entry::devices),
    get_properties: Some(gin_properties),
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
    // Of the proxy type only.
    iput: std::ptr::null(),
    iput_signal: std::ptr::null(),
    test: std::ptr::null(),
    gin_progress: Some(entry::progress),
    query_last_error: Some(entry::query_last_error),
    finalize: Some(gin_finalize),
};

/// The network that carries nothing.
pub const NET: NetV11 = NetV11 {
    name: c"Doorbell (one host)".as_ptr(),
    init: Some(net_init),
    devices: Some(entry::devices),
    get_properties: Some(net_properties),
    listen: net_listen as *const c_void,
    connect: net_connect as *const c_void,
    accept: net_accept as *const c_void,
    reg_mr: net_reg_mr as *const c_void,
    // Its properties do not offer it.
    reg_mr_dma_buf: std::ptr::null(),
    dereg_mr: net_dereg_mr as *const c_void,
    isend: net_isend as *const c_void,
    irecv: net_irecv as *const c_void,
    iflush: net_iflush as *const c_void,
    test: net_test as *const c_void,
    close_send: net_close as *const c_void,
    close_recv: net_close as *const c_void,
    close_listen: net_close as *const c_void,
    // All of these may be null.
    get_device_mr: std::ptr::null(),
    irecv_consumed: std::ptr::null(),
    make_v_device: std::ptr::null(),
    finalize: Some(entry::finalize),
    set_net_attr: std::ptr::null(),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_releases_that_are_known_to_fit_are_accepted() {
        let said = |text: &str| accept(None, Some(text.to_owned()));
        for good in [22_807, 22_809, 22_907] {
            accept(Some(good), None).expect("it fits");
            // What NCCL says of itself counts.
            accept(Some(good), Some("2.30.3".to_owned())).expect("it fits");
        }
        said("2.28.9").expect("it fits");
        for bad in [22_705, 22_806, 23_003, 23_203] {
            let error = accept(Some(bad), Some("2.28.9".to_owned())).expect_err("another");
            assert!(
                matches!(error, Error::Release { found } if found == bad),
                "{error}"
            );
        }
        for unknown in [accept(None, None), said("")] {
            let text = unknown.expect_err("unknown").to_string();
            assert!(text.contains("DOORBELL_NCCL_RELEASE"), "{text}");
        }
        assert!(matches!(
            said("2.30.3"),
            Err(Error::Release { found: 23_003 })
        ));
        for nonsense in ["2.28", "2.28.9.1", "new", "2.128.9"] {
            let text = said(nonsense).expect_err("nonsense").to_string();
            assert!(text.contains(nonsense) && text.contains("give"), "{text}");
        }
    }
}
