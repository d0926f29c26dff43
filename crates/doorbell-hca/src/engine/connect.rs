//! Where a queue pair's requests go from now on.

use super::keys::Keys;
use super::qp::Target;
use super::{Core, roce};
use crate::error::{HcaError, Result};
use crate::hca::Inner;
use crate::link::Destination;
use crate::qp::QpState;

impl Core {
    pub(crate) fn connect(
        &mut self,
        inner: &Inner,
        slot: u32,
        destination: Destination,
    ) -> Result<()> {
        let Self {
            qps, roce, verbs, ..
        } = &mut *self;
        let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
            return Ok(());
        };
        let shared = &qp.cold.shared;
        if shared.state() != QpState::Reset {
            return Err(HcaError::WrongState {
                qpn: shared.qpn,
                state: shared.state(),
                call: "connect",
                needs: "a queue pair in Reset: reset it first",
            });
        }
        qp.cold.target = match destination {
            Destination::Loopback(qpn) => {
                Target::Loopback(inner.queues.qp(qpn).ok_or(HcaError::UnknownQp { qpn })?)
            }
            Destination::Peer(peer) => Target::Peer(peer),
            to @ (Destination::Roce(_) | Destination::RoceAnyone(_)) => {
                let roce = roce.as_deref_mut().ok_or_else(|| HcaError::BadConfig {
                    what: format!(
                        "engine core {} has no RoCE port: open one first",
                        shared.core
                    ),
                })?;
                let (link, peer) = match to {
                    Destination::RoceAnyone(of) => {
                        (roce::Link::receiver(roce.port.as_ref(), &of)?, None)
                    }
                    Destination::Roce(target) => (
                        roce::Link::new(roce.port.as_mut(), &target)?,
                        Some(target.peer),
                    ),
                    _ => return Ok(()),
                };
                roce.add(slot, shared.qpn.get(), peer);
                Target::Roce(Box::new(link))
            }
            Destination::Verbs(_) => match std::mem::replace(&mut qp.cold.prepared, Target::None) {
                Target::None => {
                    return Err(HcaError::BadConfig {
                        what: format!(
                            "queue pair {} has no RDMA device's: prepare it first",
                            shared.qpn
                        ),
                    });
                }
                mut target => {
                    if let Target::Srd(link) = &mut target {
                        link.begin();
                    }
                    verbs.add(slot);
                    target
                }
            },
        };
        qp.keys = Keys::EMPTY;
        qp.cold.shared.set_state(QpState::Ready);
        qp.tell_target();
        qp.changed(QpState::Ready);
        let receives = qp.cold.shared.recv.is_some();
        self.receivers.retain(|s| *s != slot);
        if receives {
            self.receivers.push(slot);
        }
        Ok(())
    }
}
