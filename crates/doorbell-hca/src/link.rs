//! Where work requests go: the seam between the front end and whatever reaches the target.
//! A memory destination (loopback, shared memory of one host) *resolves* keys to addresses, and one copy path serves all of them;
//! a resolution is cached by the QP, so this seam is crossed only when a key changes. A packet destination has an engine of its own (`engine::roce`).

use core::fmt;
use std::sync::Arc;

use doorbell_wire::{Key, Qpn};

use crate::fault::Fault;
use crate::mem::{Access, Span};
use crate::roce::RoceTarget;
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

    /// The other direction: a WRITE with immediate of the peer, whose data is in place, waits for a receive of the local QP. The same
    /// answer until [`RemoteQp::reply`]. Asked once a round while the local QP has a receive queue; one load unless there is mail.
    fn incoming(&self) -> Option<Incoming>;

    /// The incoming request was carried out, or refused.
    fn reply(&self, outcome: Result<(), Fault>);

    /// No receive is posted for the incoming request: the peer sees [`Delivery::NoReceive`] until there is one.
    fn no_receive(&self);

    /// The local QP left the ready state: tell the peer that its QP has no target any more.
    fn detach(&self);
}

/// A peer's WRITE with immediate that needs a receive here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// The immediate.
    pub imm: u32,
    /// Bytes that were written.
    pub bytes: u32,
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
