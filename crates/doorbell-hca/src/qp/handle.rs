//! The owner's handle of a QP: connect, fail, reset, destroy. Each is a message to the owning engine core, with a deadline.
//! A core that nobody drives is borrowed for the moment; a dead core is answered for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use doorbell_device::layout::ErrorWord;
use doorbell_wire::{Cqn, Qpn};

use super::shared::{QpCounters, QpShared, QpState};
use crate::error::{HcaError, Result};
use crate::fault::Fault;
use crate::hca::Hca;
use crate::link::Destination;
use crate::raw::Shared;
use crate::record::Target;
use crate::verbs::{Half, VerbsEnd, VerbsPort};

/// A queue pair. Dropping it destroys it within the configured time; if the engine does not answer, its memory is leaked.
#[derive(Debug)]
pub struct HcaQp {
    hca: Hca,
    shared: Arc<QpShared>,
    /// Slot in its core.
    slot: u32,
    alive: bool,
    /// The RDMA device's queue pair, if it has one.
    nic: Mutex<Option<Half>>,
}

impl HcaQp {
    pub(crate) fn new(hca: Hca, shared: Arc<QpShared>, slot: u32) -> Self {
        Self {
            hca,
            shared,
            slot,
            alive: true,
            nic: Mutex::default(),
        }
    }

    /// Its HCA.
    pub fn hca(&self) -> &Hca {
        &self.hca
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.shared.qpn
    }

    /// The number of its send CQ.
    pub fn cqn(&self) -> Cqn {
        self.shared.cq.cqn
    }

    /// The engine core that executes it.
    pub fn core(&self) -> usize {
        self.shared.core
    }

    /// Its protection domain.
    pub fn pd(&self) -> u32 {
        self.shared.pd
    }

    /// Its state now.
    pub fn state(&self) -> QpState {
        self.shared.state()
    }

    /// The first error since creation or the last reset.
    pub fn first_error(&self) -> Option<ErrorWord> {
        self.shared.first_error()
    }

    /// Has it a receive queue?
    pub fn receives(&self) -> bool {
        self.shared.recv.is_some()
    }

    /// What it has done.
    pub fn counters(&self) -> QpCounters {
        self.shared.counters.snapshot()
    }

    /// What its RoCE connection has counted; `None` if it has none.
    ///
    /// # Errors
    /// [`crate::HcaError::TimedOut`], [`crate::HcaError::EngineDown`].
    pub fn roce_counters(&self, timeout: Duration) -> Result<Option<doorbell_roce::Counters>> {
        self.on_core(
            "say what the connection counted",
            timeout,
            false,
            |core, _, slot| core.link_counters(slot),
        )
    }

    /// Tells the flight recorder where the posting side keeps its indexes, a [`GpuQp`](doorbell_device::layout::GpuQp) in host memory, so that
    /// they can be told even when this process is gone.
    ///
    /// # Errors
    /// [`crate::HcaError::TimedOut`], [`crate::HcaError::EngineDown`].
    ///
    /// # Safety
    /// The structure is mapped as long as `keep` lives.
    pub unsafe fn watch_poster(
        &self,
        at: Shared<u64>,
        keep: crate::Keep,
        timeout: Duration,
    ) -> Result<()> {
        self.on_core(
            "take the poster's address",
            timeout,
            false,
            move |core, _, slot| core.watch_poster(slot, at, keep),
        )
    }

    /// Slots announced and slots completed since the last reset, as the engine last said.
    pub fn indexes(&self) -> (u64, u64) {
        use core::sync::atomic::Ordering::Relaxed;
        (
            self.shared.producer.load(Relaxed),
            self.shared.consumer.load(Relaxed),
        )
    }

    /// One more than the newest slot whose completion a collapsed CQ was written for, since the last reset; 0: none.
    pub fn newest_cqe(&self) -> u64 {
        self.shared
            .newest_cqe
            .load(core::sync::atomic::Ordering::Relaxed)
    }

    /// Receives posted, and those that a message has filled, since the last reset; `None` without a receive queue.
    pub fn receives_so_far(&self) -> Option<(u64, u64)> {
        let recv = self.shared.recv.as_ref()?;
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this handle is alive, so the queue's memory is mapped unless it is closed, which is checked.
        unsafe { recv.standing(false) }.0
    }

    /// Where its requests go, and to which queue pair there.
    pub fn target(&self) -> (Target, u32) {
        use core::sync::atomic::Ordering::Relaxed;
        Target::parse(self.shared.target.load(Relaxed))
    }

    /// Connects a QP in [`QpState::Reset`]: from now on its work requests are executed.
    ///
    /// # Errors
    /// [`crate::HcaError::UnknownQp`] for a loopback target that does not exist, [`crate::HcaError::WrongState`], [`crate::HcaError::TimedOut`],
    /// [`crate::HcaError::EngineDown`].
    pub fn connect(&self, destination: Destination, timeout: Duration) -> Result<()> {
        if let Destination::Verbs(target) = &destination {
            // Resolving the peer's address takes its time: not the engine's.
            let mut nic = self.nic();
            let Some(device) = nic.as_ref() else {
                return Err(HcaError::BadConfig {
                    what: format!(
                        "queue pair {} has no RDMA device's: prepare it first",
                        self.qpn()
                    ),
                });
            };
            if let Err(e) = device.connect(target) {
                // Neither here nor there any more; the next attempt begins anew.
                *nic = None;
                drop(nic);
                self.on_core(
                    "let go of the device's queue pair",
                    timeout,
                    false,
                    |core, inner, slot| core.reset(inner, slot),
                )?;
                return Err(e.into());
            }
        }
        self.on_core(
            "connect the queue pair",
            timeout,
            false,
            move |core, inner, slot| core.connect(inner, slot, destination),
        )?
    }

    /// Puts the QP into error, as a hardware error would: outstanding WQEs are flushed, the first error is recorded.
    ///
    /// # Errors
    /// [`crate::HcaError::TimedOut`], [`crate::HcaError::EngineDown`].
    pub fn fail(&self, fault: Fault, timeout: Duration) -> Result<()> {
        self.on_core(
            "fail the queue pair",
            timeout,
            false,
            move |core, inner, slot| {
                core.fail_by_owner(inner, slot, fault);
            },
        )
    }

    /// Takes the QP back to [`QpState::Reset`]: indexes zero, rings, CQ and words initialised, first error cleared.
    ///
    /// Nobody may post meanwhile: the poster's own structure has to be initialised anew afterwards.
    ///
    /// # Errors
    /// [`crate::HcaError::TimedOut`], [`crate::HcaError::EngineDown`].
    pub fn reset(&self, timeout: Duration) -> Result<()> {
        self.on_core(
            "reset the queue pair",
            timeout,
            false,
            |core, inner, slot| core.reset(inner, slot),
        )
        .map(drop)?;
        *self.nic() = None;
        Ok(())
    }

    fn nic(&self) -> MutexGuard<'_, Option<Half>> {
        self.nic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives this QP, which is in [`QpState::Reset`], a queue pair of an RDMA device, and says what the peer needs to know of it. Called again before
    /// it is connected, it says the same.
    ///
    /// # Errors
    /// [`HcaError::Verbs`], [`HcaError::WrongState`], [`HcaError::TimedOut`], [`HcaError::EngineDown`].
    pub fn prepare(&self, port: &Arc<VerbsPort>, timeout: Duration) -> Result<VerbsEnd> {
        let mut nic = self.nic();
        if let Some(nic) = nic.as_ref()
            && Arc::ptr_eq(nic.port(), port)
        {
            return Ok(nic.end());
        }
        let wrong = || HcaError::WrongState {
            qpn: self.qpn(),
            state: self.state(),
            call: "prepare",
            needs: "a queue pair in Reset: reset it first",
        };
        if self.state() != QpState::Reset {
            return Err(wrong());
        }
        let receives = (self.shared.receives, self.shared.receive_pieces);
        let made = Half::new(port, self.pd(), self.shared.depth, receives)?;
        let theirs = made.clone();
        let taken = self.on_core(
            "take the device's queue pair",
            timeout,
            false,
            move |core, inner, slot| core.prepare_verbs(inner, slot, theirs),
        )?;
        if !taken {
            return Err(wrong());
        }
        let end = made.end();
        *nic = Some(made);
        Ok(end)
    }

    /// How long a call without a time-out of its own waits for this queue pair's engine now: see [`Hca::patience`].
    pub fn patience(&self) -> Duration {
        self.hca.patience(self.core())
    }

    /// Takes the QP from its engine. Afterwards nothing reads or writes its memory.
    ///
    /// # Errors
    /// [`crate::HcaError::TimedOut`]: the engine still holds the QP, whose memory is therefore kept mapped for ever.
    pub fn destroy(mut self, timeout: Duration) -> Result<()> {
        self.take_down(timeout)
    }

    fn take_down(&mut self, timeout: Duration) -> Result<()> {
        if !std::mem::replace(&mut self.alive, false) {
            return Ok(());
        }
        let result = self.on_core(
            "let go of the queue pair",
            timeout,
            true,
            |core, inner, slot| core.destroy(inner, slot),
        );
        self.hca.inner().queues.forget(&self.shared);
        // What the QP kept is dropped here, not by the engine.
        result.map(drop)
    }

    fn on_core<R: Send + 'static>(
        &self,
        what: &'static str,
        timeout: Duration,
        even_dead: bool,
        f: impl FnOnce(&mut crate::engine::Core, &crate::hca::Inner, u32) -> R + Send + 'static,
    ) -> Result<R> {
        let slot = self.slot;
        self.hca
            .inner()
            .on_core(self.core(), what, timeout, even_dead, move |core, inner| {
                f(core, inner, slot)
            })
    }
}

impl Drop for HcaQp {
    fn drop(&mut self) {
        let timeout = self.patience();
        if let Err(e) = self.take_down(timeout) {
            if timeout.is_zero() {
                // The engine core that does not answer has been named already.
                tracing::debug!(qpn = %self.shared.qpn, "destroying a queue pair: {e}");
                return;
            }
            tracing::error!(qpn = %self.shared.qpn, "destroying a queue pair: {e}; its memory is kept (leaked)");
        }
    }
}
