//! SRD queue pairs: made, brought to life without a peer, and posted to with an address in every request.

use core::ffi::c_int;
use core::ptr::NonNull;

use super::EfaAttr;
use super::abi::{DRIVER_TYPE_SRD, RawEfaQpInit};
use crate::abi::*;
use crate::any::AnyQp;
use crate::error::{Result, Step, VerbsError, errno};
use crate::memory::Pd;
use crate::queue::Cq;

/// How large a queue pair is to be.
#[derive(Clone, Copy, Debug)]
pub struct SrdConfig {
    /// Requests under way.
    pub send: u32,
    /// Receives posted.
    pub recv: u32,
}

/// Another port, as this device knows it.
#[derive(Debug)]
pub struct Address {
    raw: NonNull<RawAh>,
    pd: Pd,
}

// SAFETY: libibverbs lets any thread use an address handle.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    /// The port with this address.
    ///
    /// # Errors
    /// [`VerbsError::Step`].
    pub fn new(pd: &Pd, port: u8, gid: Gid) -> Result<Self> {
        let context = pd.context();
        let api = context.efa_api()?;
        let mut attr = AhAttr {
            grh: GlobalRoute {
                dgid: GidBytes(gid),
                ..GlobalRoute::default()
            },
            is_global: 1,
            port_num: port,
            ..AhAttr::default()
        };
        let words = || format!("GID {}", std::net::Ipv6Addr::from(gid));
        let refused = |e| context.refused(Step::CreateAh, &words(), e);
        // SAFETY: the protection domain lives.
        let raw = unsafe { (api.create_ah)(pd.raw(), &mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| refused(errno()))?;
        Ok(Self {
            raw,
            pd: pd.clone(),
        })
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        let context = self.pd.context();
        let Ok(api) = context.efa_api() else { return };
        // SAFETY: nobody else has the handle.
        let rc = unsafe { (api.destroy_ah)(self.raw.as_ptr()) };
        context.taken_down("destroying an address handle", rc);
    }
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
pub struct To<'a> {
    /// The port.
    pub address: &'a Address,
    /// The queue pair's number there.
    pub qpn: u32,
    /// The key that it was given.
    pub qkey: u32,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrdOp {
    /// Local memory to `addr`.
    Write {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// From `addr` to local memory.
    Read {
        /// The peer's address.
        addr: u64,
        /// The peer's key.
        rkey: u32,
    },
    /// To one of the peer's receives: any of those that are posted.
    Send,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct SrdWork {
    /// What its completion says.
    pub id: u64,
    /// What to do.
    pub op: SrdOp,
    /// The bytes; the first `count` of them. A remote read or write has one.
    pub pieces: [Sge; 2],
    /// How many pieces.
    pub count: usize,
}

impl SrdWork {
    /// One of these pieces, of which there may be two.
    pub fn new(id: u64, op: SrdOp, pieces: &[Sge]) -> Self {
        let (mut two, count) = ([Sge::default(); 2], pieces.len().min(2));
        two[..count].copy_from_slice(&pieces[..count]);
        Self {
            id,
            op,
            pieces: two,
            count,
        }
    }
}

/// The calls that are used.
#[derive(Clone, Copy, Debug)]
struct Calls {
    qp: NonNull<RawQpEx>,
    write: unsafe extern "C" fn(*mut RawQpEx, u32, u64),
    read: Option<unsafe extern "C" fn(*mut RawQpEx, u32, u64)>,
    send: unsafe extern "C" fn(*mut RawQpEx),
    set_to: unsafe extern "C" fn(*mut RawQpEx, *mut RawAh, u32, u32),
    set_pieces: unsafe extern "C" fn(*mut RawQpEx, usize, *const Sge),
    start: unsafe extern "C" fn(*mut RawQpEx),
    complete: unsafe extern "C" fn(*mut RawQpEx) -> c_int,
}

// SAFETY: they lead to a queue pair, which libibverbs lets any thread use.
unsafe impl Send for Calls {}
// SAFETY: as above.
unsafe impl Sync for Calls {}

impl Calls {
    /// # Safety
    /// `qp` is null or an extended queue pair.
    unsafe fn of(qp: *mut RawQpEx) -> Option<Self> {
        let qp = NonNull::new(qp)?;
        let raw = qp.as_ptr();
        // SAFETY: the caller's promise. Field by field: nothing is assumed about what lies behind those.
        unsafe {
            Some(Self {
                qp,
                write: (*raw).write?,
                read: (*raw).read,
                send: (*raw).send?,
                set_to: (*raw).set_ud_addr?,
                set_pieces: (*raw).set_sge_list?,
                start: (*raw).start?,
                complete: (*raw).complete?,
            })
        }
    }
}

/// An SRD queue pair.
#[derive(Debug)]
pub struct SrdQp {
    any: AnyQp,
    calls: Calls,
}

impl core::ops::Deref for SrdQp {
    type Target = AnyQp;

    fn deref(&self) -> &AnyQp {
        &self.any
    }
}

impl SrdQp {
    /// Makes one, in RESET. It writes remotely, and reads if the device does.
    ///
    /// # Errors
    /// [`VerbsError::Step`], [`VerbsError::Unsupported`].
    pub fn new(pd: &Pd, cq: &Cq, config: &SrdConfig, device: &EfaAttr) -> Result<Self> {
        let context = pd.context();
        let unsupported = |what: &str| VerbsError::Unsupported {
            device: context.name().to_owned(),
            what: what.to_owned(),
        };
        if !device.writes {
            return Err(unsupported(
                "this EFA device, or the libefa of this host, does not write remotely: rdma-core 46 or later and an instance whose adapter does (EFA of 2022 and later) are needed",
            ));
        }
        if device.send_pieces < 2 {
            return Err(unsupported("its messages have a single piece"));
        }
        let api = context.efa_api()?;
        let (Some(convert), Some(post_recv)) = (context.api().qp_to_qp_ex, context.ops().post_recv)
        else {
            return Err(unsupported("this libibverbs has no ibv_qp_to_qp_ex"));
        };
        let reads = match device.reads {
            true => send_ops::RDMA_READ,
            false => 0,
        };
        let mut attr = QpInitAttrEx {
            qp_context: core::ptr::null_mut(),
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            srq: core::ptr::null_mut(),
            cap: QpCap {
                max_send_wr: config.send,
                max_recv_wr: config.recv,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: qp_type::DRIVER,
            sq_sig_all: 1,
            comp_mask: init_mask::PD | init_mask::SEND_OPS_FLAGS,
            pd: pd.raw(),
            xrcd: core::ptr::null_mut(),
            create_flags: 0,
            max_tso_header: 0,
            rwq_ind_tbl: core::ptr::null_mut(),
            rx_hash: [0; 3],
            source_qpn: 0,
            send_ops_flags: send_ops::SEND | send_ops::RDMA_WRITE | reads,
        };
        let mut efa = RawEfaQpInit {
            driver_qp_type: DRIVER_TYPE_SRD,
            ..RawEfaQpInit::default()
        };
        let size = size_of::<RawEfaQpInit>() as u32;
        // SAFETY: the context is open; everything in the structures lives.
        let made = unsafe { (api.create_qp_ex)(context.raw(), &mut attr, &mut efa, size) };
        let words = || format!("SRD, {} requests, {} receives", config.send, config.recv);
        let raw =
            NonNull::new(made).ok_or_else(|| context.refused(Step::CreateQp, &words(), errno()))?;
        let any = AnyQp::new(raw, post_recv, pd, [cq, cq]);
        // SAFETY: the queue pair was made by an extended call.
        let calls = unsafe { Calls::of(convert(any.raw())) }
            .ok_or_else(|| unsupported("its queue pairs lack calls that are needed"))?;
        Ok(Self { any, calls })
    }

    /// RESET to RTS, which needs nobody else. `qkey`: what its peers' requests carry. `rnr_retry`: how often a message that finds no receive
    /// is repeated, 7 without end; `None` on devices that do not let it be said.
    ///
    /// # Errors
    /// [`VerbsError::Step`].
    pub fn start(&self, port: u8, qkey: u32, rnr_retry: Option<u8>) -> Result<()> {
        let mut attr = QpAttr {
            qp_state: qp_state::INIT,
            port_num: port,
            qkey,
            ..QpAttr::default()
        };
        let mask = qp_mask::STATE | qp_mask::PKEY_INDEX | qp_mask::PORT | qp_mask::QKEY;
        self.modify(Step::ToInit, &format!("SRD, port {port}"), &mut attr, mask)?;
        let mut attr = QpAttr {
            qp_state: qp_state::RTR,
            ..QpAttr::default()
        };
        self.modify(Step::ToRtr, "SRD", &mut attr, qp_mask::STATE)?;
        let mut attr = QpAttr {
            qp_state: qp_state::RTS,
            rnr_retry: rnr_retry.unwrap_or(0),
            ..QpAttr::default()
        };
        let rnr = match rnr_retry {
            Some(_) => qp_mask::RNR_RETRY,
            None => 0,
        };
        let mask = qp_mask::STATE | qp_mask::SQ_PSN | rnr;
        self.modify(Step::ToRts, "SRD", &mut attr, mask)
    }

    /// Gives requests to the device: all of them or none.
    ///
    /// # Errors
    /// What the device said, as `errno`.
    ///
    /// # Safety
    /// Nobody else posts to this queue pair meanwhile. The pieces may be used until their request completes or the queue pair is destroyed.
    pub unsafe fn post(&self, to: To<'_>, works: &[SrdWork]) -> Result<(), i32> {
        if works.is_empty() {
            return Ok(());
        }
        let calls = &self.calls;
        let qp = calls.qp.as_ptr();
        // SAFETY: the queue pair lives, and these are its functions; pieces are copied by the calls.
        unsafe {
            (calls.start)(qp);
            for work in works {
                (*qp).wr_id = work.id;
                (*qp).wr_flags = send_flags::SIGNALED;
                match work.op {
                    SrdOp::Write { addr, rkey } => (calls.write)(qp, rkey, addr),
                    SrdOp::Read { addr, rkey } => match calls.read {
                        Some(read) => read(qp, rkey, addr),
                        // Not asked for without `EfaAttr::reads`: a request that no device takes.
                        None => (calls.write)(qp, 0, 0),
                    },
                    SrdOp::Send => (calls.send)(qp),
                }
                let count = work.count.min(work.pieces.len());
                (calls.set_pieces)(qp, count, work.pieces.as_ptr());
                (calls.set_to)(qp, to.address.raw.as_ptr(), to.qpn, to.qkey);
            }
            match (calls.complete)(qp) {
                0 => Ok(()),
                errno => Err(errno.abs()),
            }
        }
    }

    /// Does it read remotely?
    pub fn reads(&self) -> bool {
        self.calls.read.is_some()
    }
}
