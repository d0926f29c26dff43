//! Completion queues and reliable queue pairs, with every state that they go through.

use core::ffi::c_int;
use core::ptr::NonNull;
use std::sync::Arc;

use crate::abi::*;
use crate::any::AnyQp;
use crate::batch::Calls;
use crate::device::Context;
use crate::error::{Result, Step, errno};
use crate::memory::Pd;

/// A completion queue; a cheap handle.
#[derive(Clone, Debug)]
pub struct Cq(Arc<CqInner>);

#[derive(Debug)]
struct CqInner {
    raw: NonNull<RawCq>,
    poll: PollCq,
    context: Context,
}

// SAFETY: libibverbs lets any thread use a completion queue.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl Drop for CqInner {
    fn drop(&mut self) {
        // SAFETY: its queue pairs hold it, so there are none.
        unsafe { (self.context.api().destroy_cq)(self.raw.as_ptr()) };
    }
}

impl Cq {
    /// One of at least `entries` entries.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn new(context: &Context, entries: u32) -> Result<Self> {
        let null = core::ptr::null_mut();
        let entries = entries.min(i32::MAX as u32) as c_int;
        // SAFETY: the context is open; no event channel.
        let raw = unsafe { (context.api().create_cq)(context.raw(), entries, null, null, 0) };
        let refused = |e| context.refused(Step::CreateCq, &format!("{entries} entries"), e);
        let raw = NonNull::new(raw).ok_or_else(|| refused(errno()))?;
        let Some(poll) = context.ops().poll_cq else {
            // SAFETY: made above.
            unsafe { (context.api().destroy_cq)(raw.as_ptr()) };
            return Err(refused(libc::EOPNOTSUPP));
        };
        Ok(Self(Arc::new(CqInner {
            raw,
            poll,
            context: context.clone(),
        })))
    }

    pub(crate) fn raw(&self) -> *mut RawCq {
        self.0.raw.as_ptr()
    }

    /// Takes completions that are there; returns how many.
    ///
    /// # Errors
    /// What the device said, as `errno`: it is gone or broken.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, i32> {
        let room = out.len().min(i32::MAX as usize) as c_int;
        // SAFETY: the queue lives; `room` entries may be written.
        let n = unsafe { (self.0.poll)(self.0.raw.as_ptr(), room, out.as_mut_ptr()) };
        match usize::try_from(n) {
            Ok(n) => Ok(n.min(out.len())),
            Err(_) => Err(libc::EIO),
        }
    }
}

/// How large a queue pair is to be.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Work requests under way.
    pub send: u32,
    /// Receives posted.
    pub recv: u32,
    /// Pieces of a work request.
    pub send_pieces: u32,
    /// Pieces of a receive.
    pub recv_pieces: u32,
    /// Bytes of inline data; the device may give less, down to none.
    pub inline: u32,
    /// Use the calls of `ibv_wr_*` if they are there.
    pub calls: bool,
}

/// The other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remote {
    /// Number of its queue pair.
    pub qpn: u32,
    /// Its address.
    pub gid: Gid,
    /// Its LID, on InfiniBand.
    pub lid: u16,
}

/// What a connection is made of.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Port of the device.
    pub port: u8,
    /// Index of this side's GID.
    pub gid_index: u8,
    /// The GID at that index, for messages.
    pub own: Gid,
    /// The other end.
    pub remote: Remote,
    /// Packets carry a GRH: always on Ethernet, on InfiniBand between subnets.
    pub global: bool,
    /// Bytes of the path MTU.
    pub mtu: u16,
    /// Number of the first packet sent, 24 bits.
    pub sq_psn: u32,
    /// Number of the first packet expected, 24 bits.
    pub rq_psn: u32,
    /// READs and atomics open at a time.
    pub reads_open: u8,
    /// READs and atomics answered at a time.
    pub reads_answered: u8,
    /// Code of the time without acknowledgement.
    pub timeout: u8,
    /// How often it repeats.
    pub retry: u8,
    /// How often it repeats where no receive is posted; 7: without end.
    pub rnr_retry: u8,
    /// Code of the time to wait where no receive is posted.
    pub min_rnr_timer: u8,
    /// Routers that a packet may pass.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
}

/// A reliable queue pair.
#[derive(Debug)]
pub struct Qp {
    any: AnyQp,
    pub(crate) calls: Option<Calls>,
    pub(crate) post_send: PostSend,
    cap: QpCap,
}

impl core::ops::Deref for Qp {
    type Target = AnyQp;

    fn deref(&self) -> &AnyQp {
        &self.any
    }
}

/// Operations that a queue pair with calls is to have.
const OPERATIONS: u64 = send_ops::RDMA_WRITE
    | send_ops::RDMA_WRITE_WITH_IMM
    | send_ops::SEND
    | send_ops::SEND_WITH_IMM
    | send_ops::RDMA_READ;
const ATOMICS: u64 = send_ops::ATOMIC_CMP_AND_SWP | send_ops::ATOMIC_FETCH_AND_ADD;

impl Qp {
    /// Makes one, in RESET.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn new(pd: &Pd, send_cq: &Cq, recv_cq: &Cq, config: &QpConfig) -> Result<Self> {
        let context = pd.context();
        let words = || {
            format!(
                "{} sends of {} pieces, {} receives of {} pieces",
                config.send, config.send_pieces, config.recv, config.recv_pieces
            )
        };
        let refused = |e| context.refused(Step::CreateQp, &words(), e);
        let (Some(post_send), Some(post_recv)) = (context.ops().post_send, context.ops().post_recv)
        else {
            return Err(refused(libc::EOPNOTSUPP));
        };
        let mut attr = QpInitAttr {
            qp_context: core::ptr::null_mut(),
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: core::ptr::null_mut(),
            cap: QpCap {
                max_send_wr: config.send,
                max_recv_wr: config.recv,
                max_send_sge: config.send_pieces,
                max_recv_sge: config.recv_pieces,
                max_inline_data: config.inline,
            },
            qp_type: qp_type::RC,
            sq_sig_all: 0,
        };
        // How much inline data a device takes is not among its attributes: less is tried until it agrees.
        let mut raw = Self::create(pd, config.calls, &mut attr);
        while let Err(libc::EINVAL | libc::ENOMEM | libc::ENOSPC) = raw
            && attr.cap.max_inline_data > 0
        {
            attr.cap.max_inline_data = match attr.cap.max_inline_data {
                0..=16 => 0,
                n => n / 2,
            };
            raw = Self::create(pd, config.calls, &mut attr);
        }
        let (raw, calls) = raw.map_err(refused)?;
        Ok(Self {
            any: AnyQp::new(raw, post_recv, pd, [send_cq, recv_cq]),
            calls,
            post_send,
            cap: attr.cap,
        })
    }

    /// One attempt. What the device made of the sizes is in `attr` afterwards, if it succeeds.
    fn create(
        pd: &Pd,
        calls: bool,
        attr: &mut QpInitAttr,
    ) -> Result<(NonNull<RawQp>, Option<Calls>), i32> {
        let context = pd.context();
        let asked = *attr;
        if calls
            && let (Some(create), Some(convert)) =
                (context.create_qp_ex(), context.api().qp_to_qp_ex)
        {
            // Some devices have these calls without the atomics.
            for ops in [OPERATIONS | ATOMICS, OPERATIONS] {
                let mut ex = QpInitAttrEx {
                    qp_context: asked.qp_context,
                    send_cq: asked.send_cq,
                    recv_cq: asked.recv_cq,
                    srq: asked.srq,
                    cap: asked.cap,
                    qp_type: asked.qp_type,
                    sq_sig_all: asked.sq_sig_all,
                    comp_mask: init_mask::PD | init_mask::SEND_OPS_FLAGS,
                    pd: pd.raw(),
                    xrcd: core::ptr::null_mut(),
                    create_flags: 0,
                    max_tso_header: 0,
                    rwq_ind_tbl: core::ptr::null_mut(),
                    rx_hash: [0; 3],
                    source_qpn: 0,
                    send_ops_flags: ops,
                };
                // SAFETY: the context is open; everything in the structure lives.
                let made = unsafe { create(context.raw(), &mut ex) };
                let Some(made) = NonNull::new(made) else {
                    continue;
                };
                // SAFETY: the queue pair was made by the extended call.
                let found = unsafe { Calls::of(convert(made.as_ptr())) };
                if found.is_some() {
                    attr.cap = ex.cap;
                    return Ok((made, found));
                }
                // SAFETY: made above, used by nobody.
                unsafe { (context.api().destroy_qp)(made.as_ptr()) };
                break;
            }
        }
        // SAFETY: the protection domain and the queues live.
        let made = unsafe { (context.api().create_qp)(pd.raw(), attr) };
        match NonNull::new(made) {
            Some(made) => Ok((made, None)),
            None => {
                let e = errno();
                *attr = asked;
                Err(e)
            }
        }
    }

    /// What the device made of the sizes asked for.
    pub fn capacity(&self) -> QpCap {
        self.cap
    }

    /// Are work requests built by calls (`ibv_wr_*`)?
    pub fn by_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// RESET to INIT: receives may be posted. `pkey_index`: which entry of the port's table of partition keys. `rights` ([`access`]) are what the peer may do here at all.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn init(&self, port: u8, pkey_index: u16, rights: u32) -> Result<()> {
        let mut attr = QpAttr {
            qp_state: qp_state::INIT,
            pkey_index,
            port_num: port,
            access: rights,
            ..QpAttr::default()
        };
        let mask = qp_mask::STATE | qp_mask::PKEY_INDEX | qp_mask::PORT | qp_mask::ACCESS_FLAGS;
        let what = format!("port {port}, P_Key index {pkey_index}");
        self.modify(Step::ToInit, &what, &mut attr, mask)
    }

    /// INIT to RTR to RTS: requests of the peer are answered, and then its own are sent. On Ethernet this resolves the peer's address and may
    /// take as long as that.
    ///
    /// # Errors
    /// [`crate::VerbsError::Step`].
    pub fn connect(&self, to: &Connection) -> Result<()> {
        let address = |gid| std::net::Ipv6Addr::from(gid).to_canonical();
        let what = format!(
            "from {}, GID index {}, to peer {}, QP {:#08x}, path MTU {}",
            address(to.own),
            to.gid_index,
            address(to.remote.gid),
            to.remote.qpn,
            to.mtu
        );
        let mut attr = QpAttr {
            qp_state: qp_state::RTR,
            path_mtu: crate::device::mtu_code(to.mtu),
            dest_qp_num: to.remote.qpn,
            rq_psn: to.rq_psn,
            max_dest_rd_atomic: to.reads_answered,
            min_rnr_timer: to.min_rnr_timer,
            ah: AhAttr {
                grh: GlobalRoute {
                    dgid: GidBytes(to.remote.gid),
                    flow_label: 0,
                    sgid_index: to.gid_index,
                    hop_limit: to.hop_limit,
                    traffic_class: to.traffic_class,
                },
                dlid: to.remote.lid,
                sl: to.service_level,
                is_global: to.global.into(),
                port_num: to.port,
                ..AhAttr::default()
            },
            ..QpAttr::default()
        };
        let mask = qp_mask::STATE
            | qp_mask::AV
            | qp_mask::PATH_MTU
            | qp_mask::DEST_QPN
            | qp_mask::RQ_PSN
            | qp_mask::MAX_DEST_RD_ATOMIC
            | qp_mask::MIN_RNR_TIMER;
        self.modify(Step::ToRtr, &what, &mut attr, mask)?;
        let mut attr = QpAttr {
            qp_state: qp_state::RTS,
            timeout: to.timeout,
            retry_cnt: to.retry,
            rnr_retry: to.rnr_retry,
            sq_psn: to.sq_psn,
            max_rd_atomic: to.reads_open,
            ..QpAttr::default()
        };
        let mask = qp_mask::STATE
            | qp_mask::TIMEOUT
            | qp_mask::RETRY_CNT
            | qp_mask::RNR_RETRY
            | qp_mask::SQ_PSN
            | qp_mask::MAX_QP_RD_ATOMIC;
        self.modify(Step::ToRts, &what, &mut attr, mask)
    }
}
