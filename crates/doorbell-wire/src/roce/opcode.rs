//! BTH opcodes (volume 1, table 38): the transport in the top three bits, the operation in the low five.

use core::fmt;

/// The transport service of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable Connection.
    Rc,
    /// Unreliable Connection.
    Uc,
}

/// What a packet is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A SEND.
    Send,
    /// An RDMA WRITE.
    Write,
    /// An RDMA READ request.
    ReadRequest,
    /// The answer to a READ.
    ReadResponse,
    /// An acknowledgement or NAK.
    Acknowledge,
    /// The answer to an atomic.
    AtomicAcknowledge,
    /// COMPARE_SWAP.
    CompareSwap,
    /// FETCH_ADD.
    FetchAdd,
    /// A congestion notification (annex A17.9.3).
    Cnp,
}

/// Where in its message a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

impl Place {
    /// Does a message begin here?
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Does a message end here?
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// A BTH opcode; any byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Opcode(pub u8);

/// Operations, without the transport.
mod op {
    pub(super) const SEND_FIRST: u8 = 0x00;
    pub(super) const SEND_MIDDLE: u8 = 0x01;
    pub(super) const SEND_LAST: u8 = 0x02;
    pub(super) const SEND_LAST_IMM: u8 = 0x03;
    pub(super) const SEND_ONLY: u8 = 0x04;
    pub(super) const SEND_ONLY_IMM: u8 = 0x05;
    pub(super) const WRITE_FIRST: u8 = 0x06;
    pub(super) const WRITE_MIDDLE: u8 = 0x07;
    pub(super) const WRITE_LAST: u8 = 0x08;
    pub(super) const WRITE_LAST_IMM: u8 = 0x09;
    pub(super) const WRITE_ONLY: u8 = 0x0a;
    pub(super) const WRITE_ONLY_IMM: u8 = 0x0b;
    pub(super) const READ_REQUEST: u8 = 0x0c;
    pub(super) const READ_FIRST: u8 = 0x0d;
    pub(super) const READ_MIDDLE: u8 = 0x0e;
    pub(super) const READ_LAST: u8 = 0x0f;
    pub(super) const READ_ONLY: u8 = 0x10;
    pub(super) const ACK: u8 = 0x11;
    pub(super) const ATOMIC_ACK: u8 = 0x12;
    pub(super) const COMPARE_SWAP: u8 = 0x13;
    pub(super) const FETCH_ADD: u8 = 0x14;
}

/// Bits 7:5 of Unreliable Connection.
const UC: u8 = 0x20;

impl Opcode {
    /// An acknowledgement of RC.
    pub const ACK: Self = Self(op::ACK);
    /// The answer to an atomic.
    pub const ATOMIC_ACK: Self = Self(op::ATOMIC_ACK);
    /// A READ request.
    pub const READ_REQUEST: Self = Self(op::READ_REQUEST);
    /// COMPARE_SWAP.
    pub const COMPARE_SWAP: Self = Self(op::COMPARE_SWAP);
    /// FETCH_ADD.
    pub const FETCH_ADD: Self = Self(op::FETCH_ADD);
    /// A congestion notification packet.
    pub const CNP: Self = Self(0x81);

    /// A SEND packet.
    pub const fn send(transport: Transport, place: Place, imm: bool) -> Self {
        let op = match (place, imm) {
            (Place::First, _) => op::SEND_FIRST,
            (Place::Middle, _) => op::SEND_MIDDLE,
            (Place::Last, false) => op::SEND_LAST,
            (Place::Last, true) => op::SEND_LAST_IMM,
            (Place::Only, false) => op::SEND_ONLY,
            (Place::Only, true) => op::SEND_ONLY_IMM,
        };
        Self(op | Self::bits(transport))
    }

    /// A WRITE packet.
    pub const fn write(transport: Transport, place: Place, imm: bool) -> Self {
        let op = match (place, imm) {
            (Place::First, _) => op::WRITE_FIRST,
            (Place::Middle, _) => op::WRITE_MIDDLE,
            (Place::Last, false) => op::WRITE_LAST,
            (Place::Last, true) => op::WRITE_LAST_IMM,
            (Place::Only, false) => op::WRITE_ONLY,
            (Place::Only, true) => op::WRITE_ONLY_IMM,
        };
        Self(op | Self::bits(transport))
    }

    /// A packet of the answer to a READ.
    pub const fn read_response(place: Place) -> Self {
        Self(match place {
            Place::First => op::READ_FIRST,
            Place::Middle => op::READ_MIDDLE,
            Place::Last => op::READ_LAST,
            Place::Only => op::READ_ONLY,
        })
    }

    const fn bits(transport: Transport) -> u8 {
        match transport {
            Transport::Rc => 0,
            Transport::Uc => UC,
        }
    }

    /// The transport; `None` for those that are not spoken here (RD, UD, XRC, manufacturer's) and for CNP.
    pub const fn transport(self) -> Option<Transport> {
        match self.0 & 0xe0 {
            0 if (self.0 & 0x1f) <= op::FETCH_ADD => Some(Transport::Rc),
            UC if (self.0 & 0x1f) <= op::WRITE_ONLY_IMM => Some(Transport::Uc),
            _ => None,
        }
    }

    /// What it is part of, its place in the message, and whether it carries an immediate. `None` if not spoken here.
    pub const fn decode(self) -> Option<(Kind, Place, bool)> {
        if self.0 == Self::CNP.0 {
            return Some((Kind::Cnp, Place::Only, false));
        }
        if self.transport().is_none() {
            return None;
        }
        Some(match self.0 & 0x1f {
            op::SEND_FIRST => (Kind::Send, Place::First, false),
            op::SEND_MIDDLE => (Kind::Send, Place::Middle, false),
            op::SEND_LAST => (Kind::Send, Place::Last, false),
            op::SEND_LAST_IMM => (Kind::Send, Place::Last, true),
            op::SEND_ONLY => (Kind::Send, Place::Only, false),
            op::SEND_ONLY_IMM => (Kind::Send, Place::Only, true),
            op::WRITE_FIRST => (Kind::Write, Place::First, false),
            op::WRITE_MIDDLE => (Kind::Write, Place::Middle, false),
            op::WRITE_LAST => (Kind::Write, Place::Last, false),
            op::WRITE_LAST_IMM => (Kind::Write, Place::Last, true),
            op::WRITE_ONLY => (Kind::Write, Place::Only, false),
            op::WRITE_ONLY_IMM => (Kind::Write, Place::Only, true),
            op::READ_REQUEST => (Kind::ReadRequest, Place::Only, false),
            op::READ_FIRST => (Kind::ReadResponse, Place::First, false),
            op::READ_MIDDLE => (Kind::ReadResponse, Place::Middle, false),
            op::READ_LAST => (Kind::ReadResponse, Place::Last, false),
            op::READ_ONLY => (Kind::ReadResponse, Place::Only, false),
            op::ACK => (Kind::Acknowledge, Place::Only, false),
            op::ATOMIC_ACK => (Kind::AtomicAcknowledge, Place::Only, false),
            op::COMPARE_SWAP => (Kind::CompareSwap, Place::Only, false),
            _ => (Kind::FetchAdd, Place::Only, false),
        })
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((kind, place, imm)) = self.decode() else {
            return write!(f, "opcode {:#04x}", self.0);
        };
        let transport = match self.transport() {
            Some(Transport::Rc) => "RC ",
            Some(Transport::Uc) => "UC ",
            None => "",
        };
        let name = match kind {
            Kind::Send => "SEND",
            Kind::Write => "WRITE",
            Kind::ReadRequest => "READ request",
            Kind::ReadResponse => "READ response",
            Kind::Acknowledge => "ACK",
            Kind::AtomicAcknowledge => "ATOMIC ACK",
            Kind::CompareSwap => "COMPARE_SWAP",
            Kind::FetchAdd => "FETCH_ADD",
            Kind::Cnp => "CNP",
        };
        write!(f, "{transport}{name}")?;
        if matches!(kind, Kind::Send | Kind::Write | Kind::ReadResponse) {
            write!(f, " {place:?}")?;
        }
        if imm {
            f.write_str(" with immediate")?;
        }
        Ok(())
    }
}
