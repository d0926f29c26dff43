//! `doorbell_qp_*`: queue pairs, with their state checked at each call instead of carried in a type.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use doorbell::{
    AnyQp, CpuQp, CqKind, Destination, ErrorKind, Export, Handler, LinkKind, QpState, RemoteMr,
};

use crate::convert::{store, timeout, wanted};
use crate::error::{Failure, Result, guard};
use crate::handle::Table;
use crate::memory::{CPd, DOMAINS};
use crate::status::Status;
use crate::types::{
    DOORBELL_CQ_COLLAPSED, DOORBELL_CQ_DEFAULT, DOORBELL_CQ_PER_SLOT, DOORBELL_ERROR_CLOSED,
    DOORBELL_ERROR_COMPLETION, DOORBELL_ERROR_ENGINE_DOWN, DOORBELL_ERROR_NONE,
    DOORBELL_HANDLER_DEFAULT, DOORBELL_HANDLER_DOORBELL, DOORBELL_HANDLER_PRODUCER,
    DOORBELL_HANDLER_RECORD, DOORBELL_QP_DESTROYED, DOORBELL_QP_ERROR, DOORBELL_QP_READY,
    DOORBELL_QP_RESET, doorbell_qp_attr, doorbell_qp_error_info, doorbell_qp_info, doorbell_qp_t,
    read, text, write,
};

/// `struct doorbell_qp`.
#[derive(Debug)]
#[repr(C)]
pub struct CQp(c_void);

static QPS: Table<Arc<Queue>> = Table::new("doorbell_qp");

/// One queue pair of C's, with whoever posts to it.
pub(crate) struct Queue {
    qp: AnyQp,
    /// Made by the first `doorbell_qp_export`, kept until the end so that the handle stays the same.
    export: Mutex<Option<Export>>,
    /// Made by the first `doorbell_cpu_*`. A lock of its own: a thread that waits on the queue must not keep others from asking about it.
    cpu: Mutex<Option<CpuQp>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], for a lock that another call may hold as long as its own time limit says.
fn lock_by<T>(mutex: &Mutex<T>, until: Instant) -> Result<MutexGuard<'_, T>> {
    let mut pause = Duration::from_micros(1);
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(guard)) => return Ok(guard.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::new(
                Status::TimedOut,
                "another thread's call on this queue pair has not ended: wait longer, or give that call a shorter limit",
            ));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

pub(crate) fn queue(qp: *mut CQp) -> Result<Arc<Queue>> {
    QPS.get(qp)
}

impl Queue {
    /// Runs `f` with the queue as the CPU posts to it, and what is left of the time when its turn comes.
    pub(crate) fn with_cpu<R>(
        &self,
        timeout: Duration,
        f: impl FnOnce(&mut CpuQp, Duration) -> Result<R>,
    ) -> Result<R> {
        let until = doorbell_hca::deadline(timeout);
        let mut cpu = lock_by(&self.cpu, until)?;
        let cpu = match &mut *cpu {
            Some(cpu) => cpu,
            none => {
                if lock(&self.export).is_some() {
                    return Err(Failure::new(
                        Status::State,
                        "the queue pair is exported to kernels: use another one from the CPU",
                    ));
                }
                none.insert(CpuQp::new(&self.qp)?)
            }
        };
        f(cpu, until.saturating_duration_since(Instant::now()))
    }

    /// The bytes that a peer needs to connect to it over shared memory.
    pub(crate) fn describe(&self, regions: &[RemoteMr]) -> Result<Vec<u8>> {
        Ok(self.qp.endpoint(LinkKind::Shm, regions)?.to_bytes())
    }

    pub(crate) fn connect(&self, to: &Destination) -> Result<()> {
        Ok(self.qp.connect(to)?)
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `attr` is null or a structure whose `size` bytes are readable; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_create(
    pd: *mut CPd,
    attr: *const doorbell_qp_attr,
    out: *mut *mut CQp,
) -> i32 {
    guard("doorbell_qp_create", || {
        wanted("out", out)?;
        let mut builder = DOMAINS.get(pd)?.qp();
        if !attr.is_null() {
            // SAFETY: this function's promise.
            let attr = unsafe { read(attr) }?;
            if attr.depth != 0 {
                builder = builder.depth(attr.depth);
            }
            builder = match attr.handler {
                DOORBELL_HANDLER_DEFAULT => builder,
                DOORBELL_HANDLER_PRODUCER => builder.handler(Handler::Producer),
                DOORBELL_HANDLER_RECORD => builder.handler(Handler::Record),
                DOORBELL_HANDLER_DOORBELL => builder.handler(Handler::Only),
                other => {
                    return Err(Failure::invalid(
                        "attr.handler",
                        other,
                        "use one of DOORBELL_HANDLER_*",
                    ));
                }
            };
            builder = match attr.cq {
                DOORBELL_CQ_DEFAULT => builder,
                DOORBELL_CQ_PER_SLOT => builder.cq(CqKind::PerSlot),
                DOORBELL_CQ_COLLAPSED => builder.cq(CqKind::Collapsed),
                other => {
                    return Err(Failure::invalid(
                        "attr.cq",
                        other,
                        "use one of DOORBELL_CQ_*",
                    ));
                }
            };
            if attr.companion != 0 {
                builder = builder.companion(attr.companion);
            }
            builder = builder.receive_queue(attr.receives);
            if attr.receive_pieces != 0 {
                builder = builder.receive_pieces(attr.receive_pieces);
            }
        }
        let queue = Queue {
            qp: builder.build()?.into(),
            export: Mutex::new(None),
            cpu: Mutex::new(None),
        };
        // SAFETY: this function's promise.
        unsafe { store(out, QPS.insert(Arc::new(queue))) };
        Ok(())
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_qp_connect_local(qp: *mut CQp, peer: *mut CQp) -> i32 {
    guard("doorbell_qp_connect_local", || {
        let to = Destination::Loopback {
            qpn: queue(peer)?.qp.qpn(),
        };
        queue(qp)?.connect(&to)
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `address` is null or `capacity` bytes are writable there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_receive_from_anyone(
    qp: *mut CQp,
    path_mtu: u32,
    address: *mut c_char,
    capacity: usize,
) -> i32 {
    guard("doorbell_qp_receive_from_anyone", || {
        let queue = QPS.get(qp)?;
        let path_mtu = u16::try_from(path_mtu).unwrap_or(0);
        let at = queue.qp.receive_from_anyone(path_mtu)?.to_string();
        if !address.is_null() && capacity > 0 {
            let len = at.len().min(capacity - 1);
            // SAFETY: this function's promise; `len + 1 <= capacity`.
            unsafe {
                address.copy_from_nonoverlapping(at.as_ptr().cast(), len);
                address.add(len).write(0);
            }
        }
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_export(qp: *mut CQp, out: *mut doorbell_qp_t) -> i32 {
    guard("doorbell_qp_export", || {
        wanted("out", out)?;
        let queue = queue(qp)?;
        // Whoever holds it posts from the CPU.
        if queue.cpu.try_lock().map_or(true, |cpu| cpu.is_some()) {
            return Err(Failure::new(
                Status::State,
                "the CPU posts to this queue pair: export another one to kernels",
            ));
        }
        let mut export = lock(&queue.export);
        let export = match &mut *export {
            Some(export) => export,
            none => none.insert(queue.qp.export()?),
        };
        let handle = export.handle();
        // SAFETY: this function's promise.
        unsafe {
            store(
                out,
                doorbell_qp_t {
                    qp: handle.qp.addr(),
                    ext: handle.ext.addr(),
                },
            )
        };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `info` is null or a structure whose `size` bytes are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_query(qp: *mut CQp, info: *mut doorbell_qp_info) -> i32 {
    guard("doorbell_qp_query", || {
        let queue = queue(qp)?;
        let counters = queue.qp.counters();
        let answer = doorbell_qp_info {
            size: 0,
            number: queue.qp.qpn(),
            state: match queue.qp.state() {
                QpState::Reset => DOORBELL_QP_RESET,
                QpState::Ready => DOORBELL_QP_READY,
                QpState::Error => DOORBELL_QP_ERROR,
                QpState::Destroyed => DOORBELL_QP_DESTROYED,
            },
            depth: queue.qp.depth(),
            handler: queue.qp.handler().nic_handler() as u32,
            doorbells: counters.doorbells,
            slots_rung: counters.slots_rung,
            wqes: counters.wqes,
            bytes: counters.bytes,
            flushed: counters.flushed,
        };
        // SAFETY: this function's promise.
        unsafe { write(info, answer) }
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `info` is null or a structure whose `size` bytes are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_error(qp: *mut CQp, info: *mut doorbell_qp_error_info) -> i32 {
    guard("doorbell_qp_error", || {
        let queue = queue(qp)?;
        let mut answer = doorbell_qp_error_info {
            size: 0,
            kind: DOORBELL_ERROR_NONE,
            syndrome: 0,
            vendor: 0,
            wqe_index: 0,
            text: [0; 400],
        };
        if let Some(fault) = queue.qp.error() {
            answer = doorbell_qp_error_info {
                size: 0,
                kind: match fault.kind() {
                    ErrorKind::None => DOORBELL_ERROR_NONE,
                    ErrorKind::Completion => DOORBELL_ERROR_COMPLETION,
                    ErrorKind::Closed => DOORBELL_ERROR_CLOSED,
                    ErrorKind::EngineDown => DOORBELL_ERROR_ENGINE_DOWN,
                },
                syndrome: fault.syndrome().0.into(),
                vendor: fault.vendor().0.into(),
                wqe_index: fault.wqe_index().into(),
                text: text(&fault.to_string()),
            };
        }
        // SAFETY: this function's promise.
        unsafe { write(info, answer) }
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_qp_reset(qp: *mut CQp, timeout_ns: u64) -> i32 {
    guard("doorbell_qp_reset", || {
        let queue = queue(qp)?;
        // Between two calls of the CPU, so that none of them posts into a queue that is being emptied.
        let until = doorbell_hca::deadline(timeout(timeout_ns));
        let _between = lock_by(&queue.cpu, until)?;
        Ok(queue
            .qp
            .reset(until.saturating_duration_since(Instant::now()))?)
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_qp_destroy(qp: *mut CQp, timeout_ns: u64) -> i32 {
    guard("doorbell_qp_destroy", || {
        let queue = QPS.remove(qp)?;
        // First of all: who waits on the queue gets the error that destroying writes, and then lets go of `cpu`.
        let outcome = queue.qp.destroy(timeout(timeout_ns));
        *lock(&queue.export) = None;
        *lock(&queue.cpu) = None;
        Ok(outcome?)
    })
}
