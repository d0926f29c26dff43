//! The shared memory link between processes of one host.
//!
//! [`Shm`] belongs to one HCA: it listens and connects over Unix sockets, sends peers the sealed memfds of what is
//! registered, maps what they send, and takes everything back in order. One background thread serves all
//! sessions. The data path ([`ShmLink`]) takes no lock and makes no system call: the initiator's engine checks the
//! target's key table and copies straight into the mapped region. By default peers are trusted with the memory they
//! were sent (both processes map it); what is checked is everything that could harm the process that reads it.

#[cfg(not(miri))]
mod attach;
mod control;
mod error;
mod export;
mod handle;
mod link;
mod live;
mod mailbox;
mod peer;
mod proto;
pub(crate) mod region;
mod session;
mod socket;
#[cfg(all(test, not(miri)))]
mod tests;
mod thread;

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

#[cfg(not(miri))]
pub use attach::DeviceImporter;
pub use control::Shm;
pub use error::{Gone, Refusal, RefusalCode, Result, ShmError};
pub use handle::{Peer, PeerId, ShmListener};
pub use link::ShmLink;
pub(crate) use mailbox::CHUNK;
pub use mailbox::SlotQp;
pub use peer::{DeviceRegion, PeerView};
pub use proto::{MAGIC, MAX_APP, MAX_HANDLE, VERSION};
pub use region::{RegionOptions, SharedRegion};
pub use socket::{Credentials, ShmAddress};

/// What the link asks of the HCA it belongs to. No method may block.
pub trait Hooks: Send + Sync {
    /// Begins a grace period: see [`Hooks::grace_passed`].
    fn grace_begin(&self) -> u64;

    /// Has every engine core finished what it had looked up before the period began, copies under way included?
    fn grace_passed(&self, epoch: u64) -> bool;

    /// The peer is gone: QPs connected to it go to error. Engines act on it before they acknowledge the next grace period.
    fn peer_down(&self, peer: PeerId, why: &Gone);

    /// Imports device memory of a peer ([`crate::dma::Dma::export`] made the handle).
    ///
    /// # Errors
    /// Text for the user: keys of that region cannot be used from this process.
    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String> {
        let _ = (handle, fd, len);
        Err("this process imports no device memory".into())
    }
}

/// Which users may be peers.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Trust {
    /// The user of this process, and root.
    #[default]
    SameUser,
    /// These users, and no other.
    Users(Vec<u32>),
    /// Everyone who can reach the socket.
    Anyone,
}

impl Trust {
    fn admits(&self, uid: u32) -> bool {
        match self {
            Self::SameUser => uid == 0 || uid == rustix::process::geteuid().as_raw(),
            Self::Users(users) => users.contains(&uid),
            Self::Anyone => true,
        }
    }
}

/// Times and limits of the link.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// From the connection to the exchange of all regions.
    pub handshake: Duration,
    /// For each later step of a peer: mapping a region, letting go of one, reading its messages. So long may it stand still.
    pub step: Duration,
    /// For saying goodbye, whatever a peer may take for its steps.
    pub parting: Duration,
    /// Each session has room for `2^slot_bits` QPs a side (a kilobyte each, of memory that is used only when touched).
    pub slot_bits: u32,
    /// Who may connect.
    pub trust: Trust,
    /// Sessions at a time.
    pub max_sessions: usize,
    /// Sessions at a time whose handshake is under way.
    pub max_handshakes: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            step: Duration::from_secs(5),
            parting: Duration::from_secs(5),
            slot_bits: 12,
            trust: Trust::default(),
            max_sessions: 1024,
            max_handshakes: 64,
        }
    }
}

/// The memory of the HCA's own key table, which peers map read-only.
#[derive(Clone, Debug)]
pub struct TableExport {
    /// The sealed memfd.
    pub fd: Arc<OwnedFd>,
    /// Its bytes.
    pub len: u64,
}
