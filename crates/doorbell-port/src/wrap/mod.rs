//! Ports around ports.

mod capture;
mod faulty;
mod spec;
mod trace;

pub use capture::Pcapng;
pub use faulty::Faulty;
pub use spec::FaultSpec;
pub use trace::Tracer;

/// The calls that a wrapper only passes on to its field `inner`.
macro_rules! pass_on {
    () => {
        fn local_addr(&self) -> std::net::SocketAddr {
            self.inner.local_addr()
        }
        fn mtu(&self) -> usize {
            self.inner.mtu()
        }
        fn path(&mut self, request: &crate::PathRequest) -> crate::Result<crate::Path> {
            self.inner.path(request)
        }
        fn recv_batch(&self) -> crate::RecvBatch {
            self.inner.recv_batch()
        }
        fn accepts_trains(&self) -> bool {
            self.inner.accepts_trains()
        }
        fn qpn_class(&self) -> Option<(u32, u32)> {
            self.inner.qpn_class()
        }
    };
}
pub(crate) use pass_on;
