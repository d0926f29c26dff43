//! The C functions, called as C calls them: what works, and what every wrong use gives instead of undefined behaviour.

use std::ffi::{CStr, CString};
use std::mem::size_of;
use std::ptr::{null, null_mut};

use doorbell_c::Status;
use doorbell_c::cpu::{doorbell_cpu_put, doorbell_cpu_wait};
use doorbell_c::device::{
    CDevice, doorbell_device_close, doorbell_device_next_error, doorbell_device_open,
    doorbell_device_query,
};
use doorbell_c::memory::{
    CMem, CMr, CPd, doorbell_mem_alloc, doorbell_mem_free, doorbell_mem_import, doorbell_mem_read,
    doorbell_mem_write, doorbell_mr_deregister, doorbell_mr_query, doorbell_mr_register,
    doorbell_pd_alloc,
};
use doorbell_c::qp::{
    CQp, doorbell_qp_connect_local, doorbell_qp_create, doorbell_qp_destroy, doorbell_qp_error,
    doorbell_qp_export, doorbell_qp_query, doorbell_qp_receive_from_anyone, doorbell_qp_reset,
};
use doorbell_c::recv::{
    doorbell_cpu_recv_post, doorbell_cpu_recv_wait, doorbell_cpu_send, doorbell_cpu_send_imm,
    doorbell_cpu_write_imm,
};
use doorbell_c::types::*;

const SECOND: u64 = 1_000_000_000;
const OK: i32 = Status::Ok as i32;

/// Every structure of the header may be all zero but for its size.
///
/// # Safety
/// `T` is one of the header's structures.
unsafe fn sized<T>() -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: they begin with their size, and zero is a value of every field.
    unsafe {
        value.as_mut_ptr().cast::<usize>().write(size_of::<T>());
        value.assume_init()
    }
}

fn last_error() -> String {
    // SAFETY: a terminated string that lives until this thread's next failure.
    unsafe { CStr::from_ptr(doorbell_c::doorbell_last_error()) }
        .to_string_lossy()
        .into_owned()
}

fn host_device() -> *mut CDevice {
    let host = CString::new("host").expect("no zero in it");
    let mut device = null_mut();
    // SAFETY: pointers to locals.
    let status = unsafe {
        let attr = doorbell_device_attr {
            gpu: host.as_ptr(),
            hca_cores: 1,
            ..sized()
        };
        doorbell_device_open(&raw const attr, &raw mut device)
    };
    assert_eq!(status, OK, "{}", last_error());
    device
}

struct Rig {
    device: *mut CDevice,
    pd: *mut CPd,
    mem: *mut CMem,
    mr: *mut CMr,
    region: doorbell_mr_info,
}

fn rig() -> Rig {
    let device = host_device();
    let (mut pd, mut mem, mut mr) = (null_mut(), null_mut(), null_mut());
    // SAFETY: pointers to locals.
    unsafe {
        let mut region: doorbell_mr_info = sized();
        assert_eq!(doorbell_pd_alloc(device, &raw mut pd), OK);
        assert_eq!(
            doorbell_mem_alloc(device, DOORBELL_MEM_HOST, 4096, &raw mut mem),
            OK
        );
        assert_eq!(
            doorbell_mr_register(
                pd,
                mem,
                DOORBELL_ACCESS_ALL,
                DOORBELL_ZERO_BASED,
                &raw mut mr
            ),
            OK
        );
        assert_eq!(doorbell_mr_query(mr, &raw mut region), OK);
        assert_eq!(
            (region.address, region.length, region.access),
            (0, 4096, DOORBELL_ACCESS_ALL)
        );
        Rig {
            device,
            pd,
            mem,
            mr,
            region,
        }
    }
}

fn qp(rig: &Rig, attr: impl FnOnce(&mut doorbell_qp_attr)) -> (i32, *mut CQp) {
    let mut qp = null_mut();
    // SAFETY: pointers to locals.
    unsafe {
        let mut given: doorbell_qp_attr = sized();
        attr(&mut given);
        (
            doorbell_qp_create(rig.pd, &raw const given, &raw mut qp),
            qp,
        )
    }
}

fn ready(rig: &Rig) -> *mut CQp {
    let (status, qp) = qp(rig, |attr| attr.depth = 64);
    assert_eq!(status, OK, "{}", last_error());
    assert_eq!(doorbell_qp_connect_local(qp, qp), OK, "{}", last_error());
    qp
}

#[test]
fn messages_take_receives() {
    let rig = rig();
    let (status, qp) = qp(&rig, |attr| {
        attr.depth = 64;
        attr.receives = 4;
    });
    assert_eq!(status, OK, "{}", last_error());
    assert_eq!(doorbell_qp_connect_local(qp, qp), OK, "{}", last_error());
    let (key, sent) = (rig.region.key, [9_u8; 100]);
    let (mut got, mut ticket) = ([0_u8; 100], 0_u64);
    // SAFETY: pointers to locals of the lengths given.
    unsafe {
        let mut message: doorbell_message = sized();
        assert_eq!(
            doorbell_mem_write(rig.mem, 0, sent.as_ptr().cast(), 100),
            OK
        );
        let post = |ticket: &mut u64, length| {
            doorbell_cpu_recv_post(qp, 1000, key, length, SECOND, &raw mut *ticket)
        };
        let take = |ticket, message: &mut doorbell_message| {
            doorbell_cpu_recv_wait(qp, ticket, 10 * SECOND, &raw mut *message)
        };
        assert_eq!(post(&mut ticket, 100), OK, "{}", last_error());
        let status = doorbell_cpu_send_imm(qp, 0, key, 100, 77, SECOND, null_mut());
        assert_eq!(status, OK, "{}", last_error());
        assert_eq!(take(ticket, &mut message), OK, "{}", last_error());
        assert_eq!(
            (message.arrival, message.length, message.immediate),
            (DOORBELL_ARRIVAL_SEND_IMM, 100, 77)
        );
        assert_eq!(
            doorbell_mem_read(rig.mem, 1000, got.as_mut_ptr().cast(), 100),
            OK
        );
        assert_eq!(sent, got);
        assert_eq!(post(&mut ticket, 0), OK);
        let status = doorbell_cpu_write_imm(qp, 2000, key, 0, key, 8, 5, SECOND, null_mut());
        assert_eq!(status, OK, "{}", last_error());
        assert_eq!(take(ticket, &mut message), OK);
        assert_eq!(
            (message.arrival, message.length, message.immediate),
            (DOORBELL_ARRIVAL_WRITE_IMM, 8, 5)
        );
        assert_eq!(post(&mut ticket, 8), OK);
        assert_eq!(
            doorbell_cpu_recv_wait(qp, ticket, SECOND / 50, &raw mut message),
            Status::TimedOut as i32
        );
        // Longer than its receive.
        assert_eq!(doorbell_cpu_send(qp, 0, key, 9, SECOND, null_mut()), OK);
        assert_eq!(take(ticket, &mut message), Status::Completion as i32);
    }
    // Without a receive queue.
    let without = ready(&rig);
    // SAFETY: nothing is pointed at.
    let status = unsafe { doorbell_cpu_recv_post(without, 0, key, 8, SECOND, null_mut()) };
    assert_eq!(status, Status::Invalid as i32, "{}", last_error());
}

#[test]
fn a_queue_pair_receives_from_anyone() {
    let rig = rig();
    let make = || {
        let (status, qp) = qp(&rig, |attr| {
            attr.depth = 64;
            attr.receives = 4;
        });
        assert_eq!(status, OK, "{}", last_error());
        qp
    };
    let (one, mut address) = (make(), [1; 64]);
    // SAFETY: the bytes of a local.
    unsafe {
        let to = address.as_mut_ptr();
        assert_eq!(
            doorbell_qp_receive_from_anyone(one, 100, to, 64),
            Status::Invalid as i32
        );
        assert!(last_error().contains("100"), "{}", last_error());
        assert_eq!(doorbell_qp_receive_from_anyone(one, 1024, to, 64), OK);
        let text = std::ffi::CStr::from_ptr(to).to_str().expect("words");
        let at: std::net::SocketAddr = text.parse().expect("an address");
        assert_ne!(at.port(), 0);
        // It is connected now, and cannot be again.
        assert_eq!(
            doorbell_qp_receive_from_anyone(one, 1024, null_mut(), 0),
            Status::State as i32
        );
        let mut short = [1; 5];
        let status = doorbell_qp_receive_from_anyone(make(), 1024, short.as_mut_ptr(), 4);
        assert_eq!((status, short[3], short[4]), (OK, 0, 1));
    }
}

#[test]
fn a_put_moves_bytes_and_everything_ends_in_any_order() {
    let rig = rig();
    let qp = ready(&rig);
    // Parents first: children keep what they need.
    assert_eq!(doorbell_device_close(rig.device), OK);
    let (sent, mut got, mut ticket) = ([7u8; 100], [0u8; 100], 0u64);
    // SAFETY: pointers to locals of the lengths given.
    unsafe {
        assert_eq!(
            doorbell_mem_write(rig.mem, 0, sent.as_ptr().cast(), 100),
            OK
        );
        let key = rig.region.key;
        assert_eq!(
            doorbell_cpu_put(qp, 1000, key, 0, key, 100, SECOND, &raw mut ticket),
            OK,
            "{}",
            last_error()
        );
        assert_eq!(
            doorbell_cpu_wait(qp, ticket, 10 * SECOND),
            OK,
            "{}",
            last_error()
        );
        assert_eq!(
            doorbell_mem_read(rig.mem, 1000, got.as_mut_ptr().cast(), 100),
            OK
        );
        assert_eq!(sent, got);
        let mut info: doorbell_qp_info = sized();
        assert_eq!(doorbell_qp_query(qp, &raw mut info), OK);
        assert_eq!(
            (info.state, info.depth, info.wqes, info.bytes),
            (DOORBELL_QP_READY, 64, 1, 100)
        );
    }
    assert_eq!(doorbell_mem_free(rig.mem), OK);
    assert_eq!(
        doorbell_mr_deregister(rig.mr, 10 * SECOND),
        OK,
        "{}",
        last_error()
    );
    assert_eq!(doorbell_qp_destroy(qp, 10 * SECOND), OK, "{}", last_error());
}

#[test]
fn an_error_is_told_kept_and_cleared_by_reset() {
    let rig = rig();
    let qp = ready(&rig);
    let key = rig.region.key;
    let mut ticket = 0;
    // SAFETY: pointers to locals.
    unsafe {
        // One byte past the end.
        assert_eq!(
            doorbell_cpu_put(qp, 4095, key, 0, key, 2, SECOND, &raw mut ticket),
            OK
        );
        assert_eq!(
            doorbell_cpu_wait(qp, ticket, 10 * SECOND),
            Status::Completion as i32
        );
        let mut error: doorbell_qp_error_info = sized();
        assert_eq!(doorbell_qp_error(qp, &raw mut error), OK);
        assert_eq!(
            (error.kind, error.wqe_index),
            (DOORBELL_ERROR_COMPLETION, 0)
        );
        let words = CStr::from_ptr(error.text.as_ptr()).to_string_lossy();
        assert!(words.contains("RKEY_RANGE"), "{words}");
        // The device tells it too, once.
        let mut text = [0; 16];
        assert_eq!(
            doorbell_device_next_error(rig.device, text.as_mut_ptr(), text.len(), 10 * SECOND),
            OK
        );
        assert!(
            CStr::from_ptr(text.as_ptr()).to_bytes().len() == 15,
            "cut to fit"
        );
        assert_eq!(
            doorbell_device_next_error(rig.device, null_mut(), 0, 0),
            Status::TimedOut as i32
        );
        // Refused until it is reset, and then as new.
        assert_eq!(
            doorbell_cpu_put(qp, 0, key, 0, key, 2, SECOND, &raw mut ticket),
            Status::Completion as i32
        );
        assert_eq!(doorbell_qp_reset(qp, 10 * SECOND), OK, "{}", last_error());
        assert_eq!(doorbell_qp_error(qp, &raw mut error), OK);
        assert_eq!(error.kind, DOORBELL_ERROR_NONE);
        assert_eq!(doorbell_qp_connect_local(qp, qp), OK);
        assert_eq!(
            doorbell_cpu_put(qp, 100, key, 0, key, 2, SECOND, &raw mut ticket),
            OK,
            "{}",
            last_error()
        );
        assert_eq!(
            doorbell_cpu_wait(qp, ticket, 10 * SECOND),
            OK,
            "{}",
            last_error()
        );
    }
}

#[test]
fn a_queue_pair_has_one_kind_of_poster() {
    let rig = rig();
    let mut handle: doorbell_qp_t = doorbell_qp_t { qp: 0, ext: 0 };
    let exported = ready(&rig);
    // SAFETY: pointers to locals.
    unsafe {
        assert_eq!(doorbell_qp_export(exported, &raw mut handle), OK);
        let first = (handle.qp, handle.ext);
        assert!(first.0 != 0 && first.1 != 0);
        assert_eq!(doorbell_qp_export(exported, &raw mut handle), OK);
        assert_eq!((handle.qp, handle.ext), first, "the same at each call");
        assert_eq!(
            doorbell_cpu_put(exported, 0, 0, 0, 0, 1, 0, null_mut()),
            Status::State as i32
        );

        let driven = ready(&rig);
        let key = rig.region.key;
        assert_eq!(
            doorbell_cpu_put(driven, 8, key, 0, key, 1, SECOND, null_mut()),
            OK
        );
        assert_eq!(
            doorbell_qp_export(driven, &raw mut handle),
            Status::State as i32
        );
        assert!(last_error().contains("export another"), "{}", last_error());
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let rig = rig();
    let gpu = CString::new("tpu").expect("no zero in it");
    // SAFETY: pointers to locals, null, or handles.
    unsafe {
        let mut device = null_mut();
        let attr = doorbell_device_attr {
            gpu: gpu.as_ptr(),
            ..sized()
        };
        assert_eq!(
            doorbell_device_open(&raw const attr, &raw mut device),
            Status::Invalid as i32
        );
        assert!(last_error().contains("tpu"), "{}", last_error());
        let fault = CString::new("wqe=1: drop-dorbell").expect("no zero in it");
        let attr = doorbell_device_attr {
            fault: fault.as_ptr(),
            ..sized()
        };
        assert_eq!(
            doorbell_device_open(&raw const attr, &raw mut device),
            Status::Invalid as i32
        );
        let text = last_error();
        assert!(
            text.contains("column 8") && text.contains("drop-doorbell?"),
            "{text}"
        );
        let attr = doorbell_device_attr {
            flags: 6,
            ..sized()
        };
        assert_eq!(
            doorbell_device_open(&raw const attr, &raw mut device),
            Status::Invalid as i32
        );
        let attr = doorbell_device_attr {
            flags: DOORBELL_DEVICE_CALLER_DRIVEN,
            hca_cores: 2,
            ..sized()
        };
        assert_eq!(
            doorbell_device_open(&raw const attr, &raw mut device),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_device_open(null(), null_mut()),
            Status::Invalid as i32
        );
        assert!(device.is_null());

        let mut info: doorbell_device_info = sized();
        info.size = 3;
        assert_eq!(
            doorbell_device_query(rig.device, &raw mut info),
            Status::Version as i32
        );
        assert_eq!(
            doorbell_device_query(rig.device, null_mut()),
            Status::Invalid as i32
        );

        let mut mem = null_mut();
        assert_eq!(
            doorbell_mem_alloc(rig.device, 9, 64, &raw mut mem),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_mem_alloc(rig.device, DOORBELL_MEM_HOST, 0, &raw mut mem),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_mem_import(rig.device, 0, 64, 0, &raw mut mem),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_mem_import(rig.device, 4096, 64, 1, &raw mut mem),
            Status::Unsupported as i32
        );
        assert_eq!(
            doorbell_mem_read(rig.mem, 4000, (&raw mut info).cast(), 97),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_mem_write(rig.mem, 0, null(), 1),
            Status::Invalid as i32
        );

        let mut mr = null_mut();
        assert_eq!(
            doorbell_mr_register(rig.pd, rig.mem, 16, 0, &raw mut mr),
            Status::Invalid as i32
        );
        assert_eq!(
            doorbell_mr_register(rig.pd, rig.mem, 1, 2, &raw mut mr),
            Status::Invalid as i32
        );
        assert!(mr.is_null());
    }
    for wrong in [
        (|a| a.depth = 3) as fn(&mut doorbell_qp_attr),
        |a| a.depth = 65536,
        |a| a.handler = 3,
        |a| a.cq = 3,
        |a| a.companion = 5,
    ] {
        let (status, qp) = qp(&rig, wrong);
        assert_eq!(status, Status::Invalid as i32, "{}", last_error());
        assert!(qp.is_null());
    }
}

/// A call's limit is its own: it does not become that of another thread's call that is waiting on the same queue pair.
#[test]
fn a_waiting_thread_holds_nobody_past_their_limit() {
    let rig = rig();
    let qp = ready(&rig).expose_provenance();
    let at = || std::ptr::with_exposed_provenance_mut::<CQp>(qp);
    let mut ticket = 0;
    let put = |limit, ticket: *mut u64| {
        let (addr, key) = (rig.region.address, rig.region.key);
        // SAFETY: pointers to locals.
        unsafe { doorbell_cpu_put(at(), addr, key, addr + 64, key, 8, limit, ticket) }
    };
    assert_eq!(put(SECOND, &raw mut ticket), OK, "{}", last_error());
    assert_eq!(doorbell_cpu_wait(at(), ticket, SECOND), OK);
    std::thread::scope(|s| {
        // For a request that nobody will post: until the queue pair is destroyed.
        let waits = s.spawn(move || {
            let at = std::ptr::with_exposed_provenance_mut::<CQp>(qp);
            doorbell_cpu_wait(at, ticket + 1, 20 * SECOND)
        });
        // Once it waits, all others run into their limits.
        while doorbell_cpu_wait(at(), ticket, 1000) == OK {
            std::thread::yield_now();
        }
        let late = Status::TimedOut as i32;
        assert_eq!(doorbell_c::doorbell_last_status(), late, "{}", last_error());
        assert!(!waits.is_finished());
        assert_eq!(put(0, null_mut()), late);
        assert_eq!(doorbell_qp_reset(at(), 1000), late);
        let mut handle = doorbell_qp_t { qp: 0, ext: 0 };
        // SAFETY: a pointer to a local.
        let exported = unsafe { doorbell_qp_export(at(), &raw mut handle) };
        assert_eq!(exported, Status::State as i32);
        assert!(!waits.is_finished());
        assert_eq!(doorbell_qp_destroy(at(), SECOND), OK, "{}", last_error());
        assert_ne!(waits.join().expect("no panic"), OK);
    });
}

/// Everything at once on the same handles: statuses, whatever they are, and an end.
#[test]
fn concurrent_calls_give_statuses() {
    let rig = rig();
    let (pd, mem) = (rig.pd.expose_provenance(), rig.mem.expose_provenance());
    let region = rig.region;
    for _ in 0..20 {
        let qp = ready(&rig).expose_provenance();
        std::thread::scope(|s| {
            for who in 0..6 {
                s.spawn(move || {
                    let at = std::ptr::with_exposed_provenance_mut::<CQp>(qp);
                    for round in 0..20 {
                        let mut ticket = 0;
                        let mut handle = doorbell_qp_t { qp: 0, ext: 0 };
                        let mut mr = null_mut::<CMr>();
                        // SAFETY: zero but for its size is a value of it.
                        let mut info: doorbell_qp_info = unsafe { sized() };
                        // SAFETY: pointers to locals.
                        let status = unsafe {
                            match (who + round) % 6 {
                                0 => doorbell_cpu_put(
                                    at,
                                    region.address,
                                    region.key,
                                    region.address,
                                    region.key,
                                    8,
                                    SECOND,
                                    &raw mut ticket,
                                ),
                                1 => doorbell_cpu_wait(at, round as u64, SECOND / 100),
                                2 => doorbell_qp_query(at, &raw mut info),
                                3 => doorbell_qp_export(at, &raw mut handle),
                                4 => {
                                    let pd = std::ptr::with_exposed_provenance_mut(pd);
                                    let mem = std::ptr::with_exposed_provenance_mut(mem);
                                    assert_eq!(
                                        doorbell_mr_register(pd, mem, 15, 0, &raw mut mr),
                                        OK
                                    );
                                    doorbell_mr_deregister(mr, SECOND)
                                }
                                _ if round > 12 => doorbell_qp_destroy(at, SECOND),
                                _ => doorbell_qp_reset(at, SECOND),
                            }
                        };
                        assert_ne!(status, Status::Internal as i32, "{}", last_error());
                    }
                });
            }
        });
    }
}

/// A length that cannot be is refused before the caller's memory is looked at.
#[test]
fn lengths_past_the_end_touch_nothing() {
    let rig = rig();
    let mut bytes = [7u8; 16];
    let at = bytes.as_mut_ptr().cast::<std::ffi::c_void>();
    for (offset, length) in [(4096, 1), (0, 4097), (0, usize::MAX), (usize::MAX, 16)] {
        // SAFETY: refused before a byte is touched.
        let (read, write) = unsafe {
            (
                doorbell_mem_read(rig.mem, offset, at, length),
                doorbell_mem_write(rig.mem, offset, at, length),
            )
        };
        assert_ne!(read, OK, "{offset} {length}");
        assert_eq!(read, write, "{}", last_error());
        assert!(last_error().contains("4096"), "{}", last_error());
    }
    assert_eq!(bytes, [7; 16]);
}

#[test]
fn handles_are_checked() {
    let rig = rig();
    let qp = ready(&rig);
    let handle = Status::Handle as i32;
    assert_eq!(doorbell_qp_connect_local(null_mut(), qp), handle);
    assert_eq!(
        doorbell_qp_connect_local(rig.mem.cast(), qp),
        handle,
        "of another kind"
    );
    assert_eq!(
        doorbell_qp_connect_local(qp, qp),
        Status::State as i32,
        "connected already"
    );
    assert_eq!(doorbell_qp_destroy(qp, 10 * SECOND), OK, "{}", last_error());
    assert_eq!(doorbell_qp_destroy(qp, SECOND), handle);
    assert_eq!(doorbell_qp_reset(qp, SECOND), handle);
    assert!(last_error().contains("destroyed"), "{}", last_error());
    let mut word = 0u64;
    assert_eq!(
        doorbell_mem_free((&raw mut word).cast()),
        handle,
        "a stray pointer"
    );
    assert_eq!(doorbell_mem_free(rig.mem), OK);
    assert_eq!(doorbell_mem_free(rig.mem), handle);
}
