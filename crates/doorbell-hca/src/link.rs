//! Where work requests go: the seam between the front end and whatever reaches the target.
//! A memory destination (loopback, shared memory of one host) *resolves* keys to addresses, and one copy path serves all of them;
//! a resolution is cached by the QP, so this seam is crossed only when a key changes. A packet destination has an engine of its own (`engine::roce`).

use core::fmt;
use std::sync::Arc;

use doorbell_wire::{Key, Qpn};

use crate::fault::Fault;
use crate::mem::{Access, Span};
use crate::roce::{RoceReceiver, RoceTarget};
use crate::verbs::VerbsTarget;

/// What a QP is connected to.
#[derive(Debug, Clone)]
pub enum Destination {
    /// A QP of the same HCA (also itself).
    Loopback(Qpn),
    /// A QP of another process of this host whose registered memory this process has mapped.
    Peer(Arc<dyn RemoteQp>),
    /// A QP that is reached by packets, through the port of this QP's engine core.
    Roce(Box<RoceTarget>),
    /// Nobody: packets from anywhere are received, through the port of this QP's engine core.
    RoceAnyone(RoceReceiver),
    /// A QP that an RDMA device reaches; [`HcaQp::prepare`](crate::HcaQp::prepare) comes first.
    Verbs(Box<VerbsTarget>),
}

/// A QP in another process whose memory we reach. One object per connection; called by one engine core only.
pub trait RemoteQp: Send + Sync + fmt::Debug {
    /// The peer process, as [`Hca::peer_down`](crate::Hca::peer_down) names it.
    fn peer(&self) -> u64;

    /// Its process, if the system says so.
    fn process(&self) -> Option<u32> {
        None
    }

    /// The number of the target QP, for reports.
    fn qpn(&self) -> Qpn;

    /// Two words that change whenever a resolution may have lost its ground: the peer's epoch (a key was revoked) and our own count of
    /// mappings given up, since a lying peer can ask for that without changing its epoch. Read once a turn; a change drops every
    /// cached resolution.
    fn stamp(&self) -> (u64, u64);

    /// Can the target take requests now? Asked once a batch; must be cheap (a load).
    ///
    /// # Errors
    /// [`Fault::PeerDead`] puts the QP into error at once. `Ok(false)`: not yet; asked again until the engine's patience ends.
    fn ready(&self) -> Result<bool, Fault>;

    /// Finds the region of a key, rights checked against the target's protection domain. The answer is used until this
    /// core's next grace acknowledgement.
    ///
    /// # Errors
    /// The fault to report: [`Fault::BadRkey`], [`Fault::RkeyRevoked`], [`Fault::RkeyPd`], [`Fault::RkeyAccess`], [`Fault::PeerDead`].
    fn resolve(&self, key: Key, need: Access) -> Result<Span, Fault>;

    /// Consumes a receive of the target for a WRITE with immediate of `bytes` bytes, whose data is already in place.
    /// `position` (the WQE's 64-bit slot number) tells a repeated call from a new one.
    fn deliver_imm(&self, position: u64, imm: u32, bytes: u32) -> Delivery;

    /// Does the target have a receive queue? Without one, nothing that needs a receive is ever delivered.
    fn receives(&self) -> bool {
        true
    }

    /// Is there room to hand over a part of a SEND?
    ///
    /// # Errors
    /// [`Fault::PeerDead`] when the target is gone, [`Fault::Unsupported`] where messages are not carried.
    fn has_room(&self) -> Result<bool, Fault> {
        Err(Fault::Unsupported)
    }

    /// Hands over the next part of a SEND, at most [`PART`] bytes; parts are answered one by one, in order. `false`: there is no room.
    fn send_part(&self, _part: &Part, _bytes: &[u8]) -> bool {
        false
    }

    /// The next answer to a part, if it is there.
    fn answer(&self) -> Option<Result<(), Fault>> {
        None
    }

    /// Does the oldest part without an answer wait for a receive?
    fn waits_for_receive(&self) -> bool {
        false
    }

    /// The other direction: the peer's next request that has not been [taken](RemoteQp::accept). The same answer until then. Asked once a
    /// round while the local QP has a receive queue; one load unless there is mail.
    fn incoming(&self) -> Option<Incoming>;

    /// Copies out the bytes of the part that [`RemoteQp::incoming`] shows. `false`: the peer's QP is not what it was, and neither may they be.
    fn part_bytes(&self, _out: &mut [u8]) -> bool {
        false
    }

    /// Takes the request that [`RemoteQp::incoming`] shows; it is to be answered.
    fn accept(&self);

    /// The oldest request that was taken was carried out, or refused.
    fn reply(&self, outcome: Result<(), Fault>);

    /// No receive is posted for the incoming request: the peer sees [`Delivery::NoReceive`] until there is one.
    fn no_receive(&self);

    /// The local QP left the ready state: tell the peer that its QP has no target any more.
    fn detach(&self);
}

/// Bytes of a part of a SEND, at most.
pub const PART: usize = crate::shm::CHUNK;

/// A part of a SEND. Parts of one message follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes of the message.
    pub total: u32,
    /// Where the part is in it.
    pub offset: u32,
    /// Bytes of the part.
    pub len: u32,
    /// The message's immediate.
    pub imm: Option<u32>,
}

impl Part {
    /// Does the message end with it?
    pub fn ends(&self) -> bool {
        self.offset.checked_add(self.len) == Some(self.total)
    }
}

/// What a peer asks for that needs a receive here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The end of a WRITE with immediate, whose data is in place.
    Immediate {
        /// The immediate.
        imm: u32,
        /// Bytes that were written.
        bytes: u32,
    },
    /// A part of a SEND.
    Message(Part),
}

/// What became of an immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The target has it.
    Delivered,
    /// Not known yet: ask again with the same position.
    Pending,
    /// No receive was posted: ask again with the same position, for a bounded time.
    NoReceive,
    /// It cannot be delivered.
    Failed(Fault),
}
