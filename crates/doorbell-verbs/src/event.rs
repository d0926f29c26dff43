//! What a device says by itself.

use core::ptr::NonNull;
use std::os::fd::BorrowedFd;

use crate::abi::*;
use crate::device::Context;

/// Something that happened to a device or a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The device is gone, or can do nothing any more.
    DeviceFatal,
    /// A port went down.
    PortDown(u8),
    /// A port came up.
    PortActive(u8),
    /// The peer's request broke a queue pair: no rights, or malformed. Its number.
    QpAccess(u32),
    /// A queue pair failed by itself. Its number.
    QpFatal(u32),
    /// A completion queue overflowed or failed.
    CqError,
    /// Anything else, by its number.
    Other(u32),
}

impl Context {
    /// Events are looked for, never waited for. `false`: they cannot be read without waiting.
    ///
    /// # Safety
    /// The context is open.
    pub(crate) unsafe fn unblock_events(raw: NonNull<RawContext>, name: &str) -> bool {
        // SAFETY: the caller's promise: it owns this descriptor.
        let fd = unsafe { (*raw.as_ptr()).async_fd };
        if fd < 0 {
            return false;
        }
        // SAFETY: as above.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let set = rustix::fs::fcntl_getfl(fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK));
        if let Err(e) = set {
            tracing::warn!(
                "RDMA device {name}: its events cannot be read without waiting ({e}): they are not read"
            );
        }
        set.is_ok()
    }

    /// The next event, if there is one. Never waits.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        if !self.0.unblocked {
            return None;
        }
        let mut raw = RawAsyncEvent {
            element: core::ptr::null_mut(),
            event_type: 0,
        };
        // SAFETY: the context is open; the structure is written if the call succeeds.
        if unsafe { (self.api().get_async_event)(self.raw(), &mut raw) } != 0 {
            return None;
        }
        let qpn = || match NonNull::new(raw.element.cast::<RawQp>()) {
            // SAFETY: a queue pair is not destroyed before its events are acknowledged, which is done below.
            Some(qp) => unsafe { (*qp.as_ptr()).qp_num },
            None => 0,
        };
        let port = raw.element.addr() as u8;
        let event = match raw.event_type {
            event_type::DEVICE_FATAL => AsyncEvent::DeviceFatal,
            event_type::PORT_ERR => AsyncEvent::PortDown(port),
            event_type::PORT_ACTIVE => AsyncEvent::PortActive(port),
            event_type::QP_FATAL => AsyncEvent::QpFatal(qpn()),
            event_type::QP_REQ_ERR | event_type::QP_ACCESS_ERR => AsyncEvent::QpAccess(qpn()),
            event_type::CQ_ERR => AsyncEvent::CqError,
            other => AsyncEvent::Other(other),
        };
        // SAFETY: it is the event from above, acknowledged once.
        unsafe { (self.api().ack_async_event)(&mut raw) };
        Some(event)
    }
}
