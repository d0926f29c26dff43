//! The data path of one QP over shared memory, called by the engine core that owns the QP.
//!
//! It says whether the target QP is there, leads rkeys to mapped bytes, and carries the few requests that only the
//! target's engine may execute. No system calls; the one lock is this QP's own and is taken for those requests only.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use doorbell_wire::{Key, Opcode, Qpn};

use super::{
    error::{Result, ShmError},
    handle::Peer,
    mailbox::{Answer, CHUNK, Inbox, Outbox, Request, SlotQp, TargetQp},
    peer::PeerView,
};
use crate::{
    fault::Fault,
    link::{Delivery, Incoming, Part, RemoteQp},
    mem::{Access, Span},
};

/// [`Answer::status`] of a request that was executed.
const DONE: u32 = 0;
/// While a request waits: the target has no receive WQE for it.
const NO_RECEIVE: u32 = 1;
/// A fault: its place in [`crate::fault::TABLE`] is added.
const FAULT: u32 = 0x100;

/// The connection of a local QP to a QP of a peer.
pub struct ShmLink {
    // Keeps the session up as long as a QP is connected over it.
    peer: Peer,
    view: Arc<PeerView>,
    local: SlotQp,
    remote: Qpn,
    target: OnceLock<TargetQp>,
    /// The peer's count of requests when no more were found; [`LOOK`]: look at once.
    attention: AtomicU64,
    ring: Mutex<Ring>,
}

const LOOK: u64 = u64::MAX;

struct Ring {
    /// `None` once the QP has been withdrawn.
    outbox: Option<Outbox>,
    inbox: Option<Inbox>,
    /// WQE position of the request that is under way, and its number on the ring.
    sent: Option<(u64, u32)>,
    /// The peer's count of changes when the target was last looked for in vain.
    searched: Option<u64>,
}

impl fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "QP {:#08x} to QP {:#08x} of {:?}",
            self.local.qpn, self.local.peer_qpn, self.peer
        )
    }
}

impl ShmLink {
    /// Shows `local` to the peer as ready and connected to `local.peer_qpn`; for
    /// [`Destination::Peer`](crate::Destination::Peer). The QP stops being ready when the link is dropped or
    /// [detached](RemoteQp::detach).
    ///
    /// # Errors
    /// [`ShmError::Gone`] when the session is over, [`ShmError::InUse`] when the QP has a link to this peer,
    /// [`ShmError::Limit`] when the session has no room.
    pub fn open(peer: &Peer, local: SlotQp) -> Result<Arc<Self>> {
        if let Some(gone) = peer.gone() {
            return Err(gone.into());
        }
        let view = peer.core().view.get().ok_or(ShmError::Down)?;
        let remote = Qpn::new(local.peer_qpn).ok_or_else(|| ShmError::Unknown {
            what: "QP",
            value: format!("{:#x} (24 bits)", local.peer_qpn),
        })?;
        let outbox = Outbox::open(&peer.core().mailbox, local)?;
        Ok(Arc::new(Self {
            peer: peer.clone(),
            view: Arc::clone(view),
            local,
            remote,
            target: OnceLock::new(),
            attention: AtomicU64::new(LOOK),
            ring: Mutex::new(Ring {
                outbox: Some(outbox),
                inbox: None,
                sent: None,
                searched: None,
            }),
        }))
    }

    /// The local end.
    pub fn local(&self) -> SlotQp {
        self.local
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The target QP; `None`: it has not connected to this QP yet.
    #[inline]
    fn target(&self) -> Result<Option<&TargetQp>, Fault> {
        if self.view.is_down() {
            return Err(Fault::PeerDead);
        }
        match self.target.get() {
            Some(target) if target.is_ready() => Ok(Some(target)),
            Some(_) => Err(Fault::PeerDead),
            None => Ok(self.search()),
        }
    }

    #[cold]
    fn search(&self) -> Option<&TargetQp> {
        let mut ring = self.ring();
        let changes = self.view.mailbox().changes();
        if ring.searched == Some(changes) {
            return None;
        }
        ring.searched = Some(changes);
        let found = self.view.mailbox().find(self.local.peer_qpn)?;
        if found.qp().peer_qpn != self.local.qpn {
            return None;
        }
        ring.inbox = Some(found.inbox());
        Some(self.target.get_or_init(|| found))
    }
}

impl RemoteQp for ShmLink {
    fn peer(&self) -> u64 {
        u64::from(self.peer.id().0)
    }

    fn process(&self) -> Option<u32> {
        self.peer.credentials().process()
    }

    fn qpn(&self) -> Qpn {
        self.remote
    }

    #[inline]
    fn stamp(&self) -> (u64, u64) {
        self.view.stamp()
    }

    #[inline]
    fn ready(&self) -> Result<bool, Fault> {
        self.target().map(|target| target.is_some())
    }

    fn resolve(&self, key: Key, need: Access) -> Result<Span, Fault> {
        let target = self.target()?.ok_or(Fault::PeerDead)?;
        // SAFETY: the trait's contract is the promise: the engine uses the answer only before its next grace
        // acknowledgement.
        unsafe { self.view.resolve(key.0, target.qp().pd, need) }
    }

    fn deliver_imm(&self, position: u64, imm: u32, bytes: u32) -> Delivery {
        if let Err(fault) = self.target() {
            return Delivery::Failed(fault);
        }
        let ring = &mut *self.ring();
        let Some(outbox) = &mut ring.outbox else {
            return Delivery::Failed(Fault::Destroyed);
        };
        match ring.sent {
            Some((at, number)) if at == position => match outbox.answer() {
                Some((answered, answer)) if answered == number => {
                    ring.sent = None;
                    match answer.status {
                        DONE => Delivery::Delivered,
                        status => Delivery::Failed(fault_of(status)),
                    }
                }
                Some(_) => Delivery::Failed(Fault::PeerDead),
                None if outbox.hint() == NO_RECEIVE => Delivery::NoReceive,
                None => Delivery::Pending,
            },
            // One request at a time: the engine asks for one WQE until it is answered.
            Some(_) => Delivery::Failed(Fault::PeerDead),
            None => {
                let opcode = u32::from(Opcode::RdmaWriteImm as u8);
                ring.sent = outbox
                    .send(&Request {
                        opcode,
                        len: bytes,
                        imm,
                        ..Request::default()
                    })
                    .map(|n| (position, n));
                Delivery::Pending
            }
        }
    }

    fn receives(&self) -> bool {
        // Not known before it is there.
        self.target.get().is_none_or(|target| target.qp().receives)
    }

    fn has_room(&self) -> Result<bool, Fault> {
        if self.target()?.is_none() {
            return Ok(false);
        }
        let ring = self.ring();
        ring.outbox
            .as_ref()
            .map_or(Err(Fault::Destroyed), |outbox| Ok(outbox.has_room()))
    }

    fn send_part(&self, part: &Part, bytes: &[u8]) -> bool {
        let ring = &mut *self.ring();
        let Some(outbox) = ring.outbox.as_mut().filter(|o| o.has_room()) else {
            return false;
        };
        let bytes = &bytes[..bytes.len().min(CHUNK)];
        // SAFETY: the chunk has that many bytes, and belongs to this side until the request is sent.
        unsafe { crate::copy::write(outbox.chunk().as_ptr(), bytes) };
        let opcode = match part.imm {
            None => Opcode::Send,
            Some(_) => Opcode::SendImm,
        };
        let sent = outbox.send(&Request {
            opcode: u32::from(opcode as u8),
            addr: part.offset.into(),
            len: bytes.len() as u32,
            imm: part.imm.unwrap_or(0),
            operands: [part.total.into(), 0],
            ..Request::default()
        });
        sent.is_some()
    }

    fn answer(&self) -> Option<Result<(), Fault>> {
        let (_, answer) = self.ring().outbox.as_mut()?.answer()?;
        Some(match answer.status {
            DONE => Ok(()),
            status => Err(fault_of(status)),
        })
    }

    fn waits_for_receive(&self) -> bool {
        let ring = self.ring();
        ring.outbox.as_ref().is_some_and(|o| o.hint() == NO_RECEIVE)
    }

    fn incoming(&self) -> Option<Incoming> {
        // What the peer sent before it went is not delivered: its QP has failed.
        self.target().ok()??;
        // The count is read first: a request that comes after it changes it again.
        let attention = self.view.mailbox().attention();
        if self.attention.load(Ordering::Relaxed) == attention {
            return None;
        }
        let ring = &mut *self.ring();
        let inbox = ring.inbox.as_mut()?;
        let Some(request) = inbox.request() else {
            self.attention.store(attention, Ordering::Relaxed);
            return None;
        };
        const SEND: u32 = Opcode::Send as u32;
        const SEND_IMM: u32 = Opcode::SendImm as u32;
        Some(match request.opcode {
            SEND | SEND_IMM => {
                let imm = (request.opcode == SEND_IMM).then_some(request.imm);
                let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                Incoming::Message(Part {
                    total: narrow(request.operands[0]),
                    offset: narrow(request.addr),
                    len: request.len,
                    imm,
                })
            }
            opcode if opcode == Opcode::RdmaWriteImm as u32 => Incoming::Immediate {
                imm: request.imm,
                bytes: request.len,
            },
            // Nothing that is carried: a part that fits no message is refused by whoever takes it.
            _ => Incoming::Message(Part {
                total: 0,
                offset: u32::MAX,
                len: u32::MAX,
                imm: None,
            }),
        })
    }

    fn part_bytes(&self, out: &mut [u8]) -> bool {
        let ring = self.ring();
        let Some(inbox) = ring.inbox.as_ref().filter(|_| out.len() <= CHUNK) else {
            return false;
        };
        // SAFETY: the chunk has that many bytes; the peer may write them meanwhile, which gives old or new bytes.
        unsafe { crate::copy::copy(out.as_mut_ptr(), inbox.chunk().as_ptr(), out.len()) };
        drop(ring);
        // The bytes before the state: a new life of the peer's QP begins by changing that, and writes its chunks afterwards.
        fence(Ordering::Acquire);
        matches!(self.target(), Ok(Some(_)))
    }

    fn accept(&self) {
        if let Some(inbox) = &mut self.ring().inbox {
            inbox.accept();
        }
    }

    fn reply(&self, outcome: Result<(), Fault>) {
        if let Some(inbox) = &mut self.ring().inbox {
            let status = outcome.map_or_else(|fault| FAULT + fault as u32, |()| DONE);
            inbox.reply(Answer { status, result: 0 });
        }
    }

    fn no_receive(&self) {
        if let Some(inbox) = &self.ring().inbox {
            inbox.hint(NO_RECEIVE);
        }
    }

    fn detach(&self) {
        let ring = &mut *self.ring();
        ring.outbox = None;
        ring.inbox = None;
    }
}

/// The fault that a peer reported. It may say anything: what is no fault of the table is "the peer is dead to us".
fn fault_of(status: u32) -> Fault {
    let index = status
        .checked_sub(FAULT)
        .and_then(|i| usize::try_from(i).ok());
    index
        .and_then(|i| crate::fault::TABLE.get(i))
        .map_or(Fault::PeerDead, |row| row.fault)
}
