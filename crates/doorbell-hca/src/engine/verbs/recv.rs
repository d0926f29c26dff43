//! Receives: handed to the device as they are posted, completed when it says so.

use std::sync::PoisonError;

use doorbell_verbs::abi::{Wc, wc_flags, wc_opcode, wc_status};

use super::{EngineQp, Target};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::Access;
use crate::verbs::RECEIVE;

impl EngineQp {
    /// Gives receives that were posted since to the device, as many as it takes.
    pub(in crate::engine) fn hand_receives_on(&mut self, inner: &Inner) -> u64 {
        let shared = &self.cold.shared;
        let (Some(recv), Target::Verbs(link)) = (&shared.recv, &mut self.cold.target) else {
            return 0;
        };
        link.hand_on(inner, recv)
    }
}

impl super::Link {
    /// As [`EngineQp::hand_receives_on`], also before the queue pair is connected.
    pub(in crate::engine) fn hand_on(
        &mut self,
        inner: &Inner,
        recv: &std::sync::Mutex<crate::engine::recv::RecvQueue>,
    ) -> u64 {
        let mut handed = 0;
        self.keys.refresh(inner);
        while self.receiving < self.nic.recv {
            let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: an open receive queue's memory is mapped.
            let Some((number, locals)) = (unsafe { queue.hand_on() }) else {
                break;
            };
            drop(queue);
            let mut pieces = Vec::with_capacity(locals.len());
            for local in &locals {
                match self.keys.piece(inner, local, Access::LOCAL_WRITE) {
                    Ok(piece) => pieces.push(piece),
                    Err(fault) => {
                        // A WRITE with immediate does not care; a SEND will, and is told why.
                        pieces.clear();
                        self.refused_receives.push((number, fault));
                        break;
                    }
                }
            }
            if pieces.len() > self.nic.recv_pieces as usize {
                pieces.clear();
                self.refused_receives.push((number, Fault::Unsupported));
            }
            // SAFETY: the pieces are of registered regions, which the device lets go of before their memory goes.
            match unsafe { self.nic.qp.post_recv(number | RECEIVE, &mut pieces) } {
                Ok(()) => {
                    self.receiving += 1;
                    handed += 1;
                }
                Err(errno) => {
                    let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
                    queue.take_back(number);
                    if errno != libc::ENOMEM {
                        let e = std::io::Error::from_raw_os_error(errno);
                        tracing::error!("{:?}: posting a receive: {e}", self.nic);
                    }
                    break;
                }
            }
        }
        handed
    }
}

impl EngineQp {
    /// A receive is complete.
    pub(super) fn received(&mut self, inner: &Inner, wc: &Wc) {
        let number = wc.wr_id & !RECEIVE;
        let Some(link) = self.verbs() else { return };
        link.receiving = link.receiving.saturating_sub(1);
        let refused = match link.refused_receives.iter().position(|(n, _)| *n == number) {
            Some(at) => Some(link.refused_receives.swap_remove(at).1),
            None => None,
        };
        let Some(recv) = &self.cold.shared.recv else {
            return;
        };
        if wc.status == wc_status::SUCCESS {
            let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
            let write = wc.opcode == wc_opcode::RECV_RDMA_WITH_IMM;
            let imm = (wc.wc_flags & wc_flags::WITH_IMM != 0).then_some(u32::from_be(wc.imm));
            // SAFETY: an open receive queue's memory is mapped.
            unsafe { queue.completed_by_device(number, write, imm, wc.byte_len) };
            return;
        }
        let fault = match wc.status {
            // Requests of the peer broke the queue pair, or its own; those say more.
            wc_status::WR_FLUSH_ERR => {
                self.fail_flight(inner, Fault::PeerRefused);
                return;
            }
            wc_status::LOC_LEN_ERR => refused.unwrap_or(Fault::BadLength),
            wc_status::LOC_PROT_ERR => refused.unwrap_or(Fault::LkeyRevoked),
            _ => Fault::PeerRefused,
        };
        {
            let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: as above.
            unsafe { queue.refused_by_device(number, fault) };
        }
        self.fail_flight(inner, fault);
    }
}
