//! Packets that arrived, in a batch that owns its buffers.

use std::net::{IpAddr, SocketAddr};

/// How sure it is that a packet is undamaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// The ICRC fits, with every covered field known.
    Exact,
    /// The ICRC fits one IPv4 identification, which the port could not see: 16 bits of the check are used up by that.
    Explained,
}

/// Packets that arrived.
#[derive(Debug)]
pub struct RecvBatch {
    pub(crate) arena: Box<[u8]>,
    pub(crate) slot: usize,
    pub(crate) slots: usize,
    /// Packets that were copied in by a wrapper.
    copied: Vec<u8>,
    items: Vec<Item>,
    origins: Vec<Origin>,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    at: u32,
    len: u16,
    id: u16,
    origin: u16,
    check: Check,
    copied: bool,
}

/// Where packets came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) src: SocketAddr,
    pub(crate) dst: IpAddr,
    pub(crate) tos: u8,
}

/// A packet that arrived undamaged.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Who sent it.
    pub src: SocketAddr,
    /// The address of ours that it was sent to.
    pub dst: IpAddr,
    /// Type of service or traffic class; the lower two bits are ECN.
    pub tos: u8,
    /// IPv4 identification, seen or found; 0 for IPv6.
    pub id: u16,
    /// How sure it is that it is undamaged.
    pub check: Check,
    /// Base header to padding.
    pub bytes: &'a [u8],
}

impl RecvBatch {
    /// `slots` buffers of `slot` bytes. Use [`Port::recv_batch`](crate::Port::recv_batch).
    pub fn new(slot: usize, slots: usize) -> Self {
        Self {
            arena: vec![0; slot * slots].into_boxed_slice(),
            slot,
            slots,
            copied: Vec::new(),
            items: Vec::with_capacity(1024),
            origins: Vec::with_capacity(slots),
        }
    }

    /// Packets in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Nothing in it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The packets.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = Received<'_>> {
        self.items.iter().map(|item| {
            let origin = &self.origins[usize::from(item.origin)];
            let from = if item.copied {
                &self.copied[..]
            } else {
                &self.arena[..]
            };
            Received {
                src: origin.src,
                dst: origin.dst,
                tos: origin.tos,
                id: item.id,
                check: item.check,
                bytes: &from[item.at as usize..][..usize::from(item.len)],
            }
        })
    }

    /// Forgets the packets.
    #[inline]
    pub fn clear(&mut self) {
        self.items.clear();
        self.origins.clear();
        self.copied.clear();
    }

    /// The packets that follow came from here.
    #[inline]
    pub(crate) fn origin(&mut self, origin: Origin) {
        if self.origins.last() != Some(&origin) {
            self.origins.push(origin);
        }
    }

    /// A packet of `len` bytes that lies at `at` of the arena.
    #[inline]
    pub(crate) fn add(&mut self, at: usize, len: usize, id: u16, check: Check) {
        self.items.push(Item {
            at: at as u32,
            len: len as u16,
            id,
            origin: (self.origins.len() - 1) as u16,
            check,
            copied: false,
        });
    }

    /// Copies a packet in. `false`: too many origins.
    pub(crate) fn copy_in(&mut self, packet: &Received<'_>) -> bool {
        if self.origins.len() >= usize::from(u16::MAX) {
            return false;
        }
        self.origin(Origin {
            src: packet.src,
            dst: packet.dst,
            tos: packet.tos,
        });
        let at = self.copied.len();
        self.copied.extend_from_slice(packet.bytes);
        self.items.push(Item {
            at: at as u32,
            len: packet.bytes.len() as u16,
            id: packet.id,
            origin: (self.origins.len() - 1) as u16,
            check: packet.check,
            copied: true,
        });
        true
    }
}
