//! A second socket, connected to a peer on this host that takes light packets.
//!
//! A connected socket spares the kernel the search for the way and both sides of the call the addresses: half of what a small packet costs
//! there. It cannot be had for peers elsewhere, because the kernel counts the IPv4 identifications that a connected socket sends, and the ICRC covers
//! them; light packets are covered as if they had 0 ([`Port::accepts_light`](crate::Port::accepts_light)).
//!
//! It has the address and UDP port of the port's own socket, so peers notice nothing. The kernel prefers it for what comes from the peer, and gives it
//! nothing else: everybody's packets but the peer's still come to the port's own socket, which is looked at less often while nothing comes
//! there.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::setup;
use crate::path::Path;
use crate::sys;

/// Looks at this socket between two at the port's own, at most.
const REST: u32 = 16;
/// Datagrams that one receive call takes, at most.
const MOST: usize = 4;

/// The socket and its peer.
#[derive(Debug)]
pub(super) struct Near {
    socket: UdpSocket,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    /// Looks at it since the last one at the port's own socket, and how many it may be.
    looks: u32,
    rest: u32,
    /// Calls in a row that found something.
    streak: usize,
}

impl Near {
    /// Opens it beside `own`, the port's own socket.
    pub(super) fn open(own: &UdpSocket, path: &Path, buffer: usize) -> io::Result<Self> {
        // Two sockets may have one address if both say so when the second is bound; nobody else shall have it later.
        reusable(own.as_fd(), true)?;
        let opened = connected(path.local(), path.peer(), buffer);
        reusable(own.as_fd(), false)?;
        let socket = opened?;
        reusable(socket.as_fd(), false)?;
        // What came before it was connected may be anybody's. Its senders will repeat it.
        while sys::receive_one(socket.as_fd(), &mut [0; 64]).is_ok() {}
        Ok(Self {
            socket,
            local: path.local(),
            peer: path.peer(),
            looks: 0,
            rest: 1,
            streak: 0,
        })
    }

    /// Does this path lead to its peer?
    #[inline]
    pub(super) fn serves(&self, path: &Path) -> bool {
        path.light && path.peer == self.peer
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Is it the turn of the port's own socket?
    #[inline]
    pub(super) fn rests(&mut self) -> bool {
        self.looks += 1;
        if self.looks <= self.rest {
            return false;
        }
        self.looks = 0;
        true
    }

    /// The port's own socket had something, or not.
    pub(super) fn other_found(&mut self, something: bool) {
        self.rest = match something {
            true => 1,
            false => (self.rest * 2).min(REST),
        };
    }

    /// Datagrams to ask for: one more than the calls before this one found, since a lone packet is the case where latency counts.
    #[inline]
    pub(super) fn ask(&self) -> usize {
        (1 + self.streak).min(MOST)
    }

    #[inline]
    pub(super) fn found(&mut self, something: bool) {
        self.streak = if something { self.streak + 1 } else { 0 };
    }

    /// Datagrams dropped for want of room.
    pub(super) fn overruns(&self) -> u64 {
        sys::drops(self.socket.as_fd()).unwrap_or(0)
    }
}

fn reusable(socket: BorrowedFd<'_>, yes: bool) -> io::Result<()> {
    sys::set_option(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, yes.into())
}

fn connected(local: SocketAddr, peer: SocketAddr, buffer: usize) -> io::Result<UdpSocket> {
    let family = if local.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    setup::unfragmented(fd.as_fd(), local.is_ipv4())?;
    setup::buffers(fd.as_fd(), buffer);
    reusable(fd.as_fd(), true)?;
    rustix::net::bind(&fd, &local)?;
    rustix::net::connect(&fd, &peer)?;
    Ok(UdpSocket::from(fd))
}
