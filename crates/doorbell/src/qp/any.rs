//! What can be done with a queue pair in any state, and a handle that leaves its state to run time.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Cq, Export, ExportLayout, Handler, Qp, QpCounters, QpInner, QpState, State};
use crate::connect::Destination;
use crate::endpoint::{Endpoint, LinkKind, RoceEndpoint, VerbsEndpoint};
use crate::mr::{Pd, RemoteMr};
use crate::{Error, QpFault, Result};

/// The part of [`Qp`] and [`AnyQp`] that does not depend on the state.
pub struct QpCore {
    pub(crate) inner: Arc<QpInner>,
}

impl QpCore {
    pub(crate) fn of(inner: Arc<QpInner>) -> Self {
        Self { inner }
    }

    /// QP number, 24 bits. A reset keeps it.
    pub fn qpn(&self) -> u32 {
        self.inner.qpn()
    }

    /// The completion queue of its send queue.
    pub fn cq(&self) -> Cq<'_> {
        Cq {
            qp: &self.inner,
            recv: None,
        }
    }

    /// The completion queue of its receive queue, if it has one.
    pub fn recv_cq(&self) -> Option<Cq<'_>> {
        let cqn = self.inner.provider.recv_cqn()?;
        Some(Cq {
            qp: &self.inner,
            recv: Some((cqn, self.recv_depth())),
        })
    }

    /// Receives of its receive queue; 0 without one.
    pub fn recv_depth(&self) -> u32 {
        self.inner.recv.map_or(0, |shape| shape.depth)
    }

    /// Slots of the send queue.
    pub fn depth(&self) -> u32 {
        self.inner.depth()
    }

    /// Where packets for it have to be sent to; opens the port if it was not.
    pub(super) fn roce_address(&self) -> Result<SocketAddr> {
        let provider = &self.inner.pd.inner.device.provider;
        Ok(provider.roce_offer(self.core())?.address)
    }

    /// How it is rung.
    pub fn handler(&self) -> Handler {
        self.inner.handler
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.inner.pd
    }

    /// The engine core that executes it.
    pub fn core(&self) -> Option<usize> {
        self.inner.provider.core()
    }

    /// Its state now, as the engine sees it.
    pub fn state(&self) -> QpState {
        self.inner.provider.state()
    }

    /// Its first error since the last reset; kernels read the same word.
    pub fn error(&self) -> Option<QpFault> {
        self.inner.fault()
    }

    /// Fails unless it is ready at this moment; the error says why it is not.
    pub fn check(&self) -> Result<()> {
        match (self.error(), self.state()) {
            (Some(fault), _) => Err(Error::Qp {
                qpn: self.qpn(),
                fault,
            }),
            (None, QpState::Ready) => Ok(()),
            (None, state) => Err(Error::State {
                qpn: self.qpn(),
                state,
                remedy: "reset and reconnect it",
            }),
        }
    }

    /// Puts it into error, as if a work request had failed: kernels that wait get an answer.
    pub fn fail(&self) -> Result<()> {
        self.inner.provider.fail()
    }

    /// What the engine has done for it since it was made.
    pub fn counters(&self) -> QpCounters {
        self.inner.provider.counters()
    }

    /// What its RoCE connection has counted, by the names of the rdma tool; nothing if it has none.
    pub fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.provider.roce_counters()
    }

    /// The same for its companion, if it has one.
    pub fn companion_counters(&self) -> Option<QpCounters> {
        self.inner.companion.as_ref().map(|c| c.provider.counters())
    }

    /// What a peer needs to connect to it and to use `regions`. For [`LinkKind::Roce`] the port is opened if it was not. For
    /// [`LinkKind::Verbs`] the RDMA device's queue pair is made, and `regions` are to come from [`crate::Mr::remote_over`].
    pub fn endpoint(&self, link: LinkKind, regions: &[RemoteMr]) -> Result<Endpoint> {
        let provider = &self.inner.device().provider;
        let roce = match link {
            LinkKind::Roce => Some(RoceEndpoint {
                port: provider.roce_offer(self.core())?,
                psn: self.first_psn(),
                unreliable: self.inner.unreliable,
            }),
            _ => None,
        };
        let verbs = match link {
            LinkKind::Verbs => Some(VerbsEndpoint {
                end: self.inner.provider.verbs_end()?,
                psn: self.first_psn(),
            }),
            _ => None,
        };
        Ok(Endpoint {
            link,
            qpn: self.qpn(),
            hca: provider.id(),
            regions: regions.to_vec(),
            roce,
            verbs,
        })
    }

    /// Number of the first packet that it will send over RoCE: drawn when it is made and when it is reset, so that packets
    /// of an earlier connection are strangers to a later one.
    pub fn first_psn(&self) -> u32 {
        self.inner.psn.load(Ordering::Relaxed)
    }

    /// Writes the structures that kernels use into GPU memory. A queue pair has one export at a time; the next one goes on
    /// where the last one stopped.
    pub fn export(&self) -> Result<Export> {
        Export::gpu(&[&self.inner], ExportLayout::default())
    }

    /// Writes the structures into host memory, for a CPU that posts (the proxy, perftest's way).
    pub fn export_host(&self) -> Result<Export> {
        Export::host(&[&self.inner], ExportLayout::default())
    }
}

impl AsRef<QpCore> for QpCore {
    fn as_ref(&self) -> &QpCore {
        self
    }
}

impl fmt::Debug for QpCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("qpn", &format_args!("{:#08x}", self.qpn()))
            .field("state", &self.state())
            .field("depth", &self.depth())
            .field("cq", &self.inner.cq_kind)
            .field("handler", &self.inner.handler)
            .finish_non_exhaustive()
    }
}

/// A queue pair whose state is checked at each call, for callers who cannot carry it in a type (C, tables of many). Clones are
/// the same queue pair.
pub struct AnyQp {
    core: QpCore,
}

impl AnyQp {
    /// Connects it to nobody, so that it receives what any sender's packets bring ([`Destination::RoceAnyone`]); returns where they have to be
    /// sent to, beside [its number](QpCore::qpn).
    pub fn receive_from_anyone(&self, path_mtu: u16) -> Result<SocketAddr> {
        let address = self.roce_address()?;
        self.inner.connect(&Destination::RoceAnyone { path_mtu })?;
        Ok(address)
    }

    /// Connects it, if it is reset. When this fails it is still there.
    pub fn connect(&self, to: &Destination) -> Result<()> {
        self.inner.connect(to)
    }

    /// Stops it and takes it back to reset; see [`Qp::reset`]. When this fails it is still there.
    pub fn reset(&self, timeout: Duration) -> Result<()> {
        self.inner.reset(timeout)
    }

    /// Ends it, for all clones; see [`Qp::destroy`].
    pub fn destroy(&self, timeout: Duration) -> Result<()> {
        self.inner.destroy(timeout)
    }
}

impl Clone for AnyQp {
    fn clone(&self) -> Self {
        Self {
            core: QpCore {
                inner: Arc::clone(&self.inner),
            },
        }
    }
}

impl Deref for AnyQp {
    type Target = QpCore;

    fn deref(&self) -> &QpCore {
        &self.core
    }
}

impl AsRef<QpCore> for AnyQp {
    fn as_ref(&self) -> &QpCore {
        &self.core
    }
}

impl<S: State> From<Qp<S>> for AnyQp {
    fn from(qp: Qp<S>) -> Self {
        Self {
            core: qp.into_core(),
        }
    }
}

impl fmt::Debug for AnyQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}
