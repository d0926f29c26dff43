//! Asynchronous events: what the host learns without asking. The first error of every QP, and engines or peers that died.
//! The queue is bounded; when it is full the oldest event goes and the loss is counted.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_wire::{Qpn, Syndrome, Vendor};

/// Events kept until somebody takes them.
const CAPACITY: usize = 4096;

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A QP went to error: its first error. Raised before its error CQE is written.
    QpError {
        /// The QP.
        qpn: Qpn,
        /// mlx5 syndrome.
        syndrome: Syndrome,
        /// Vendor syndrome.
        vendor: Vendor,
        /// Opcode byte of the WQE (0 if there was none).
        opcode: u8,
        /// Index of the WQE, modulo 2^16.
        wqe_index: u16,
    },
    /// A copy engine failed or stalled; the QP's error follows.
    CopyFailed {
        /// The QP.
        qpn: Qpn,
        /// What happened, and what the likely cause is.
        reason: String,
    },
    /// An RDMA device refused memory or work requests; the QP's error follows.
    DeviceRefused {
        /// The device.
        device: String,
        /// What happened, and what to do about it.
        reason: String,
    },
    /// An engine core died; all its QPs are in error.
    EngineDown {
        /// The core.
        core: usize,
        /// Why.
        reason: String,
    },
    /// A peer process is gone; the QPs connected to it are in error.
    PeerDown {
        /// The peer.
        peer: u64,
        /// Why.
        reason: String,
    },
}

#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    lost: u64,
}

impl Events {
    /// Never blocks for long: an engine calls it when a QP fails.
    pub(crate) fn push(&self, event: Event) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.events.len() == CAPACITY {
            queue.events.pop_front();
            queue.lost += 1;
        }
        queue.events.push_back(event);
        self.ready.notify_all();
    }

    pub(crate) fn poll(&self) -> Option<Event> {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .events
            .pop_front()
    }

    pub(crate) fn wait(&self, timeout: Duration) -> Option<Event> {
        let deadline = crate::deadline(timeout);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(event) = queue.events.pop_front() {
                return Some(event);
            }
            let left = deadline
                .checked_duration_since(Instant::now())
                .filter(|d| !d.is_zero())?;
            queue = self
                .ready
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(crate) fn lost(&self) -> u64 {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_and_in_order() {
        let events = Events::default();
        assert_eq!(events.wait(Duration::from_millis(1)), None);
        for peer in 0..CAPACITY as u64 + 2 {
            events.push(Event::PeerDown {
                peer,
                reason: String::new(),
            });
        }
        assert_eq!(events.lost(), 2);
        assert!(matches!(
            events.poll(),
            Some(Event::PeerDown { peer: 2, .. })
        ));
    }
}
