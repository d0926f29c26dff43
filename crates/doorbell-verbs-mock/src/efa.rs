//! The personality of an EFA device: libefa's functions, and SRD queue pairs.
//!
//! It refuses whatever the real provider and the real driver refuse (requests that do not ask for their completion, flags, several pieces of a remote
//! write, rights that the device does not have, state changes with other attributes), and carries requests out **in any order**: which request is
//! next, and which completion is told next, is drawn from a seeded generator. A request that fails leaves the queue pair as it is.

use core::ffi::c_int;

use doorbell_verbs::abi::*;
use doorbell_verbs::efa::EfaApi;
use doorbell_verbs::efa::abi::*;

use crate::calls::{device_of, gid_of, make_qp, refused};
use crate::exec::at;
use crate::world::{Address, Request, World, world};

/// What the device is like.
#[derive(Clone, Copy, Debug)]
pub struct Srd {
    /// The order of things is drawn from this.
    pub seed: u64,
    /// It reads remotely.
    pub reads: bool,
    /// It writes remotely.
    pub writes: bool,
    /// It lets the repetitions without a receive be said.
    pub rnr_retry: bool,
    /// Bytes of a message.
    pub packet: u32,
    /// Bytes of a remote read or write.
    pub max_rdma: u32,
}

impl Default for Srd {
    fn default() -> Self {
        Self {
            seed: 1,
            reads: true,
            writes: true,
            rnr_retry: true,
            packet: 8928,
            max_rdma: 1 << 30,
        }
    }
}

/// Requests among which the next is drawn.
const REACH: u64 = 64;
/// Steps of a queue pair whenever somebody looks.
const STEPS: u32 = 4;
/// Bytes of an inline message.
const INLINE: u32 = 32;

pub(crate) fn table() -> EfaApi {
    EfaApi {
        query_device,
        create_qp_ex,
        create_ah,
        destroy_ah,
    }
}

unsafe extern "C" fn query_device(
    context: *mut RawContext,
    out: *mut RawEfaAttr,
    size: u32,
) -> c_int {
    // SAFETY: the caller's.
    let id = unsafe { device_of(context) };
    let world = world();
    let config = world.devices[&id].config;
    let Some(srd) = config.srd else {
        return libc::EOPNOTSUPP;
    };
    if (size as usize) < core::mem::offset_of!(RawEfaAttr, device_caps) {
        return libc::EINVAL;
    }
    let cap = |has, bit| if has { bit } else { 0 };
    // SAFETY: the caller's structure, of the size of ours.
    unsafe {
        *out = RawEfaAttr {
            comp_mask: 0,
            max_sq_wr: config.max_work,
            max_rq_wr: config.max_work,
            max_sq_sge: 2,
            max_rq_sge: 4,
            inline_buf_size: INLINE as u16,
            inline_buf_size_ex: INLINE as u16,
            device_caps: cap(srd.reads, caps::RDMA_READ)
                | cap(srd.writes, caps::RDMA_WRITE)
                | cap(srd.rnr_retry, caps::RNR_RETRY),
            max_rdma_size: srd.max_rdma,
        }
    };
    0
}

unsafe extern "C" fn create_qp_ex(
    context: *mut RawContext,
    attr: *mut QpInitAttrEx,
    efa: *mut RawEfaQpInit,
    size: u32,
) -> *mut RawQp {
    // SAFETY: the caller's.
    let (attr, efa, id) = unsafe { (&mut *attr, &*efa, device_of(context)) };
    let Some(srd) = world().devices[&id].config.srd else {
        return refused(libc::EOPNOTSUPP);
    };
    if size < 16 || efa.comp_mask != 0 || (efa.flags, efa.sl, efa.reserved) != (0, 0, 0) {
        return refused(libc::EINVAL);
    }
    let mut allowed = send_ops::SEND | send_ops::SEND_WITH_IMM;
    if srd.reads {
        allowed |= send_ops::RDMA_READ;
    }
    if srd.writes {
        allowed |= send_ops::RDMA_WRITE | send_ops::RDMA_WRITE_WITH_IMM;
    }
    if attr.qp_type != qp_type::DRIVER || efa.driver_qp_type != DRIVER_TYPE_SRD {
        return refused(libc::EINVAL);
    }
    if attr.comp_mask & init_mask::PD == 0 || attr.comp_mask & init_mask::SEND_OPS_FLAGS == 0 {
        return refused(libc::EINVAL);
    }
    if attr.send_ops_flags & !allowed != 0 {
        return refused(libc::EOPNOTSUPP);
    }
    if attr.cap.max_inline_data > INLINE || attr.cap.max_send_sge > 2 {
        return refused(libc::EINVAL);
    }
    // SAFETY: passed on.
    unsafe { make_qp(attr.pd, attr.send_cq, attr.recv_cq, attr.cap, true, true) }
}

unsafe extern "C" fn create_ah(pd: *mut RawPd, attr: *mut AhAttr) -> *mut RawAh {
    // SAFETY: the caller's.
    let (context, attr) = unsafe { ((*pd).context, &*attr) };
    // SAFETY: as above.
    let device = unsafe { device_of(context) };
    let gid = attr.grh.dgid.0;
    let mut world = world();
    let known = world.devices.keys().any(|id| gid_of(*id, 0) == gid);
    if attr.is_global == 0 || attr.port_num != 1 || !known {
        return refused(libc::EINVAL);
    }
    let handle = world.number();
    let address = Address { device, gid };
    world.addresses.insert(handle, address);
    Box::into_raw(Box::new(RawAh {
        context,
        pd,
        handle,
    }))
}

unsafe extern "C" fn destroy_ah(ah: *mut RawAh) -> c_int {
    // SAFETY: made above.
    let ah = unsafe { Box::from_raw(ah) };
    match world().addresses.remove(&ah.handle) {
        Some(_) => 0,
        None => libc::EINVAL,
    }
}

/// May an SRD queue pair go to this state with these attributes? As the driver has it.
pub(crate) fn allows(srd: &Srd, state: u32, to: u32, mask: c_int) -> bool {
    let (from, need, may) = match to {
        qp_state::INIT => (
            qp_state::RESET,
            qp_mask::PKEY_INDEX | qp_mask::PORT | qp_mask::QKEY,
            0,
        ),
        qp_state::RTR => (qp_state::INIT, 0, qp_mask::PKEY_INDEX | qp_mask::QKEY),
        qp_state::RTS => {
            let may = if srd.rnr_retry { qp_mask::RNR_RETRY } else { 0 };
            (qp_state::RTR, qp_mask::SQ_PSN, may | qp_mask::QKEY)
        }
        _ => return mask == qp_mask::STATE,
    };
    let mask = mask & !qp_mask::STATE;
    state == from && mask & need == need && mask & !(need | may) == 0
}

/// What the provider says of a request when it is posted.
pub(crate) fn check(srd: &Srd, request: &Request) -> Result<(), i32> {
    let allowed = send_flags::SIGNALED | send_flags::INLINE;
    let message = matches!(request.opcode, wr_opcode::SEND | wr_opcode::SEND_IMM);
    let bytes: u64 = request.pieces.iter().map(|p| u64::from(p.length)).sum();
    let (most, pieces) = match message {
        true => (srd.packet, 2),
        false => (srd.max_rdma, 1),
    };
    let wrong = request.flags & send_flags::SIGNALED == 0
        || request.flags & !allowed != 0
        || request.broken
        || request.to.is_none()
        || request.pieces.len() > pieces
        || (request.inline.is_some() && !message)
        || bytes > u64::from(most);
    match wrong {
        true => Err(libc::EINVAL),
        false => Ok(()),
    }
}

impl World {
    fn draw(&mut self, device: u32) -> u64 {
        let Some(device) = self.devices.get_mut(&device) else {
            return 0;
        };
        let mut x = device.random;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        device.random = x;
        x >> 8
    }

    /// Some steps of an SRD queue pair: a request is carried out, or an outcome is told, whichever is drawn.
    pub(crate) fn shuffle(&mut self, qpn: u32) {
        for _ in 0..STEPS {
            let Some(qp) = self.qps.get(&qpn) else { return };
            let id = qp.device;
            let device = &self.devices[&id];
            if device.stall || device.removed {
                return;
            }
            let (waiting, finished) = (qp.sends.len() as u64, qp.finished.len() as u64);
            let (coin, which) = (self.draw(id), self.draw(id));
            if waiting != 0 && (finished == 0 || coin & 1 == 0) {
                self.carry_out_one(qpn, (which % waiting.min(REACH)) as usize);
            } else if finished != 0 {
                let Some(qp) = self.qps.get_mut(&qpn) else {
                    return;
                };
                let wc = qp.finished.swap_remove((which % finished) as usize);
                let cq = qp.send_cq;
                let device = &self.devices[&id];
                if !(device.lose && wc.status == wc_status::SUCCESS) {
                    self.push(cq, wc, 1);
                }
            } else {
                return;
            }
        }
    }

    fn carry_out_one(&mut self, qpn: u32, which: usize) {
        let Some(qp) = self.qps.get(&qpn) else { return };
        let Some(request) = qp.sends.get(which).cloned() else {
            return;
        };
        let id = qp.device;
        let outcome = match qp.state {
            qp_state::RTS => self.srd_execute(qpn, which, &request),
            qp_state::ERR | qp_state::SQE => Some(Err((wc_status::WR_FLUSH_ERR, 1))),
            _ => None,
        };
        let Some(outcome) = outcome else { return };
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return;
        };
        qp.sends.remove(which);
        let (status, vendor_err) = outcome.err().unwrap_or((wc_status::SUCCESS, 0));
        qp.finished.push(Wc {
            wr_id: request.id,
            status,
            vendor_err,
            // As the provider has it: a read says that it was a message.
            opcode: match request.opcode {
                wr_opcode::WRITE | wr_opcode::WRITE_IMM => wc_opcode::RDMA_WRITE,
                _ => wc_opcode::SEND,
            },
            qp_num: qpn,
            ..Wc::default()
        });
        if which != 0
            && let Some(device) = self.devices.get_mut(&id)
        {
            device.counts.overtaken += 1;
        }
    }

    /// `None`: later.
    fn srd_execute(
        &mut self,
        qpn: u32,
        which: usize,
        request: &Request,
    ) -> Option<Result<(), (u32, u32)>> {
        let qp = &self.qps[&qpn];
        let (device, pd) = (qp.device, qp.pd);
        let own = self.devices.get_mut(&device)?;
        if let Some(planned) = own.planned(request.number) {
            return Some(Err(planned));
        }
        let looks = own.config.rnr_looks;
        let read = request.opcode == wr_opcode::READ;
        let need = if read { access::LOCAL_WRITE } else { 0 };
        let Some(here) = self.local(device, pd, request, need) else {
            return Some(Err((wc_status::LOC_PROT_ERR, 5)));
        };
        let total: usize = here.iter().map(|(_, len)| len).sum();
        // The other side.
        let (ah, dest, qkey) = request.to?;
        let nobody = Some(Err((wc_status::REM_INV_RD_REQ_ERR, status::BAD_DEST_QPN)));
        let Some(address) = self.addresses.get(&ah) else {
            return Some(Err((wc_status::LOC_QP_OP_ERR, 4)));
        };
        let gid = address.gid;
        let Some(peer) = self.qps.get(&dest) else {
            return nobody;
        };
        let theirs = peer.device;
        let there = gid_of(theirs, 0) == gid;
        let up = matches!(peer.state, qp_state::RTR | qp_state::RTS);
        if !peer.srd || !there || !up || peer.qkey != qkey {
            return nobody;
        }
        let their_pd = peer.pd;
        let own_gid = gid_of(device, 0);
        let known = self
            .addresses
            .values()
            .any(|a| a.device == theirs && a.gid == own_gid);
        let message = matches!(request.opcode, wr_opcode::SEND | wr_opcode::SEND_IMM);
        if message {
            return self.srd_message(qpn, which, dest, request, &here, looks);
        }
        if !known {
            return Some(Err((wc_status::REM_OP_ERR, status::UNKNOWN_PEER)));
        }
        let need = if read {
            access::REMOTE_READ
        } else {
            access::REMOTE_WRITE
        };
        let len = total as u64;
        let Some(there) = self.find(theirs, their_pd, request.rkey, request.addr, len, need) else {
            return Some(Err((wc_status::REM_ACCESS_ERR, 7)));
        };
        for (addr, len) in here {
            let (to, from) = if read { (addr, there) } else { (there, addr) };
            // SAFETY: both ranges lie in regions whose memory their owners keep.
            unsafe { core::ptr::copy(at::<u8>(from), at::<u8>(to), len) };
        }
        Some(Ok(()))
    }

    fn srd_message(
        &mut self,
        qpn: u32,
        which: usize,
        dest: u32,
        request: &Request,
        here: &[(u64, usize)],
        looks: Option<u32>,
    ) -> Option<Result<(), (u32, u32)>> {
        let bytes = self.gathered(request, here);
        let peer = self.qps.get_mut(&dest)?;
        let (device, pd, cq) = (peer.device, peer.pd, peer.recv_cq);
        let Some(receive) = peer.receives.pop_front() else {
            return match self.gives_up(qpn, which, looks) {
                true => Some(Err((wc_status::RNR_RETRY_EXC_ERR, status::RNR))),
                false => None,
            };
        };
        let room: usize = receive.pieces.iter().map(|p| p.length as usize).sum();
        let mut wc = Wc {
            wr_id: receive.id,
            status: wc_status::SUCCESS,
            opcode: wc_opcode::RECV,
            byte_len: bytes.len() as u32,
            qp_num: dest,
            src_qp: qpn,
            ..Wc::default()
        };
        if bytes.len() > room {
            wc.status = wc_status::LOC_LEN_ERR;
            self.push(cq, wc, 0);
            return Some(Err((wc_status::REM_INV_REQ_ERR, 11)));
        }
        if self.fill(device, pd, &receive.pieces, &bytes).is_none() {
            wc.status = wc_status::LOC_PROT_ERR;
            self.push(cq, wc, 0);
            return Some(Err((wc_status::REM_OP_ERR, 12)));
        }
        self.push(cq, wc, 0);
        Some(Ok(()))
    }
}
