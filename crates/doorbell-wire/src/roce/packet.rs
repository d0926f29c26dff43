//! Whole packets, from the base header to the end of the payload.

use core::fmt;

use super::{Aeth, AtomicEth, Bth, Ext, Kind, Opcode, Place, Reth, be32, be64};

/// The longest header: base and atomic.
pub const MAX_HEADER: usize = Bth::LEN + AtomicEth::LEN;

/// Everything in front of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Base header.
    pub bth: Bth,
    /// Extension headers; they have to be those that the opcode calls for.
    pub ext: Ext,
}

impl Header {
    /// Bytes on the wire.
    pub const fn len(&self) -> usize {
        Bth::LEN + self.ext.len()
    }

    /// Never: a header has a base header.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the header to the front of `out` and returns its length; 0 if `out` is too short, nothing is written then.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let len = self.len();
        if out.len() < len {
            return 0;
        }
        out[..Bth::LEN].copy_from_slice(&self.bth.emit());
        let ext = &mut out[Bth::LEN..len];
        match &self.ext {
            Ext::None => {}
            Ext::Reth(reth) => reth.emit(ext),
            Ext::RethImm(reth, imm) => {
                reth.emit(ext);
                ext[Reth::LEN..].copy_from_slice(&imm.to_be_bytes());
            }
            Ext::Imm(imm) => ext.copy_from_slice(&imm.to_be_bytes()),
            Ext::Aeth(aeth) => aeth.emit(ext),
            Ext::AtomicAck(aeth, value) => {
                aeth.emit(ext);
                ext[Aeth::LEN..].copy_from_slice(&value.to_be_bytes());
            }
            Ext::Atomic(atomic) => atomic.emit(ext),
            Ext::Cnp => ext.fill(0),
        }
        len
    }
}

/// A packet that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Base header.
    pub bth: Bth,
    /// Extension headers.
    pub ext: Ext,
    /// What the packet is part of.
    pub kind: Kind,
    /// Where in its message it is.
    pub place: Place,
    /// The payload, without padding.
    pub payload: &'a [u8],
}

/// Why bytes are no packet of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketError {
    /// Shorter than its headers.
    Truncated {
        /// Bytes there.
        len: usize,
        /// Bytes that the headers take.
        need: usize,
    },
    /// A transport header version other than 0.
    Version(u8),
    /// An opcode that is not of RC, UC or CNP.
    Opcode(Opcode),
    /// More padding than payload.
    Padding {
        /// Bytes of padding.
        pad: u8,
        /// Bytes after the headers.
        len: usize,
    },
}

impl fmt::Display for PacketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { len, need } => {
                write!(f, "truncated: {len} bytes, its headers take {need}")
            }
            Self::Version(version) => {
                write!(f, "transport header version {version}, expected 0")
            }
            Self::Opcode(opcode) => {
                write!(
                    f,
                    "{opcode} is not one of RC, UC or congestion notification"
                )
            }
            Self::Padding { pad, len } => {
                write!(f, "{pad} bytes of padding after {len} bytes of payload")
            }
        }
    }
}

impl core::error::Error for PacketError {}

impl<'a> Packet<'a> {
    /// Reads what is between the UDP header and the invariant CRC (both left out).
    ///
    /// Lengths need not be multiples of four: some senders (FPGA sensors) do not pad. Reserved bits are ignored.
    ///
    /// # Errors
    /// See [`PacketError`].
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let Some((base, rest)) = bytes.split_first_chunk::<{ Bth::LEN }>() else {
            return Err(PacketError::Truncated {
                len: bytes.len(),
                need: Bth::LEN,
            });
        };
        let bth = Bth::parse(base);
        if bth.version != 0 {
            return Err(PacketError::Version(bth.version));
        }
        let Some((kind, place, imm)) = bth.opcode.decode() else {
            return Err(PacketError::Opcode(bth.opcode));
        };
        let need = ext_len(kind, place, imm);
        if rest.len() < need {
            return Err(PacketError::Truncated {
                len: bytes.len(),
                need: Bth::LEN + need,
            });
        }
        let (ext, payload) = rest.split_at(need);
        let ext = match need {
            0 => Ext::None,
            Reth::LEN if kind == Kind::Cnp => Ext::Cnp,
            Reth::LEN => Ext::Reth(Reth::parse(ext)),
            20 => Ext::RethImm(Reth::parse(ext), be32(ext, Reth::LEN)),
            4 if imm => Ext::Imm(be32(ext, 0)),
            4 => Ext::Aeth(Aeth::parse(ext)),
            12 => Ext::AtomicAck(Aeth::parse(ext), be64(ext, Aeth::LEN)),
            _ => Ext::Atomic(AtomicEth::parse(ext)),
        };
        let Some(len) = payload.len().checked_sub(usize::from(bth.pad)) else {
            return Err(PacketError::Padding {
                pad: bth.pad,
                len: payload.len(),
            });
        };
        Ok(Self {
            bth,
            ext,
            kind,
            place,
            payload: &payload[..len],
        })
    }

    /// The header, as it would be sent again.
    pub const fn header(&self) -> Header {
        Header {
            bth: self.bth,
            ext: self.ext,
        }
    }
}

/// Bytes of extension headers.
const fn ext_len(kind: Kind, place: Place, imm: bool) -> usize {
    match kind {
        Kind::Send => imm as usize * 4,
        Kind::Write => place.begins() as usize * Reth::LEN + imm as usize * 4,
        Kind::ReadRequest => Reth::LEN,
        Kind::ReadResponse => match place {
            Place::Middle => 0,
            _ => Aeth::LEN,
        },
        Kind::Acknowledge => Aeth::LEN,
        Kind::AtomicAcknowledge => Aeth::LEN + 8,
        Kind::CompareSwap | Kind::FetchAdd => AtomicEth::LEN,
        Kind::Cnp => 16,
    }
}

/// One line for people: `RC WRITE Only -> QP 0x12 PSN 0x000005 ackreq, 8 B to 0x1000 (rkey 0x00000201), 8 B payload`.
impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bth = &self.bth;
        write!(f, "{} -> QP {:#x} PSN {}", bth.opcode, bth.dest_qp, bth.psn)?;
        for (set, name) in [
            (bth.ack_req, " ackreq"),
            (bth.solicited, " solicited"),
            (bth.fecn, " FECN"),
            (bth.becn, " BECN"),
        ] {
            if set {
                f.write_str(name)?;
            }
        }
        match &self.ext {
            Ext::None | Ext::Imm(_) | Ext::Cnp => {}
            Ext::Reth(r) | Ext::RethImm(r, _) => {
                write!(f, ", {} B at {:#x} (rkey {:#010x})", r.len, r.va, r.rkey)?;
            }
            Ext::Atomic(a) => {
                write!(
                    f,
                    ", {:#x} (rkey {:#010x}) operand {:#x}",
                    a.va, a.rkey, a.swap_add
                )?;
                if self.kind == Kind::CompareSwap {
                    write!(f, " if {:#x}", a.compare)?;
                }
            }
            Ext::Aeth(a) | Ext::AtomicAck(a, _) => {
                match a.kind {
                    super::AethKind::Ack { .. } => {}
                    super::AethKind::RnrNak { timer } => {
                        write!(f, " RNR NAK, {} us", super::rnr_timer_ns(timer) / 1000)?;
                    }
                    super::AethKind::Nak(code) => write!(f, " NAK: {code}")?,
                    super::AethKind::Reserved(syndrome) => write!(f, " syndrome {syndrome:#04x}")?,
                }
                write!(f, " MSN {}", a.msn)?;
            }
        }
        if let Ext::AtomicAck(_, value) = self.ext {
            write!(f, ", was {value:#x}")?;
        }
        if let Some(imm) = self.ext.imm() {
            write!(f, ", immediate {imm:#010x}")?;
        }
        if !self.payload.is_empty() {
            write!(f, ", {} B payload", self.payload.len())?;
        }
        Ok(())
    }
}
