//! The functions of the library: they find their objects by number and leave the rest to the world.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use std::collections::VecDeque;

use doorbell_verbs::Api;
use doorbell_verbs::abi::*;

use crate::memory::*;
use crate::post::*;
use crate::world::{Completions, Queue, World, world};

pub(crate) fn table() -> Api {
    Api {
        get_device_list,
        free_device_list,
        open_device,
        close_device,
        query_device,
        query_port,
        query_gid,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_cq,
        destroy_cq,
        create_qp,
        modify_qp,
        query_qp,
        destroy_qp,
        get_async_event,
        ack_async_event,
        wc_status_str,
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
        query_gid_ex: Some(query_gid_ex),
        qp_to_qp_ex: Some(qp_to_qp_ex),
    }
}

fn set_errno(errno: i32) {
    // SAFETY: this thread's own word.
    unsafe { *libc::__errno_location() = errno };
}

pub(crate) fn refused<T>(errno: i32) -> *mut T {
    set_errno(errno);
    null_mut()
}

/// The device of a context: its number is kept where the kernel's descriptor would be.
///
/// # Safety
/// `context` is one of `open_device`.
pub(crate) unsafe fn device_of(context: *mut RawContext) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { (*context).cmd_fd as u32 }
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut RawDevice {
    let world = world();
    let mut list: Vec<*mut RawDevice> = Vec::new();
    for (id, device) in world.devices.iter().filter(|(_, d)| d.listed && !d.removed) {
        // SAFETY: all-zero bytes are a valid value of numbers and characters.
        let mut raw: Box<RawDevice> = Box::new(unsafe { core::mem::zeroed() });
        raw.node_type = match device.config.iwarp {
            true => node_type::RNIC,
            false => node_type::CA,
        };
        // Where a provider keeps its functions, this one keeps its number.
        raw.ops[0] = *id as usize;
        let node = format!("uverbs{id}");
        for (to, from) in raw.name.iter_mut().zip(device.name.bytes()) {
            *to = from as c_char;
        }
        for (to, from) in raw.dev_name.iter_mut().zip(node.bytes()) {
            *to = from as c_char;
        }
        list.push(Box::into_raw(raw));
    }
    if !count.is_null() {
        // SAFETY: the caller's word.
        unsafe { *count = list.len() as c_int };
    }
    list.push(null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut RawDevice) {
    // Opened devices keep theirs, so the devices themselves stay (a few hundred bytes a listing); the list goes.
    let mut len = 1;
    // SAFETY: the list ends with a null pointer, and was made above.
    unsafe {
        while !(*list.add(len - 1)).is_null() {
            len += 1;
        }
        drop(Box::from_raw(core::ptr::slice_from_raw_parts_mut(
            list, len,
        )));
    }
}

unsafe extern "C" fn open_device(device: *mut RawDevice) -> *mut RawContext {
    // SAFETY: a device of the list.
    let id = unsafe { (*device).ops[0] } as u32;
    let errno = match world().devices.get(&id) {
        Some(device) if !device.removed => device.config.refuse_open,
        _ => libc::ENODEV,
    };
    if errno != 0 {
        return refused(errno);
    }
    // SAFETY: all-zero bytes are a valid value of numbers, pointers and options of functions.
    let mut ext: Box<ExtendedContext> = Box::new(unsafe { core::mem::zeroed() });
    ext.create_qp_ex = Some(create_qp_ex);
    ext.size = size_of::<ExtendedContext>();
    ext.context.device = device;
    ext.context.ops.poll_cq = Some(poll_cq);
    ext.context.ops.post_send = Some(post_send);
    ext.context.ops.post_recv = Some(post_recv);
    ext.context.cmd_fd = id as c_int;
    // SAFETY: a call without pointers.
    ext.context.async_fd = unsafe { libc::eventfd(0, 0) };
    ext.context.abi_compat = usize::MAX;
    let raw = Box::into_raw(ext);
    // SAFETY: made above.
    unsafe { &raw mut (*raw).context }
}

unsafe extern "C" fn close_device(context: *mut RawContext) -> c_int {
    // SAFETY: the context is the end of what `open_device` made.
    unsafe {
        libc::close((*context).async_fd);
        let at = core::mem::offset_of!(ExtendedContext, context);
        drop(Box::from_raw(
            context.byte_sub(at).cast::<ExtendedContext>(),
        ));
    }
    0
}

unsafe extern "C" fn query_device(context: *mut RawContext, out: *mut RawDeviceAttr) -> c_int {
    // SAFETY: the caller's.
    let id = unsafe { device_of(context) };
    let world = world();
    let config = world.devices[&id].config;
    // SAFETY: all-zero bytes are a valid value of numbers; the structure is the caller's.
    unsafe {
        *out = core::mem::zeroed();
        for (to, from) in (*out).fw_ver.iter_mut().zip(b"mock 1") {
            *to = *from as c_char;
        }
        (*out).max_qp_wr = config.max_work as c_int;
        (*out).max_sge = config.max_sge as c_int;
        (*out).max_cqe = 1 << 20;
        (*out).max_qp_rd_atom = 16;
        (*out).max_qp_init_rd_atom = 16;
        if config.srd.is_some() {
            (*out).vendor_id = doorbell_verbs::efa::abi::VENDOR;
        }
        (*out).atomic_cap = if config.atomics && config.srd.is_none() {
            atomic_cap::HCA
        } else {
            atomic_cap::NONE
        };
        (*out).phys_port_cnt = 1;
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut RawContext,
    _port: u8,
    out: *mut RawPortAttr,
) -> c_int {
    // SAFETY: the caller's.
    let id = unsafe { device_of(context) };
    let mut world = world();
    let Some(device) = world.devices.get_mut(&id) else {
        return libc::ENODEV;
    };
    let (active, config) = (device.is_active(), device.config);
    // SAFETY: the structure is the caller's.
    unsafe {
        (*out).state = if active {
            port_state::ACTIVE
        } else {
            port_state::DOWN
        };
        (*out).max_mtu = 5;
        (*out).active_mtu = 5;
        (*out).gid_tbl_len = if config.srd.is_some() { 1 } else { 3 };
        (*out).max_msg_sz = config.srd.map_or(config.max_message, |s| s.packet);
        (*out).lid = if config.infiniband { id as u16 } else { 0 };
        (*out).link_layer = match config.infiniband {
            _ if config.srd.is_some() => link_layer::UNSPECIFIED,
            true => link_layer::INFINIBAND,
            false => link_layer::ETHERNET,
        };
    }
    0
}

/// GID 0 is link-local, GID 1 the device's IPv4 address as RoCE v1, GID 2 as RoCE v2.
pub(crate) fn gid_of(id: u32, index: u32) -> Gid {
    let mut gid = [0; 16];
    if index == 0 {
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[12..].copy_from_slice(&id.to_be_bytes());
    } else {
        gid[10..12].copy_from_slice(&[0xff, 0xff]);
        gid[12..].copy_from_slice(&[10, 99, (id >> 8) as u8, id as u8]);
    }
    gid
}

unsafe extern "C" fn query_gid(
    context: *mut RawContext,
    _: u8,
    index: c_int,
    out: *mut Gid,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { *out = gid_of(device_of(context), index as u32) };
    0
}

unsafe extern "C" fn query_gid_ex(
    context: *mut RawContext,
    port: u32,
    index: u32,
    out: *mut RawGidEntry,
    _flags: u32,
    size: usize,
) -> c_int {
    if size < size_of::<RawGidEntry>() || index > 2 {
        return libc::EINVAL;
    }
    // SAFETY: the caller's.
    let id = unsafe { device_of(context) };
    let config = world().devices[&id].config;
    let infiniband = config.infiniband || config.srd.is_some();
    if infiniband && index > 0 {
        return libc::ENODATA;
    }
    let entry = RawGidEntry {
        gid: GidBytes(gid_of(id, index)),
        gid_index: index,
        port_num: port,
        gid_type: match (infiniband, index) {
            (true, _) => gid_type::IB,
            (_, 1) => gid_type::ROCE_V1,
            _ => gid_type::ROCE_V2,
        },
        ndev_ifindex: 0,
    };
    // SAFETY: the caller's.
    unsafe { *out = entry };
    0
}

unsafe extern "C" fn create_cq(
    context: *mut RawContext,
    entries: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: c_int,
) -> *mut RawCq {
    let mut world = world();
    let handle = world.number();
    let queue = Completions {
        entries: entries as u32,
        ready: VecDeque::new(),
    };
    world.cqs.insert(handle, queue);
    // SAFETY: all-zero bytes are a valid value of numbers and pointers, and of an unused lock.
    let mut raw: Box<RawCq> = Box::new(unsafe { core::mem::zeroed() });
    (raw.context, raw.handle, raw.cqe) = (context, handle, entries);
    Box::into_raw(raw)
}

unsafe extern "C" fn destroy_cq(cq: *mut RawCq) -> c_int {
    // SAFETY: made above.
    let cq = unsafe { Box::from_raw(cq) };
    world().cqs.remove(&cq.handle);
    0
}

unsafe extern "C" fn create_qp(pd: *mut RawPd, attr: *mut QpInitAttr) -> *mut RawQp {
    // SAFETY: the caller's.
    let (send, recv, cap) = unsafe { ((*attr).send_cq, (*attr).recv_cq, (*attr).cap) };
    // SAFETY: passed on.
    unsafe { make_qp(pd, send, recv, cap, false, false) }
}

unsafe extern "C" fn create_qp_ex(_: *mut RawContext, attr: *mut QpInitAttrEx) -> *mut RawQp {
    // SAFETY: the caller's.
    let attr = unsafe { &mut *attr };
    if attr.comp_mask & init_mask::PD == 0 {
        return refused(libc::EINVAL);
    }
    // SAFETY: passed on.
    unsafe { make_qp(attr.pd, attr.send_cq, attr.recv_cq, attr.cap, true, false) }
}

pub(crate) unsafe fn make_qp(
    pd: *mut RawPd,
    send_cq: *mut RawCq,
    recv_cq: *mut RawCq,
    cap: QpCap,
    calls: bool,
    srd: bool,
) -> *mut RawQp {
    // SAFETY: the caller's objects.
    let (context, pd_number, send, recv) = unsafe {
        (
            (*pd).context,
            (*pd).handle,
            (*send_cq).handle,
            (*recv_cq).handle,
        )
    };
    // SAFETY: as above.
    let device = unsafe { device_of(context) };
    let mut world = world();
    let own = &world.devices[&device];
    let config = own.config;
    if own.removed {
        return refused(libc::EIO);
    }
    // An EFA device has no RC.
    if (calls && !config.calls) || config.srd.is_some() != srd {
        return refused(libc::EOPNOTSUPP);
    }
    if cap.max_inline_data > config.inline
        || cap.max_send_wr > config.max_work
        || cap.max_recv_wr > config.max_work
        || cap.max_send_sge > config.max_sge
        || cap.max_recv_sge > config.max_sge
    {
        return refused(libc::EINVAL);
    }
    let qpn = world.number();
    // SAFETY: all-zero bytes are a valid value of numbers, pointers, options of functions, and of an unused lock.
    let mut raw: Box<RawQpEx> = Box::new(unsafe { core::mem::zeroed() });
    raw.base.context = context;
    raw.base.pd = pd;
    (raw.base.send_cq, raw.base.recv_cq) = (send_cq, recv_cq);
    (raw.base.handle, raw.base.qp_num, raw.base.qp_type) = (qpn, qpn, qp_type::RC);
    if calls {
        raw.compare_swap = config.atomics.then_some(wr_compare_swap);
        raw.fetch_add = config.atomics.then_some(wr_fetch_add);
        raw.read = config.srd.is_none_or(|s| s.reads).then_some(wr_read);
        raw.write = Some(wr_write);
        raw.write_imm = Some(wr_write_imm);
        raw.send = Some(wr_send);
        raw.send_imm = Some(wr_send_imm);
        raw.set_ud_addr = srd.then_some(wr_set_ud_addr);
        raw.set_inline = Some(wr_set_inline);
        raw.set_sge = Some(wr_set_sge);
        raw.set_sge_list = Some(wr_set_sge_list);
        raw.start = Some(wr_start);
        raw.complete = Some(wr_complete);
        raw.abort = Some(wr_start);
    }
    if srd {
        (raw.compare_swap, raw.fetch_add) = (None, None);
    }
    let raw = Box::into_raw(raw);
    let queue = Queue {
        device,
        pd: pd_number,
        send_cq: send,
        recv_cq: recv,
        cap,
        state: qp_state::RESET,
        access: 0,
        dest: 0,
        path: Default::default(),
        sends: VecDeque::new(),
        held: 0,
        unsignalled: 0,
        receives: VecDeque::new(),
        srd,
        qkey: 0,
        finished: Vec::new(),
        handle: raw.addr(),
        building: Vec::new(),
    };
    world.qps.insert(qpn, queue);
    raw.cast()
}

unsafe extern "C" fn qp_to_qp_ex(qp: *mut RawQp) -> *mut RawQpEx {
    qp.cast()
}

unsafe extern "C" fn destroy_qp(qp: *mut RawQp) -> c_int {
    // SAFETY: made above, as the extended structure.
    let qp = unsafe { Box::from_raw(qp.cast::<RawQpEx>()) };
    let mut world = world();
    if let Some(gone) = world.qps.remove(&qp.base.handle) {
        // Real devices take its completions out of the queues too.
        for cq in [gone.send_cq, gone.recv_cq] {
            if let Some(cq) = world.cqs.get_mut(&cq) {
                cq.ready.retain(|(wc, _)| wc.qp_num != qp.base.handle);
            }
        }
    }
    0
}

unsafe extern "C" fn modify_qp(qp: *mut RawQp, attr: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: the caller's.
    let (qpn, attr) = unsafe { ((*qp).handle, &*attr) };
    let mut world = world();
    let Some(queue) = world.qps.get(&qpn) else {
        return libc::EINVAL;
    };
    let device = &world.devices[&queue.device];
    if device.removed {
        return libc::EIO;
    }
    let allowed = match attr.qp_state {
        to if queue.srd => device
            .config
            .srd
            .is_some_and(|s| crate::efa::allows(&s, queue.state, to, mask)),
        qp_state::INIT => queue.state == qp_state::RESET,
        qp_state::RTR => queue.state == qp_state::INIT,
        qp_state::RTS => queue.state == qp_state::RTR,
        _ => true,
    };
    if !allowed || mask & qp_mask::STATE == 0 {
        return libc::EINVAL;
    }
    if attr.qp_state == qp_state::RTR
        && let Some(errno) = device.refuse_rtr
    {
        return errno;
    }
    match attr.qp_state {
        qp_state::ERR => {
            world.break_down(qpn);
            world.progress(qpn);
            return 0;
        }
        qp_state::RESET => world.empty(qpn),
        _ => {}
    }
    let Some(queue) = world.qps.get_mut(&qpn) else {
        return libc::EINVAL;
    };
    queue.state = attr.qp_state;
    if mask & qp_mask::QKEY != 0 {
        queue.qkey = attr.qkey;
    }
    if mask & qp_mask::ACCESS_FLAGS != 0 {
        queue.access = attr.access;
    }
    if mask & qp_mask::DEST_QPN != 0 {
        queue.dest = attr.dest_qp_num;
    }
    if mask & qp_mask::PKEY_INDEX != 0 {
        queue.path.pkey_index = attr.pkey_index;
    }
    if mask & qp_mask::AV != 0 {
        queue.path.service_level = attr.ah.sl;
        queue.path.traffic_class = attr.ah.grh.traffic_class;
    }
    if mask & qp_mask::PATH_MTU != 0 {
        queue.path.mtu = attr.path_mtu;
    }
    0
}

unsafe extern "C" fn query_qp(
    qp: *mut RawQp,
    attr: *mut QpAttr,
    _: c_int,
    _: *mut QpInitAttr,
) -> c_int {
    // SAFETY: the caller's.
    let qpn = unsafe { (*qp).handle };
    match world().qps.get(&qpn) {
        // SAFETY: the caller's.
        Some(queue) => unsafe { (*attr).qp_state = queue.state },
        None => return libc::EINVAL,
    }
    0
}

unsafe extern "C" fn get_async_event(context: *mut RawContext, out: *mut RawAsyncEvent) -> c_int {
    // SAFETY: the caller's.
    let id = unsafe { device_of(context) };
    let event = world()
        .devices
        .get_mut(&id)
        .and_then(|d| d.events.pop_front());
    let Some((event_type, element)) = event else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    let element = core::ptr::with_exposed_provenance_mut(element);
    // SAFETY: the caller's.
    unsafe {
        *out = RawAsyncEvent {
            element,
            event_type,
        }
    };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut RawAsyncEvent) {}

unsafe extern "C" fn wc_status_str(status: u32) -> *const c_char {
    match status {
        wc_status::SUCCESS => c"success".as_ptr(),
        wc_status::RETRY_EXC_ERR => c"transport retry counter exceeded".as_ptr(),
        _ => c"a status of the mock".as_ptr(),
    }
}

unsafe extern "C" fn poll_cq(cq: *mut RawCq, room: c_int, out: *mut Wc) -> c_int {
    // SAFETY: the caller's.
    let (handle, id) = unsafe { ((*cq).handle, device_of((*cq).context)) };
    let mut world = world();
    if world.devices[&id].removed {
        return 0;
    }
    if !world.devices[&id].config.hollow {
        // Time passes when somebody looks.
        let all: Vec<u32> = world.qps.keys().copied().collect();
        for qpn in all {
            world.progress(qpn);
        }
    }
    let reverse = world.devices[&id].reverse;
    let World { cqs, qps, .. } = &mut *world;
    let Some(queue) = cqs.get_mut(&handle) else {
        return -1;
    };
    let n = queue.ready.len().min(room.max(0) as usize);
    if reverse
        && queue
            .ready
            .iter()
            .all(|(wc, _)| wc.status == wc_status::SUCCESS)
    {
        queue.ready.make_contiguous()[..n].reverse();
    }
    for i in 0..n {
        if let Some((wc, gives)) = queue.ready.pop_front() {
            if let Some(qp) = qps.get_mut(&wc.qp_num) {
                qp.held = qp.held.saturating_sub(gives);
            }
            // SAFETY: there is room for `n`.
            unsafe { *out.add(i) = wc };
        }
    }
    n as c_int
}
