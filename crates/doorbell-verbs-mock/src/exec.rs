//! Carrying out requests, in order, between two queue pairs of this process.

use core::sync::atomic::{AtomicU64, Ordering};

use doorbell_verbs::abi::*;

use crate::world::{Request, World};

/// What became of a request.
enum Outcome {
    Done(u32),
    Failed(u32, u32),
    Later,
}

pub(crate) fn at<T>(addr: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(addr as usize)
}

impl World {
    /// Carries out what can be of a queue pair's requests.
    pub(crate) fn progress(&mut self, qpn: u32) {
        if self.qps.get(&qpn).is_some_and(|q| q.srd) {
            return self.shuffle(qpn);
        }
        loop {
            let Some(qp) = self.qps.get(&qpn) else { return };
            let device = &self.devices[&qp.device];
            if device.stall || device.removed {
                return;
            }
            let Some(request) = qp.sends.front().cloned() else {
                return;
            };
            let outcome = match qp.state {
                qp_state::RTS => self.execute(qpn, &request),
                qp_state::ERR | qp_state::SQE => Outcome::Failed(wc_status::WR_FLUSH_ERR, 0),
                _ => return,
            };
            match outcome {
                Outcome::Later => return,
                Outcome::Done(bytes) => {
                    self.pop(qpn);
                    self.complete(qpn, &request, bytes);
                }
                Outcome::Failed(status, vendor) => {
                    self.pop(qpn);
                    self.fail(qpn, &request, status, vendor);
                }
            }
        }
    }

    fn pop(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.sends.pop_front();
        }
    }

    fn complete(&mut self, qpn: u32, request: &Request, bytes: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return;
        };
        qp.unsignalled += 1;
        if request.flags & send_flags::SIGNALED == 0 {
            return;
        }
        let gives = core::mem::take(&mut qp.unsignalled);
        let lose = self.devices[&qp.device].lose;
        if lose {
            return;
        }
        let wc = Wc {
            wr_id: request.id,
            status: wc_status::SUCCESS,
            opcode: match request.opcode {
                wr_opcode::READ => wc_opcode::RDMA_READ,
                wr_opcode::FETCH_ADD => wc_opcode::FETCH_ADD,
                wr_opcode::COMPARE_SWAP => wc_opcode::COMP_SWAP,
                wr_opcode::SEND | wr_opcode::SEND_IMM => wc_opcode::SEND,
                _ => wc_opcode::RDMA_WRITE,
            },
            byte_len: bytes,
            qp_num: qpn,
            ..Wc::default()
        };
        let cq = qp.send_cq;
        self.push(cq, wc, gives);
    }

    fn fail(&mut self, qpn: u32, request: &Request, status: u32, vendor: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return;
        };
        qp.unsignalled += 1;
        let gives = core::mem::take(&mut qp.unsignalled);
        let cq = qp.send_cq;
        let wc = Wc {
            wr_id: request.id,
            status,
            vendor_err: vendor,
            qp_num: qpn,
            ..Wc::default()
        };
        self.push(cq, wc, gives);
        self.break_down(qpn);
    }

    /// A queue pair to ERR: its receives are flushed; its requests will be.
    pub(crate) fn break_down(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return;
        };
        qp.state = qp_state::ERR;
        let (cq, receives) = (qp.recv_cq, core::mem::take(&mut qp.receives));
        for receive in receives {
            let wc = Wc {
                wr_id: receive.id,
                status: wc_status::WR_FLUSH_ERR,
                qp_num: qpn,
                ..Wc::default()
            };
            self.push(cq, wc, 0);
        }
    }

    pub(crate) fn push(&mut self, cq: u32, wc: Wc, gives: u64) {
        let Some(queue) = self.cqs.get_mut(&cq) else {
            return;
        };
        queue.ready.push_back((wc, gives));
        if queue.ready.len() > queue.entries as usize {
            let device = self.qps.get(&wc.qp_num).map(|q| q.device);
            if let Some(device) = device.and_then(|d| self.devices.get_mut(&d)) {
                device.counts.overruns += 1;
            }
        }
    }

    fn execute(&mut self, qpn: u32, request: &Request) -> Outcome {
        let qp = &self.qps[&qpn];
        let (device, pd, dest) = (qp.device, qp.pd, qp.dest);
        let own = self.devices.get_mut(&device).expect("its device");
        if own.config.hollow {
            return Outcome::Done(0);
        }
        if let Some((status, vendor)) = own.planned(request.number) {
            return Outcome::Failed(status, vendor);
        }
        if request.broken {
            return Outcome::Failed(wc_status::LOC_QP_OP_ERR, 0);
        }
        let looks = own.config.rnr_looks;
        // This side.
        let need = match request.opcode {
            wr_opcode::READ | wr_opcode::FETCH_ADD | wr_opcode::COMPARE_SWAP => access::LOCAL_WRITE,
            _ => 0,
        };
        let Some(here) = self.local(device, pd, request, need) else {
            return Outcome::Failed(wc_status::LOC_PROT_ERR, 0);
        };
        let total = match &request.inline {
            Some(bytes) => bytes.len(),
            None => here.iter().map(|(_, len)| len).sum(),
        };
        // The other.
        let Some(peer) = self.qps.get(&dest) else {
            return Outcome::Failed(wc_status::RETRY_EXC_ERR, 0);
        };
        if !matches!(peer.state, qp_state::RTR | qp_state::RTS) || peer.dest != qpn {
            return Outcome::Failed(wc_status::RETRY_EXC_ERR, 0);
        }
        let (theirs, their_pd, their_rights) = (peer.device, peer.pd, peer.access);
        let need = match request.opcode {
            wr_opcode::WRITE | wr_opcode::WRITE_IMM => access::REMOTE_WRITE,
            wr_opcode::READ => access::REMOTE_READ,
            wr_opcode::FETCH_ADD | wr_opcode::COMPARE_SWAP => access::REMOTE_ATOMIC,
            _ => 0,
        };
        let mut there = 0;
        if need != 0 && total != 0 {
            if their_rights & need != need {
                self.break_down(dest);
                return Outcome::Failed(wc_status::REM_INV_REQ_ERR, 0);
            }
            let len = total as u64;
            match self.find(theirs, their_pd, request.rkey, request.addr, len, need) {
                Some(addr) => there = addr,
                None => {
                    self.break_down(dest);
                    return Outcome::Failed(wc_status::REM_ACCESS_ERR, 0x88);
                }
            }
        }
        let takes = matches!(
            request.opcode,
            wr_opcode::SEND | wr_opcode::SEND_IMM | wr_opcode::WRITE_IMM
        );
        if takes && peer_is_dry(self, dest) {
            return match self.gives_up(qpn, 0, looks) {
                true => Outcome::Failed(wc_status::RNR_RETRY_EXC_ERR, 0),
                false => Outcome::Later,
            };
        }
        match request.opcode {
            wr_opcode::SEND | wr_opcode::SEND_IMM => {
                let bytes = self.gathered(request, &here);
                return self.deliver(dest, request, &bytes);
            }
            wr_opcode::WRITE | wr_opcode::WRITE_IMM => {
                let bytes = self.gathered(request, &here);
                // SAFETY: the range lies in a region whose memory its owner keeps.
                unsafe {
                    core::ptr::copy(bytes.as_ptr(), at::<u8>(there), bytes.len());
                }
                if request.opcode == wr_opcode::WRITE_IMM {
                    self.received(dest, request, wc_opcode::RECV_RDMA_WITH_IMM, total as u32);
                }
            }
            wr_opcode::READ => {
                let mut from = there;
                for (addr, len) in here {
                    // SAFETY: as above, on both sides.
                    unsafe { core::ptr::copy(at::<u8>(from), at::<u8>(addr), len) };
                    from += len as u64;
                }
            }
            _ => {
                if !there.is_multiple_of(8) || total != 8 {
                    self.break_down(dest);
                    return Outcome::Failed(wc_status::REM_INV_REQ_ERR, 0);
                }
                // SAFETY: as above; the word is aligned.
                let word = unsafe { AtomicU64::from_ptr(at::<u64>(there)) };
                let [a, b] = request.operands;
                let old = match request.opcode {
                    wr_opcode::FETCH_ADD => word.fetch_add(a, Ordering::AcqRel),
                    _ => word
                        .compare_exchange(a, b, Ordering::AcqRel, Ordering::Acquire)
                        .unwrap_or_else(|old| old),
                };
                if let Some((addr, _)) = here.first() {
                    // SAFETY: as above.
                    unsafe { at::<u64>(*addr).write_unaligned(old) };
                }
            }
        }
        Outcome::Done(total as u32)
    }

    /// The memory of a request on its own side: addresses and lengths. `None`: it may not be used so.
    pub(crate) fn local(
        &self,
        device: u32,
        pd: u32,
        request: &Request,
        need: u32,
    ) -> Option<Vec<(u64, usize)>> {
        let pieces = request.pieces.iter();
        let found = pieces.map(|piece| {
            let len = u64::from(piece.length);
            let addr = self.find(device, pd, piece.lkey, piece.addr, len, need)?;
            Some((addr, piece.length as usize))
        });
        found.collect()
    }

    /// Another look of a queue pair's request at a peer without a receive: has it looked too often?
    pub(crate) fn gives_up(&mut self, qpn: u32, which: usize, looks: Option<u32>) -> bool {
        let qp = self.qps.get_mut(&qpn);
        let Some(request) = qp.and_then(|q| q.sends.get_mut(which)) else {
            return false;
        };
        request.looks += 1;
        looks.is_some_and(|most| request.looks > most)
    }

    /// Puts bytes into a receive; returns those that it has no room for. `None`: it may not be written.
    pub(crate) fn fill<'a>(
        &self,
        device: u32,
        pd: u32,
        pieces: &[Sge],
        bytes: &'a [u8],
    ) -> Option<&'a [u8]> {
        let mut rest = bytes;
        for piece in pieces {
            // A piece that nothing goes to is not looked at.
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((piece.length as usize).min(rest.len()));
            let (len, need) = (now.len() as u64, access::LOCAL_WRITE);
            let addr = self.find(device, pd, piece.lkey, piece.addr, len, need)?;
            // SAFETY: the range lies in a region whose memory its owner keeps.
            unsafe { core::ptr::copy(now.as_ptr(), at::<u8>(addr), now.len()) };
            rest = later;
        }
        Some(rest)
    }

    pub(crate) fn gathered(&self, request: &Request, here: &[(u64, usize)]) -> Vec<u8> {
        if let Some(bytes) = &request.inline {
            return bytes.clone();
        }
        let mut all = Vec::new();
        for (addr, len) in here {
            // SAFETY: the range lies in a region whose memory its owner keeps.
            all.extend_from_slice(unsafe { core::slice::from_raw_parts(at::<u8>(*addr), *len) });
        }
        all
    }

    /// A SEND's bytes into the peer's next receive.
    fn deliver(&mut self, dest: u32, request: &Request, bytes: &[u8]) -> Outcome {
        let peer = &self.qps[&dest];
        let (device, pd) = (peer.device, peer.pd);
        let pieces = peer.receives.front().map_or(&[][..], |r| &r.pieces);
        let (theirs, ours) = match self.fill(device, pd, pieces, bytes) {
            Some([]) => {
                self.received(dest, request, wc_opcode::RECV, bytes.len() as u32);
                return Outcome::Done(bytes.len() as u32);
            }
            Some(_) => (wc_status::LOC_LEN_ERR, wc_status::REM_INV_REQ_ERR),
            None => (wc_status::LOC_PROT_ERR, wc_status::REM_OP_ERR),
        };
        let peer = self.qps.get_mut(&dest).expect("found above");
        let (cq, receive) = (peer.recv_cq, peer.receives.pop_front());
        let wc = Wc {
            wr_id: receive.map_or(0, |r| r.id),
            status: theirs,
            qp_num: dest,
            ..Wc::default()
        };
        self.push(cq, wc, 0);
        self.break_down(dest);
        Outcome::Failed(ours, 0)
    }

    fn received(&mut self, dest: u32, request: &Request, opcode: u32, bytes: u32) {
        let Some(peer) = self.qps.get_mut(&dest) else {
            return;
        };
        let (cq, receive) = (peer.recv_cq, peer.receives.pop_front());
        let with_imm = matches!(request.opcode, wr_opcode::SEND_IMM | wr_opcode::WRITE_IMM);
        let wc = Wc {
            wr_id: receive.map_or(0, |r| r.id),
            status: wc_status::SUCCESS,
            opcode,
            byte_len: bytes,
            imm: request.imm,
            qp_num: dest,
            wc_flags: if with_imm { wc_flags::WITH_IMM } else { 0 },
            ..Wc::default()
        };
        self.push(cq, wc, 0);
    }
}

fn peer_is_dry(world: &World, dest: u32) -> bool {
    world.qps.get(&dest).is_none_or(|q| q.receives.is_empty())
}
