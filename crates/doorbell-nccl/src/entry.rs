//! What every table of functions shares: catching panics, checking pointers, turning objects into the addresses that NCCL holds.
//!
//! Each object that NCCL holds is a box with a mark in front. A null or foreign address is an error and not undefined behaviour as far as a
//! look at its first eight bytes can tell; NCCL itself never passes one.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use doorbell::Generation;

use crate::abi::net::{DeviceHandle, NetPropertiesV12, TYPE_GDAKI, VirtualDevice};
use crate::abi::{HANDLE, Logger, PTR_CUDA, PTR_HOST, Status};
use crate::comm::{Comm, Listening};
use crate::context::{Contexts, Form, Request};
use crate::error::SUCCESS;
use crate::settings::Settings;
use crate::window::Window;
use crate::{Error, Result, log};

/// Runs an entry: no panic leaves it, and an error is in NCCL's log before NCCL has its code.
pub(crate) fn guard(call: &'static str, body: impl FnOnce() -> Result<()>) -> Status {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Error::Panic {
            call,
            reason: text.unwrap_or_else(|| "no text".to_owned()),
        })
    });
    match outcome {
        Ok(()) => SUCCESS,
        Err(error) => {
            log::warn(&error);
            error.status()
        }
    }
}

/// Objects that NCCL holds.
pub(crate) trait Held: Sized {
    const MARK: u64;
    const NAME: &'static str;
}

/// What `init` makes.
pub(crate) struct Instance;

impl Held for Instance {
    const MARK: u64 = u64::from_le_bytes(*b"DB-insta");
    const NAME: &'static str = "the plug-in's context";
}

impl Held for Listening {
    const MARK: u64 = u64::from_le_bytes(*b"DB-liste");
    const NAME: &'static str = "the listening object";
}

impl Held for Arc<Comm> {
    const MARK: u64 = u64::from_le_bytes(*b"DB-commu");
    const NAME: &'static str = "the communicator";
}

impl Held for Window {
    const MARK: u64 = u64::from_le_bytes(*b"DB-windo");
    const NAME: &'static str = "the window";
}

impl Held for Contexts {
    const MARK: u64 = u64::from_le_bytes(*b"DB-conte");
    const NAME: &'static str = "the GIN context";
}

#[repr(C)]
struct Marked<T> {
    mark: u64,
    /// Where it was made. A forked child has a copy without the threads behind it, and with its parent's sockets.
    born: Generation,
    value: T,
}

/// Gives an object to NCCL.
pub(crate) fn give<T: Held>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Marked {
        mark: T::MARK,
        born: Generation::now(),
        value,
    }))
    .cast()
}

fn marked<T: Held>(call: &'static str, object: *mut c_void) -> Result<NonNull<Marked<T>>> {
    let bad = |value: String| Error::Argument {
        call,
        object: T::NAME,
        value,
        remedy: "pass what this plug-in returned, once, and before it was ended",
    };
    let at = NonNull::new(object.cast::<Marked<T>>()).ok_or_else(|| bad("null".to_owned()))?;
    if !at.is_aligned() {
        return Err(bad(format!("{object:p}")));
    }
    // SAFETY: NCCL passes what `give` returned; the mark is the box's first word, looked at before anything else.
    match unsafe { at.cast::<u64>().read_volatile() } {
        mark if mark == T::MARK => Ok(at),
        mark => Err(bad(format!(
            "{object:p}, marked {:?}",
            String::from_utf8_lossy(&mark.to_le_bytes())
        ))),
    }
}

/// Looks at an object that NCCL holds.
///
/// # Safety
/// `object` is null or came from [`give`], and is not taken back while the answer is used.
pub(crate) unsafe fn look<'a, T: Held>(call: &'static str, object: *mut c_void) -> Result<&'a T> {
    // SAFETY: marked as this type, and alive by the contract.
    marked(call, object).map(|at| unsafe { &(*at.as_ptr()).value })
}

/// Takes an object back. One of the process that this one was forked from stays as it is: to end it would be to speak in the parent's name, and to wait
/// for threads that are not here.
///
/// # Safety
/// `object` is null or came from [`give`], and nobody uses it any more.
pub(crate) unsafe fn take<T: Held>(call: &'static str, object: *mut c_void) -> Result<T> {
    let at = marked::<T>(call, object)?;
    // SAFETY: marked as this type, and alive by the contract.
    if !unsafe { (*at.as_ptr()).born }.is_current() {
        return Err(Error::Argument {
            call,
            object: T::NAME,
            value: format!("{object:p}, of the process that this one was forked from"),
            remedy: "end it there: a forked child has no part in it",
        });
    }
    // SAFETY: a box of `give`, taken once: the mark is wiped before the memory goes back.
    unsafe {
        at.cast::<u64>().write_volatile(0);
        Ok(Box::from_raw(at.as_ptr()).value)
    }
}

/// Checks that NCCL passed all of these addresses, named as in its headers.
pub(crate) fn present(call: &'static str, all: &[(&'static str, *const c_void)]) -> Result<()> {
    match all.iter().find(|(_, at)| at.is_null()) {
        None => Ok(()),
        Some((object, _)) => Err(Error::Argument {
            call,
            object,
            value: "null".to_owned(),
            remedy: "pass its address",
        }),
    }
}

/// Stores a result where NCCL asked for it.
///
/// # Safety
/// `to` is null or valid for a write.
pub(crate) unsafe fn store<T>(
    call: &'static str,
    object: &'static str,
    to: *mut T,
    value: T,
) -> Result<()> {
    present(call, &[(object, to.cast_const().cast())])?;
    // SAFETY: not null, so valid by the contract.
    unsafe { to.write(value) };
    Ok(())
}

/// `init`.
pub(crate) unsafe extern "C" fn init(ctx: *mut *mut c_void, _: u64, logger: Logger) -> Status {
    // SAFETY: passed on.
    unsafe { begin(ctx, logger, || Ok(())) }
}

/// `init`, with what else a table has to `check` before it is taken.
///
/// # Safety
/// `ctx` is null or valid for a write.
pub(crate) unsafe fn begin(
    ctx: *mut *mut c_void,
    logger: Logger,
    check: impl FnOnce() -> Result<()>,
) -> Status {
    guard("init", || {
        present("init", &[("ctx", ctx.cast())])?;
        log::begin(logger)?;
        // Said now, and not when the ranks have met: NCCL then looks for another backend.
        if let Err(error) = check()
            .and_then(|()| Settings::read())
            .and_then(|_| Ok(doorbell::Config::default().resolve()?.check_trace()?))
        {
            log::warn(&error);
            log::end();
            return Err(error);
        }
        // SAFETY: NCCL's out parameter.
        unsafe { store("init", "ctx", ctx, give(Instance)) }
    })
}

/// `finalize`.
pub(crate) unsafe extern "C" fn finalize(ctx: *mut c_void) -> Status {
    guard("finalize", || {
        // SAFETY: what `init` gave; NCCL ends it once.
        let instance = unsafe { take::<Instance>("finalize", ctx) };
        instance.map(|_| log::end())
    })
}

/// `devices`.
pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    // SAFETY: NCCL's out parameter.
    guard("devices", || unsafe { store("devices", "ndev", count, 1) })
}

/// Checks the number of the only virtual NIC there is.
pub(crate) fn only_device(call: &'static str, dev: c_int) -> Result<()> {
    match dev {
        0 => Ok(()),
        _ => Err(Error::Argument {
            call,
            object: "dev",
            value: dev.to_string(),
            remedy: "there is one device, number 0",
        }),
    }
}

/// What the virtual NIC says of itself.
pub(crate) fn properties() -> NetPropertiesV12 {
    NetPropertiesV12 {
        // Unique: a network device of this name would take its place in NCCL's topology.
        name: c"doorbell_gin0".as_ptr(),
        // No PCI device: NCCL attaches it to the first CPU.
        pci_path: std::ptr::null(),
        guid: u64::from_le_bytes(*b"doorbell"),
        ptr_support: PTR_HOST | PTR_CUDA,
        reg_is_global: 0,
        force_flush: 0,
        // Only the topology reads it: about what the copy engines of one GPU move.
        speed: 200_000,
        port: 1,
        latency: 5.0,
        max_comms: 1 << 20,
        max_recvs: 1,
        device_type: TYPE_GDAKI,
        device_version: 0,
        virtual_device: VirtualDevice {
            count: 1,
            devices: [0; 8],
        },
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request: 1,
        rail: -1,
        plane: -1,
    }
}

/// `listen`.
pub(crate) unsafe extern "C" fn listen(
    _: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listening: *mut *mut c_void,
) -> Status {
    guard("listen", || {
        only_device("listen", dev)?;
        present(
            "listen",
            &[("handle", handle), ("listenComm", listening.cast())],
        )?;
        let new = Listening::open()?;
        let bytes = new.handle.encode();
        // SAFETY: NCCL's buffer of `HANDLE` bytes, without alignment, and its out parameter.
        unsafe {
            handle.cast::<[u8; HANDLE]>().write_unaligned(bytes);
            store("listen", "listenComm", listening, give(new))
        }
    })
}

/// `connect`. Its first argument is not looked at: NCCL's host RMA passes something else than a GIN context.
pub(crate) unsafe extern "C" fn connect(
    _: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listening: *mut c_void,
    comm: *mut *mut c_void,
) -> Status {
    guard("connect", || {
        let bad = |object, value: String, remedy| {
            Err(Error::Argument {
                call: "connect",
                object,
                value,
                remedy,
            })
        };
        present(
            "connect",
            &[("handles", handles.cast()), ("collComm", comm.cast())],
        )?;
        if !(1..=1 << 20).contains(&ranks) || !(0..ranks).contains(&rank) {
            let value = format!("{rank} of {ranks}");
            return bad("rank", value, "ranks count from 0 to nranks - 1");
        }
        let mut bytes = Vec::with_capacity(ranks as usize);
        for r in 0..ranks as usize {
            // SAFETY: NCCL's array has an entry a rank.
            let one = unsafe { *handles.add(r) };
            if one.is_null() {
                return bad(
                    "handles",
                    format!("null at rank {r}"),
                    "pass every rank's handle",
                );
            }
            // SAFETY: each names 128 bytes, without alignment.
            bytes.push(unsafe { one.cast::<[u8; HANDLE]>().read_unaligned() });
        }
        // SAFETY: what `listen` gave; NCCL ends it after this call.
        let listening = unsafe { look::<Listening>("connect", listening)? };
        let new = Arc::new(Comm::connect(&bytes, rank as usize, listening)?);
        // SAFETY: checked above.
        unsafe { store("connect", "collComm", comm, give(new)) }
    })
}

/// `closeListen`.
pub(crate) unsafe extern "C" fn close_listen(listening: *mut c_void) -> Status {
    guard("closeListen", || {
        // SAFETY: what `listen` gave; NCCL ends it once.
        unsafe { take::<Listening>("closeListen", listening) }.map(drop)
    })
}

/// `closeColl`.
pub(crate) unsafe extern "C" fn close_coll(comm: *mut c_void) -> Status {
    guard("closeColl", || {
        // SAFETY: what `connect` gave; NCCL ends it once.
        let comm = unsafe { take::<Arc<Comm>>("closeColl", comm)? };
        // NCCL ends a communicator with the contexts that the application has not ended, and asks for nothing of them afterwards: an error would only keep
        // it from ending the rest. The other ranks are to take that for what it is.
        // Two each: a context's own, and its queue pairs'.
        match Arc::strong_count(&comm) / 2 {
            0 => drop(comm),
            left => {
                comm.leave_early();
                log::warn(format_args!(
                    "rank {} of {}: the communicator ends before {left} of its context(s): call ncclDevCommDestroy before ncclCommDestroy",
                    comm.rank, comm.ranks
                ));
            }
        }
        Ok(())
    })
}

/// `regMrSym`.
pub(crate) unsafe extern "C" fn reg_mr_sym(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    window: *mut *mut c_void,
    device: *mut *mut c_void,
) -> Status {
    guard("regMrSym", || {
        // SAFETY: what `connect` gave, and NCCL does not close it meanwhile.
        let comm = unsafe { look::<Arc<Comm>>("regMrSym", comm)? };
        // The other ranks are told, instead of being left waiting.
        let all = [
            ("mhandle", window.cast_const().cast()),
            ("ginHandle", device.cast_const().cast()),
        ];
        let given = present("regMrSym", &all);
        // SAFETY: NCCL keeps the memory until it deregisters it.
        let new = unsafe { Window::register(comm, given, data.cast(), size, kind, flags)? };
        let handle = std::ptr::with_exposed_provenance_mut(new.handle() as usize);
        // SAFETY: not null, or `register` had failed.
        unsafe {
            store("regMrSym", "ginHandle", device, handle)?;
            store("regMrSym", "mhandle", window, give(new))
        }
    })
}

/// `deregMrSym`.
pub(crate) unsafe extern "C" fn dereg_mr_sym(comm: *mut c_void, window: *mut c_void) -> Status {
    guard("deregMrSym", || {
        // SAFETY: as for `regMrSym`.
        let comm = unsafe { look::<Arc<Comm>>("deregMrSym", comm)? };
        // SAFETY: what `regMrSym` gave; NCCL ends it once.
        unsafe { take::<Window>("deregMrSym", window)? }.deregister(comm)
    })
}

/// `createContext`, whatever the table's version.
///
/// # Safety
/// The pointers are NCCL's.
pub(crate) unsafe fn create_context(
    comm: *mut c_void,
    request: impl FnOnce(&Comm) -> Result<Request>,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> Result<()> {
    // SAFETY: what `connect` gave, and NCCL does not close it meanwhile.
    let comm = unsafe { look::<Arc<Comm>>("createContext", comm)? };
    // The other ranks are told, instead of being left waiting.
    let all = [
        ("ginCtx", context.cast_const().cast()),
        ("devHandle", handle.cast_const().cast()),
    ];
    let request = present("createContext", &all).and_then(|()| request(comm));
    let mut new = Contexts::create(comm, request)?;
    let device = new.device_handle();
    // SAFETY: not null, or `create` had failed.
    unsafe {
        store("createContext", "devHandle", handle, device)?;
        store("createContext", "ginCtx", context, give(new))
    }
}

/// What the application's headers say, for tables that tell.
pub(crate) fn form(version: c_int) -> Result<Form> {
    Form::of(version)
}

/// `destroyContext`.
pub(crate) unsafe extern "C" fn destroy_context(context: *mut c_void) -> Status {
    guard("destroyContext", || {
        // SAFETY: what `createContext` gave; NCCL ends it once.
        unsafe { take::<Contexts>("destroyContext", context)? }.destroy();
        Ok(())
    })
}

/// `ginProgress`: there is nothing to do, since the engine has threads of its own.
pub(crate) unsafe extern "C" fn progress(_: *mut c_void) -> Status {
    SUCCESS
}

/// `queryLastError`.
pub(crate) unsafe extern "C" fn query_last_error(
    context: *mut c_void,
    has_error: *mut bool,
) -> Status {
    guard("queryLastError", || {
        // SAFETY: what `createContext` gave, and NCCL does not destroy it meanwhile.
        let failed = unsafe { look::<Contexts>("queryLastError", context)? }.has_failed();
        // SAFETY: NCCL's out parameter.
        unsafe { store("queryLastError", "hasError", has_error, failed) }
    })
}
