//! The base transport header (volume 1, 9.2): 12 bytes in front of every packet.

use super::{DEFAULT_PKEY, Opcode, Psn, be16, be32};

/// The base transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// What the packet is.
    pub opcode: Opcode,
    /// SE: the receiver is asked to raise an event.
    pub solicited: bool,
    /// MigReq. Hardware sets it, Linux rxe does not; nobody here depends on it.
    pub migreq: bool,
    /// Bytes of padding at the end of the payload, 0 to 3.
    pub pad: u8,
    /// Transport header version: 0.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion bit. Outside the CRC.
    pub fecn: bool,
    /// Backward congestion bit; set in a CNP. Outside the CRC.
    pub becn: bool,
    /// Destination QP number, 24 bits.
    pub dest_qp: u32,
    /// AckReq: an acknowledgement is asked for.
    pub ack_req: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes of the header.
    pub const LEN: usize = 12;

    /// A header with the fields that most packets have: no padding, default partition, no events.
    pub const fn new(opcode: Opcode, dest_qp: u32, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migreq: true,
            pad: 0,
            version: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp: dest_qp & 0xff_ffff,
            ack_req: false,
            psn,
        }
    }

    /// Reads the header; the six reserved bits beside FECN and BECN, and the seven beside AckReq, are ignored.
    #[inline]
    pub fn parse(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            opcode: Opcode(bytes[0]),
            solicited: bytes[1] & 0x80 != 0,
            migreq: bytes[1] & 0x40 != 0,
            pad: bytes[1] >> 4 & 3,
            version: bytes[1] & 0xf,
            pkey: be16(bytes, 2),
            fecn: bytes[4] & 0x80 != 0,
            becn: bytes[4] & 0x40 != 0,
            dest_qp: be32(bytes, 4) & 0xff_ffff,
            ack_req: bytes[8] & 0x80 != 0,
            psn: Psn::new(be32(bytes, 8)),
        }
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = self.opcode.0;
        out[1] = u8::from(self.solicited) << 7
            | u8::from(self.migreq) << 6
            | (self.pad & 3) << 4
            | self.version & 0xf;
        out[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        let congestion = u32::from(self.fecn) << 31 | u32::from(self.becn) << 30;
        out[4..8].copy_from_slice(&(congestion | self.dest_qp & 0xff_ffff).to_be_bytes());
        out[8..].copy_from_slice(&(u32::from(self.ack_req) << 31 | self.psn.get()).to_be_bytes());
        out
    }

    /// The destination QP of a packet, without reading the rest. `None` if it is too short.
    #[inline]
    pub fn peek_dest_qp(packet: &[u8]) -> Option<u32> {
        (packet.len() >= Self::LEN).then(|| be32(packet, 4) & 0xff_ffff)
    }
}
