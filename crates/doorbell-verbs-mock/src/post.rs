//! Posting: by lists of structures, and by calls that build one request after the other.

use core::ffi::{c_int, c_void};

use doorbell_verbs::abi::*;

use crate::world::{Receive, Request, World, world};

/// Takes a request of a queue pair, or says why not.
fn take(world: &mut World, qpn: u32, mut request: Request) -> Result<(), i32> {
    let queue = world.qps.get_mut(&qpn).ok_or(libc::EINVAL)?;
    let device = world.devices.get_mut(&queue.device).ok_or(libc::EIO)?;
    if device.removed {
        return Err(libc::EIO);
    }
    if let Some((number, errno)) = device.refuse_post
        && device.counts.requests == number
    {
        device.refuse_post = None;
        return Err(errno);
    }
    if queue.held >= u64::from(queue.cap.max_send_wr) {
        device.counts.overruns += 1;
        return Err(libc::ENOMEM);
    }
    let inline = request.inline.as_ref().map_or(0, Vec::len);
    let message: u64 = request.pieces.iter().map(|p| u64::from(p.length)).sum();
    if !matches!(queue.state, qp_state::RTS | qp_state::ERR | qp_state::SQE)
        || inline > queue.cap.max_inline_data as usize
        || request.pieces.len() > queue.cap.max_send_sge as usize
        || (!queue.srd && message > u64::from(device.config.max_message))
    {
        return Err(libc::EINVAL);
    }
    if let (true, Some(srd)) = (queue.srd, &device.config.srd) {
        crate::efa::check(srd, &request)?;
    }
    request.number = device.counts.requests;
    queue.held += 1;
    let counts = &mut device.counts;
    counts.requests += 1;
    counts.deepest = counts.deepest.max(queue.held);
    counts.signalled += u64::from(request.flags & send_flags::SIGNALED != 0);
    counts.fenced += u64::from(request.flags & send_flags::FENCE != 0);
    counts.inline += u64::from(request.inline.is_some());
    queue.sends.push_back(request);
    Ok(())
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut RawQp,
    first: *mut SendWr,
    bad: *mut *mut SendWr,
) -> c_int {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).handle };
    let mut world = world();
    count_post(&mut world, qpn);
    let mut next = first;
    while !next.is_null() {
        // SAFETY: a list of the caller's, with its pieces.
        let (wr, pieces) = unsafe {
            let wr = &*next;
            let pieces = match wr.num_sge {
                0 => &[][..],
                n => core::slice::from_raw_parts(wr.sg_list, n as usize),
            };
            (wr, pieces)
        };
        let atomic = matches!(wr.opcode, wr_opcode::FETCH_ADD | wr_opcode::COMPARE_SWAP);
        let inline = (wr.send_flags & send_flags::INLINE != 0).then(|| {
            let mut bytes = Vec::new();
            for piece in pieces {
                let at = core::ptr::with_exposed_provenance::<u8>(piece.addr as usize);
                // SAFETY: inline pieces are addresses of the caller's, readable now.
                bytes.extend_from_slice(unsafe {
                    core::slice::from_raw_parts(at, piece.length as usize)
                });
            }
            bytes
        });
        let request = Request {
            id: wr.wr_id,
            number: 0,
            flags: wr.send_flags,
            opcode: wr.opcode,
            imm: wr.imm,
            addr: wr.target[0],
            rkey: if atomic { wr.target[3] } else { wr.target[1] } as u32,
            operands: [wr.target[1], wr.target[2]],
            pieces: if inline.is_some() {
                Vec::new()
            } else {
                pieces.to_vec()
            },
            inline,
            to: None,
            broken: false,
            looks: 0,
        };
        if let Err(errno) = take(&mut world, qpn, request) {
            // SAFETY: the caller's word.
            unsafe { *bad = next };
            world.progress(qpn);
            return errno;
        }
        // SAFETY: as above.
        next = unsafe { (*next).next };
    }
    world.progress(qpn);
    0
}

fn count_post(world: &mut World, qpn: u32) {
    let device = world.qps.get(&qpn).map(|q| q.device);
    if let Some(device) = device.and_then(|d| world.devices.get_mut(&d)) {
        device.counts.posts += 1;
    }
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut RawQp,
    first: *mut RecvWr,
    bad: *mut *mut RecvWr,
) -> c_int {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).handle };
    let mut world = world();
    let Some(queue) = world.qps.get_mut(&qpn) else {
        return libc::EINVAL;
    };
    let (device, mut taken) = (queue.device, 0);
    let mut next = first;
    while !next.is_null() {
        // SAFETY: a list of the caller's, with its pieces.
        let (wr, pieces) = unsafe {
            let wr = &*next;
            let pieces = match wr.num_sge {
                0 => &[][..],
                n => core::slice::from_raw_parts(wr.sg_list, n as usize),
            };
            (wr, pieces)
        };
        let full = queue.receives.len() >= queue.cap.max_recv_wr as usize;
        let many = pieces.len() > queue.cap.max_recv_sge as usize;
        if queue.state == qp_state::RESET || full || many {
            // SAFETY: the caller's word.
            unsafe { *bad = next };
            return if full { libc::ENOMEM } else { libc::EINVAL };
        }
        taken += pieces.len() as u64;
        let pieces = pieces.to_vec();
        queue.receives.push_back(Receive {
            id: wr.wr_id,
            pieces,
        });
        next = wr.next;
    }
    if queue.state == qp_state::ERR {
        world.break_down(qpn);
    }
    if let Some(device) = world.devices.get_mut(&device) {
        device.counts.receive_pieces += taken;
    }
    0
}

/// Begins a request by a call.
unsafe fn build(qp: *mut RawQpEx, opcode: u32, addr: u64, rkey: u32, imm: u32, operands: [u64; 2]) {
    // SAFETY: the caller's.
    let (qpn, id, flags) = unsafe { ((*qp).base.handle, (*qp).wr_id, (*qp).wr_flags) };
    let request = Request {
        id,
        number: 0,
        flags,
        opcode,
        imm,
        addr,
        rkey,
        operands,
        pieces: Vec::new(),
        inline: None,
        to: None,
        broken: false,
        looks: 0,
    };
    if let Some(queue) = world().qps.get_mut(&qpn) {
        queue.building.push(request);
    }
}

unsafe fn last(qp: *mut RawQpEx, f: impl FnOnce(&mut Request)) {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).base.handle };
    let mut world = world();
    if let Some(request) = world.qps.get_mut(&qpn).and_then(|q| q.building.last_mut()) {
        f(request);
    }
}

pub(crate) unsafe extern "C" fn wr_start(qp: *mut RawQpEx) {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).base.handle };
    if let Some(queue) = world().qps.get_mut(&qpn) {
        queue.building.clear();
    }
}

pub(crate) unsafe extern "C" fn wr_write(qp: *mut RawQpEx, rkey: u32, addr: u64) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::WRITE, addr, rkey, 0, [0; 2]) };
}

pub(crate) unsafe extern "C" fn wr_write_imm(qp: *mut RawQpEx, rkey: u32, addr: u64, imm: u32) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::WRITE_IMM, addr, rkey, imm, [0; 2]) };
}

pub(crate) unsafe extern "C" fn wr_read(qp: *mut RawQpEx, rkey: u32, addr: u64) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::READ, addr, rkey, 0, [0; 2]) };
}

pub(crate) unsafe extern "C" fn wr_send(qp: *mut RawQpEx) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::SEND, 0, 0, 0, [0; 2]) };
}

pub(crate) unsafe extern "C" fn wr_send_imm(qp: *mut RawQpEx, imm: u32) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::SEND_IMM, 0, 0, imm, [0; 2]) };
}

pub(crate) unsafe extern "C" fn wr_fetch_add(qp: *mut RawQpEx, rkey: u32, addr: u64, add: u64) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::FETCH_ADD, addr, rkey, 0, [add, 0]) };
}

pub(crate) unsafe extern "C" fn wr_compare_swap(
    qp: *mut RawQpEx,
    rkey: u32,
    addr: u64,
    compare: u64,
    swap: u64,
) {
    // SAFETY: passed on.
    unsafe { build(qp, wr_opcode::COMPARE_SWAP, addr, rkey, 0, [compare, swap]) };
}

pub(crate) unsafe extern "C" fn wr_set_inline(qp: *mut RawQpEx, at: *mut c_void, len: usize) {
    let bytes = match len {
        0 => Vec::new(),
        // SAFETY: readable bytes of the caller's.
        len => unsafe { core::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec(),
    };
    let set = |request: &mut Request| {
        // As soft-RoCE has it: without the flag nobody looks at the bytes.
        if request.flags & send_flags::INLINE != 0 {
            request.inline = Some(bytes);
        } else {
            request.broken = true;
        }
    };
    // SAFETY: passed on.
    unsafe { last(qp, set) };
}

pub(crate) unsafe extern "C" fn wr_set_sge(qp: *mut RawQpEx, lkey: u32, addr: u64, length: u32) {
    // SAFETY: passed on.
    unsafe {
        last(qp, |request| {
            request.pieces.push(Sge { addr, length, lkey })
        })
    };
}

pub(crate) unsafe extern "C" fn wr_set_sge_list(qp: *mut RawQpEx, count: usize, at: *const Sge) {
    let pieces = match count {
        0 => Vec::new(),
        // SAFETY: pieces of the caller's.
        count => unsafe { core::slice::from_raw_parts(at, count) }.to_vec(),
    };
    // SAFETY: passed on.
    unsafe { last(qp, |request| request.pieces = pieces) };
}

pub(crate) unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut RawQpEx,
    ah: *mut RawAh,
    qpn: u32,
    qkey: u32,
) {
    // SAFETY: the caller's.
    let ah = unsafe { (*ah).handle };
    // SAFETY: passed on.
    unsafe { last(qp, |request| request.to = Some((ah, qpn, qkey))) };
}

pub(crate) unsafe extern "C" fn wr_complete(qp: *mut RawQpEx) -> c_int {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).base.handle };
    let mut world = world();
    count_post(&mut world, qpn);
    let Some(queue) = world.qps.get_mut(&qpn) else {
        return libc::EINVAL;
    };
    let building = core::mem::take(&mut queue.building);
    let (before, held) = (queue.sends.len(), queue.held);
    for request in building {
        if let Err(errno) = take(&mut world, qpn, request) {
            // All or nothing.
            if let Some(queue) = world.qps.get_mut(&qpn) {
                queue.sends.truncate(before);
                queue.held = held;
            }
            return errno;
        }
    }
    world.progress(qpn);
    0
}
