//! An SRD queue pair of an EFA device that belongs to one of ours, and the memory through which it exchanges messages with its peer's engine.
//!
//! Each queue pair of ours has one of the device's, although SRD would let one serve every peer: then a peer that fails breaks nobody else's
//! traffic, the queues of one connection are bounded by themselves, and completions need no sorting by core. An EFA device has some hundreds of them.

use core::fmt;
use std::sync::{Arc, OnceLock};

use doorbell_verbs::efa::{Address, EfaAttr, SrdConfig, SrdQp, SrdWork, To};
use doorbell_verbs::{Cq, VerbsError, abi};
use rand::Rng as _;

use super::places::Places;
use super::{INLINE, VerbsEnd, VerbsPort, VerbsTarget};

/// Messages without an answer that a side may have sent.
pub(crate) const WINDOW: usize = 32;
/// Receives of a side: as many requests of the peer, as many answers to its own, and some for greetings.
const RECEIVES: usize = 2 * WINDOW + 8;
/// Places for answers and greetings.
pub(crate) const CONTROLS: usize = WINDOW + 4;
/// Bytes of a message's head, at most.
pub(crate) const HEAD: usize = 80;
/// Bytes of a part of a SEND, at most.
const PART: usize = 4096;

/// A device's SRD queue pair that belongs to one of ours.
pub(crate) struct SrdNic {
    // In this order: nothing is used after it was dropped.
    pub(crate) qp: SrdQp,
    pub(crate) cq: Cq,
    address: OnceLock<Address>,
    pub(crate) port: Arc<VerbsPort>,
    pub(crate) alarm: Arc<super::Alarm>,
    /// Heads and inline data of requests, one place for each that may be under way.
    pub(crate) heads: Places,
    /// Answers and greetings.
    pub(crate) controls: Places,
    /// What arrives.
    pub(crate) arrivals: Places,
    pub(crate) device: EfaAttr,
    qkey: u32,
    peer: OnceLock<Peer>,
    /// Requests under way, answers and greetings not counted.
    pub(crate) send: u32,
    /// Bytes of a part of a SEND.
    pub(crate) part: usize,
}

/// What is known of the other end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) qpn: u32,
    qkey: u32,
    /// What its messages carry, and ours: both were drawn for this connection.
    pub(crate) theirs: u32,
    pub(crate) ours: u32,
}

impl fmt::Debug for SrdNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, QP {:#08x}", self.port, self.qp.qpn())
    }
}

impl SrdNic {
    /// One that is ready for whatever peer, with its receives posted, for a queue of so many slots.
    pub(crate) fn new(
        port: &Arc<VerbsPort>,
        device: EfaAttr,
        pd: u32,
        slots: u32,
    ) -> Result<Self, VerbsError> {
        let controls = CONTROLS as u32;
        let (max_send, max_recv) = (device.max_send, device.max_recv);
        if max_send < controls + 8 || max_recv < RECEIVES as u32 {
            return Err(port.unsupported(format!(
                "its queues of {max_send} requests and {max_recv} receives are too short: {} and {RECEIVES} are needed",
                controls + 8
            )));
        }
        let part = PART.min((port.port.max_message as usize).saturating_sub(HEAD));
        if part < 256 {
            return Err(port.unsupported(format!(
                "its messages of {} bytes are too short",
                port.port.max_message
            )));
        }
        let send = slots.clamp(64, 512).min(max_send - controls);
        let total = send + controls;
        let entries = (total + RECEIVES as u32 + 16).min(port.device.max_cqe);
        let cq = Cq::new(&port.context, entries)?;
        let pd = port.pd(pd)?;
        let config = SrdConfig {
            send: total,
            recv: RECEIVES as u32,
        };
        let qp = SrdQp::new(&pd, &cq, &config, &device)?;
        let qkey = rand::rng().random_range(1..1 << 31);
        qp.start(port.config.port, qkey, device.rnr_retry.then_some(7))?;
        let places = |count, bytes| Places::new(&pd, count, bytes, abi::access::LOCAL_WRITE);
        let made = Self {
            heads: places(send as usize, HEAD + INLINE)?,
            controls: places(CONTROLS, HEAD + 8 * WINDOW)?,
            arrivals: places(RECEIVES, HEAD + part)?,
            alarm: port.watch(qp.qpn()),
            qp,
            cq,
            address: OnceLock::new(),
            port: Arc::clone(port),
            device,
            qkey,
            peer: OnceLock::new(),
            send,
            part,
        };
        for number in 0..RECEIVES {
            made.receive(number).map_err(|e| {
                port.unsupported(format!(
                    "posting a receive: {}",
                    std::io::Error::from_raw_os_error(e)
                ))
            })?;
        }
        Ok(made)
    }

    /// Posts the receive of that number.
    pub(crate) fn receive(&self, number: usize) -> Result<(), i32> {
        let Some((_, piece)) = self.arrivals.place(number, HEAD + self.part) else {
            return Err(libc::EINVAL);
        };
        // SAFETY: the place is this receive's until it completes.
        unsafe {
            self.qp
                .post_recv(super::RECEIVE | number as u64, &mut [piece])
        }
    }

    /// Bytes that arrived in that receive.
    pub(crate) fn arrived(&self, number: usize, len: usize) -> &[u8] {
        match self.arrivals.place(number, len) {
            // SAFETY: the place holds `len` bytes, and its receive has completed: the device does not write it until it is posted again, by
            // the core that looks at these bytes.
            Some((at, _)) => unsafe { core::slice::from_raw_parts(at, len) },
            None => &[],
        }
    }

    /// This end, for the peer.
    pub(crate) fn end(&self) -> VerbsEnd {
        VerbsEnd {
            reads_open: 1,
            reads_answered: 1,
            srd: Some(self.qkey),
            ..self.port.end(self.qp.qpn())
        }
    }

    /// Makes the peer known. Nothing leaves.
    pub(crate) fn connect(&self, to: &VerbsTarget) -> Result<(), VerbsError> {
        let Some(qkey) = to.peer.srd else {
            return Err(self.port.unsupported(
                "it is an EFA device, which has SRD, and the peer's has RC: SRD reaches EFA devices only",
            ));
        };
        let pd = self.heads.pd();
        let address = Address::new(pd, self.port.config.port, to.peer.gid)?;
        let peer = Peer {
            qpn: to.peer.qpn,
            qkey,
            theirs: to.rq_psn,
            ours: to.sq_psn,
        };
        if self.address.set(address).is_err() || self.peer.set(peer).is_err() {
            return Err(self
                .port
                .unsupported("it is connected already: reset the queue pair"));
        }
        Ok(())
    }

    /// The number of the peer's queue pair; 0 before it is connected.
    pub(crate) fn peer_qpn(&self) -> u32 {
        self.peer.get().map_or(0, |peer| peer.qpn)
    }

    /// The other end.
    pub(crate) fn peer(&self) -> Option<Peer> {
        self.peer.get().copied()
    }

    /// Gives requests to the device: all of them or none.
    ///
    /// # Safety
    /// As for [`SrdQp::post`].
    pub(crate) unsafe fn post(&self, works: &[SrdWork]) -> Result<(), i32> {
        let (Some(address), Some(peer)) = (self.address.get(), self.peer.get()) else {
            return Err(libc::ENOTCONN);
        };
        let to = To {
            address,
            qpn: peer.qpn,
            qkey: peer.qkey,
        };
        // SAFETY: passed on.
        unsafe { self.qp.post(to, works) }
    }
}

/// The device's half of a queue pair, of whichever kind its device has.
#[derive(Clone, Debug)]
pub(crate) enum Half {
    Rc(Arc<super::Nic>),
    Srd(Arc<SrdNic>),
}

impl Half {
    /// One for a queue of so many slots and so many receives of so many pieces.
    pub(crate) fn new(
        port: &Arc<VerbsPort>,
        pd: u32,
        slots: u32,
        receives: (u32, u32),
    ) -> Result<Self, VerbsError> {
        Ok(match port.efa {
            Some(device) => Self::Srd(Arc::new(SrdNic::new(port, device, pd, slots)?)),
            None => Self::Rc(Arc::new(super::Nic::new(port, pd, slots, receives)?)),
        })
    }

    pub(crate) fn port(&self) -> &Arc<VerbsPort> {
        match self {
            Self::Rc(nic) => &nic.port,
            Self::Srd(nic) => &nic.port,
        }
    }

    /// This end, for the peer.
    pub(crate) fn end(&self) -> VerbsEnd {
        match self {
            Self::Rc(nic) => nic.end(),
            Self::Srd(nic) => nic.end(),
        }
    }

    /// Connects it to its peer.
    pub(crate) fn connect(&self, to: &VerbsTarget) -> Result<(), VerbsError> {
        match self {
            Self::Rc(nic) => nic.connect(to),
            Self::Srd(nic) => nic.connect(to),
        }
    }
}
