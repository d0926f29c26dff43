//! What the queue pairs of a port have under way towards the same peer: all their packets go to one socket there (and what READs bring, to ours), and
//! what its buffer takes is theirs together. One alone may have all of it.

use std::net::SocketAddr;

/// A port that queue pairs send to.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// Queue pairs that are connected to it.
    links: u32,
    /// Of these, those that have messages.
    sending: u64,
    /// Bytes under way.
    bytes: u64,
}

/// A queue pair's part.
#[derive(Clone, Copy, Debug)]
struct Part {
    peer: usize,
    sending: bool,
    bytes: u64,
}

/// The parts of all queue pairs of a port.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// A place without links may be taken by another peer.
    peers: Vec<Peer>,
    /// By slot.
    parts: Vec<Option<Part>>,
}

impl Shares {
    /// The queue pair in `slot` sends to `address` from now on.
    pub(super) fn add(&mut self, slot: u32, address: SocketAddr) {
        self.forget(slot);
        let known = self.peers.iter().position(|p| p.address == address);
        let peer = known
            .or_else(|| self.peers.iter().position(|p| p.links == 0))
            .unwrap_or(self.peers.len());
        if peer == self.peers.len() {
            self.peers.push(Peer {
                address,
                links: 0,
                sending: 0,
                bytes: 0,
            });
        }
        self.peers[peer].address = address;
        self.peers[peer].links += 1;
        let at = slot as usize;
        if self.parts.len() <= at {
            self.parts.resize(at + 1, None);
        }
        self.parts[at] = Some(Part {
            peer,
            sending: false,
            bytes: 0,
        });
    }

    /// It sends no more.
    pub(super) fn forget(&mut self, slot: u32) {
        self.set(slot, false, 0);
        if let Some(part) = self.parts.get_mut(slot as usize).and_then(Option::take) {
            self.peers[part.peer].links -= 1;
        }
    }

    /// How many queue pairs have messages for the peer of this one, and what the others have under way; `None`: it has none and never mind.
    #[inline]
    pub(super) fn of(&mut self, slot: u32, sending: bool) -> Option<(u64, u64)> {
        let part = self.parts.get(slot as usize).copied().flatten()?;
        if !sending {
            return None;
        }
        if !part.sending {
            self.set(slot, true, part.bytes);
        }
        let peer = &self.peers[part.peer];
        Some((peer.sending, peer.bytes - part.bytes))
    }

    /// Whether it has messages, and what is under way of them.
    #[inline]
    pub(super) fn set(&mut self, slot: u32, sending: bool, bytes: u64) {
        let Some(Some(part)) = self.parts.get_mut(slot as usize) else {
            return;
        };
        let peer = &mut self.peers[part.peer];
        peer.sending = peer.sending - u64::from(part.sending) + u64::from(sending);
        peer.bytes = peer.bytes - part.bytes + bytes;
        (part.sending, part.bytes) = (sending, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 9, 0, n], 4791))
    }

    #[test]
    fn those_that_send_to_one_peer_know_of_each_other() {
        let mut shares = Shares::default();
        for slot in 0..4 {
            shares.add(slot, peer(1));
        }
        shares.add(7, peer(2));
        assert_eq!(shares.of(0, true), Some((1, 0)), "one alone");
        shares.set(0, true, 1000);
        assert_eq!(shares.of(1, true), Some((2, 1000)));
        assert_eq!(shares.of(2, false), None, "it has nothing to send");
        assert_eq!(shares.of(7, true), Some((1, 0)), "another peer");
        shares.set(1, true, 300);
        assert_eq!(shares.of(0, true), Some((2, 300)));
        shares.set(0, false, 0);
        assert_eq!(shares.of(1, true), Some((1, 0)));
        shares.forget(1);
        assert_eq!(shares.of(1, true), None);
        assert_eq!(shares.of(3, true), Some((1, 0)));
        for slot in [0, 2, 3, 7] {
            shares.forget(slot);
            shares.forget(slot);
        }
        assert!(
            shares
                .peers
                .iter()
                .all(|p| (p.links, p.sending, p.bytes) == (0, 0, 0))
        );
        shares.add(3, peer(9));
        assert_eq!(shares.peers.len(), 2, "places are used again");
    }
}
