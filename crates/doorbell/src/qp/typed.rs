//! Queue pairs whose type says whether they are connected.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::{QpCore, QpInner};
use crate::Result;
use crate::connect::Destination;

mod sealed {
    pub trait State: Send + Sync + 'static {}
}

/// What a [`Qp`]'s type can say.
pub trait State: sealed::State {}

/// Made, or reset: not connected.
#[derive(Debug)]
pub enum Reset {}
/// Connected.
#[derive(Debug)]
pub enum Ready {}

impl sealed::State for Reset {}
impl sealed::State for Ready {}
impl State for Reset {}
impl State for Ready {}

/// A queue pair: a send queue, its completion queue, and the words by which GPU and engine talk.
///
/// It ends when the last of the `Qp` and its exports is dropped, or by [`Qp::destroy`]. Ending waits up to the device's
/// quiesce time for the engine to let go, then leaks the queue memory and logs; it never unmaps under a kernel.
pub struct Qp<S: State = Ready> {
    core: QpCore,
    state: PhantomData<fn() -> S>,
}

impl<S: State> Qp<S> {
    fn from_core(core: QpCore) -> Self {
        Self {
            core,
            state: PhantomData,
        }
    }

    pub(super) fn into_core(self) -> QpCore {
        self.core
    }

    /// Stops it, forgets what was posted, and returns it unconnected. Exports stay valid and start again from slot zero:
    /// no kernel may be using them meanwhile. What cannot be stopped in time is destroyed.
    pub fn reset(self, timeout: Duration) -> Result<Qp<Reset>> {
        self.inner.reset(timeout)?;
        Ok(Qp::from_core(self.core))
    }

    /// Ends it now: kernels that wait on it get an answer. Its memory stays until exports and kernels are gone.
    pub fn destroy(self, timeout: Duration) -> Result<()> {
        self.inner.destroy(timeout)
    }
}

impl Qp<Reset> {
    pub(super) fn new(inner: QpInner) -> Self {
        let inner = Arc::new(inner);
        inner.device().made(&inner);
        if let Some(companion) = &inner.companion {
            inner.device().made(companion);
        }
        Self::from_core(QpCore { inner })
    }

    /// Connects it. What cannot be connected is destroyed; [`AnyQp`](super::AnyQp) keeps it.
    pub fn connect(self, to: &Destination) -> Result<Qp<Ready>> {
        self.inner.connect(to)?;
        Ok(Qp::from_core(self.core))
    }

    /// Connects it to nobody; see [`AnyQp::receive_from_anyone`](super::AnyQp::receive_from_anyone).
    pub fn receive_from_anyone(self, path_mtu: u16) -> Result<(Qp<Ready>, SocketAddr)> {
        let address = self.roce_address()?;
        Ok((
            self.connect(&Destination::RoceAnyone { path_mtu })?,
            address,
        ))
    }

    /// Connects it to itself: its work requests act on regions of its own protection domain.
    pub fn connect_to_self(self) -> Result<Qp<Ready>> {
        let qpn = self.qpn();
        self.connect(&Destination::Loopback { qpn })
    }
}

/// Connects two queue pairs of one device to each other.
pub fn connect_pair(a: Qp<Reset>, b: Qp<Reset>) -> Result<(Qp<Ready>, Qp<Ready>)> {
    let (to_a, to_b) = (
        Destination::Loopback { qpn: a.qpn() },
        Destination::Loopback { qpn: b.qpn() },
    );
    Ok((a.connect(&to_b)?, b.connect(&to_a)?))
}

impl<S: State> Deref for Qp<S> {
    type Target = QpCore;

    fn deref(&self) -> &QpCore {
        &self.core
    }
}

impl<S: State> AsRef<QpCore> for Qp<S> {
    fn as_ref(&self) -> &QpCore {
        &self.core
    }
}

impl<S: State> fmt::Debug for Qp<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}
