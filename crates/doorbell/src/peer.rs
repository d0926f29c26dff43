//! Two processes of one host, over shared memory.
//!
//! One listens ([`Device::listen`]), the other dials ([`Device::dial`]); what comes of it is a [`Peer`] on either side. Over
//! it they exchange [`Endpoint`]s, connect queue pairs, and talk in small messages. Memory that a peer is to reach without
//! help is [`Place::Shared`](crate::Place::Shared). When a peer dies, queue pairs connected to it fail with `PEER_DEAD`.

use std::fmt;
use std::time::{Duration, Instant};

use doorbell_hca::shm;

use crate::connect::Destination;
use crate::device::Device;
use crate::endpoint::{Endpoint, LinkKind, pack_endpoints, unpack_endpoints};
use crate::provider::soft::Soft;
use crate::{Error, Pd, Result};

/// Most bytes of one [`Peer::exchange`].
const MAX_EXCHANGE: usize = 16 << 20;

fn soft(device: &Device) -> Result<&Soft> {
    device.gpu().check_process()?;
    device.soft().ok_or(Error::Unsupported {
        what: "the shared memory link without the software HCA",
        remedy: "open the device with the soft provider",
    })
}

impl Device {
    /// Listens for processes of this host: a socket path, or `@name` in the abstract name space. Only the same user may dial.
    pub fn listen(&self, address: &str) -> Result<Listener> {
        listen(self, address, None)
    }

    /// Connects to a listener; waits for it to appear.
    pub fn dial(&self, address: &str, timeout: Duration) -> Result<Peer> {
        self.dial_while(address, timeout, &mut || true)
    }

    /// As [`Device::dial`], as long as `goes_on` says so: it is asked all the time, and ends the waiting as the time-out does.
    pub fn dial_while(
        &self,
        address: &str,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Peer> {
        dial(self, address, None, timeout, goes_on)
    }
}

/// Peers whose queue pairs are all of one protection domain. They are not told of memory of other domains, which their keys do not reach:
/// so nobody waits for them when such memory is registered or deregistered, even while they stand still.
impl Pd {
    /// As [`Device::listen`].
    pub fn listen(&self, address: &str) -> Result<Listener> {
        listen(&self.device(), address, Some(self.number()))
    }

    /// As [`Device::dial_while`].
    pub fn dial_while(
        &self,
        address: &str,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Peer> {
        let pd = Some(self.number());
        dial(&self.device(), address, pd, timeout, goes_on)
    }
}

/// For peers that hear of the memory of one protection domain, or of all.
fn listen(device: &Device, address: &str, pd: Option<u32>) -> Result<Listener> {
    let address: shm::ShmAddress = address.parse()?;
    Ok(Listener {
        inner: soft(device)?.shm().listen_for(&address, pd)?,
    })
}

fn dial(
    device: &Device,
    address: &str,
    pd: Option<u32>,
    timeout: Duration,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<Peer> {
    let address: shm::ShmAddress = address.parse()?;
    let shm = soft(device)?.shm();
    Ok(Peer {
        inner: shm.connect_while(&address, pd, timeout, goes_on)?,
    })
}

/// Waits for processes to dial. Dropping it stops that; peers stay.
pub struct Listener {
    inner: shm::ShmListener,
}

impl Listener {
    /// What became of the process that dialled last, if it could not be accepted: no memory, no files, another user's.
    pub fn trouble(&self) -> Option<String> {
        self.inner.trouble()
    }

    /// The next process whose handshake is complete.
    pub fn accept(&self, timeout: Duration) -> Result<Peer> {
        Ok(Peer {
            inner: self.inner.accept(timeout)?,
        })
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Another process of this host. Clones name the same session, which ends when the last one, and the last queue pair
/// connected over it, is gone.
#[derive(Clone)]
pub struct Peer {
    inner: shm::Peer,
}

impl Peer {
    /// Its number in this process, as [`crate::AsyncError::PeerDown`] names it.
    pub fn id(&self) -> u64 {
        u64::from(self.inner.id().0)
    }

    /// Its process and user, as the kernel recorded them.
    pub fn credentials(&self) -> shm::Credentials {
        self.inner.credentials()
    }

    /// Why the session is over, if it is.
    pub fn gone(&self) -> Option<shm::Gone> {
        self.inner.gone()
    }

    /// Sends one message, at most [`shm::MAX_APP`] bytes.
    pub fn send(&self, message: &[u8], timeout: Duration) -> Result<()> {
        Ok(self.inner.send(message, timeout)?)
    }

    /// Takes the next message.
    pub fn recv(&self, timeout: Duration) -> Result<Vec<u8>> {
        Ok(self.inner.recv(timeout)?)
    }

    /// Both sides give bytes and get the other's, at most 16 MiB. Both must call it, in the same order as other messages.
    pub fn exchange(&self, mine: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let deadline = doorbell_hca::deadline(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        if mine.len() > MAX_EXCHANGE {
            return Err(Error::Argument {
                object: "exchange with a peer",
                value: format!("{} bytes", mine.len()),
                remedy: "exchange at most 16 MiB",
            });
        }
        self.send(&(mine.len() as u64).to_le_bytes(), left())?;
        let head = self.recv(left())?;
        let theirs = <[u8; 8]>::try_from(head.as_slice())
            .map(u64::from_le_bytes)
            .ok();
        let Some(theirs) = theirs
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_EXCHANGE)
        else {
            return Err(Error::Argument {
                object: "exchange with a peer",
                value: format!("a first message of {} bytes", head.len()),
                remedy: "both sides must call exchange at the same point",
            });
        };
        // Piece by piece and in turn: neither side's window of unread messages fills up while both are sending.
        let mut got = Vec::new();
        let mut pieces = mine.chunks(shm::MAX_APP);
        loop {
            let piece = pieces.next();
            if let Some(piece) = piece {
                self.send(piece, left())?;
            }
            if got.len() < theirs {
                got.extend_from_slice(&self.recv(left())?);
            } else if piece.is_none() {
                break;
            }
        }
        got.truncate(theirs);
        Ok(got)
    }

    /// Both sides give descriptions of their queue pairs and memory and get the other's.
    pub fn exchange_endpoints(
        &self,
        mine: &[Endpoint],
        timeout: Duration,
    ) -> Result<Vec<Endpoint>> {
        let theirs = self.exchange(&pack_endpoints(mine), timeout)?;
        Ok(unpack_endpoints(&theirs)?)
    }

    /// Returns when both sides have called it.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        self.exchange(&[], timeout).map(|_| ())
    }

    /// The queue pair that the peer described, as something to connect to.
    pub fn destination(&self, endpoint: &Endpoint) -> Result<Destination> {
        match endpoint.link {
            LinkKind::Shm => Ok(Destination::Shm {
                peer: self.clone(),
                qpn: endpoint.qpn,
            }),
            other => Err(Error::Argument {
                object: "link of the peer's queue pair",
                value: format!("{other:?}"),
                remedy: "describe it with LinkKind::Shm",
            }),
        }
    }

    /// Ends the session in an orderly way: returns when nothing of the peer is mapped here and it has let go of what is ours.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        Ok(self.inner.close(timeout)?)
    }

    pub(crate) fn session(&self) -> &shm::Peer {
        &self.inner
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
