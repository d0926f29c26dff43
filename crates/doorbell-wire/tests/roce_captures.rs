//! Packets that other implementations put on the wire: each decodes, its CRC is right, and it is emitted again byte for byte.

use doorbell_wire::roce::icrc::{self, IdSolver, Ip};
use doorbell_wire::roce::net::{ETHERTYPE_IPV4, Ethernet, Ipv4, PROTOCOL_UDP, Udp};
use doorbell_wire::roce::{
    AethKind, Header, ICRC_LEN, Kind, NakCode, Opcode, Packet, Place, Psn, Transport,
};

struct Captured {
    ip: Ipv4,
    udp: Udp,
    /// From the base header to the padding.
    transport: Vec<u8>,
    crc: u32,
}

fn frames(pcap: &[u8]) -> Vec<&[u8]> {
    assert_eq!(pcap[..4], 0xa1b2_c3d4_u32.to_le_bytes(), "a classic pcap");
    let mut rest = &pcap[24..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().expect("4 bytes")) as usize;
        frames.push(&rest[16..16 + len]);
        rest = &rest[16 + len..];
    }
    frames
}

/// The RoCE packets of a capture; everything else is left out.
fn packets(pcap: &[u8]) -> Vec<Captured> {
    frames(pcap)
        .into_iter()
        .filter_map(|frame| {
            let (ethernet, rest) = Ethernet::parse(frame)?;
            if ethernet.ethertype != ETHERTYPE_IPV4 {
                return None;
            }
            assert_eq!(ethernet.emit(), frame[..Ethernet::LEN]);
            let (ip, rest) = Ipv4::parse(rest)?;
            let (udp, rest) = Udp::parse(rest)?;
            if ip.protocol != PROTOCOL_UDP || udp.dst != doorbell_wire::roce::PORT {
                return None;
            }
            let (transport, crc) = rest.split_at(rest.len() - ICRC_LEN);
            Some(Captured {
                ip,
                udp,
                transport: transport.to_vec(),
                crc: u32::from_le_bytes(crc.try_into().expect("4 bytes")),
            })
        })
        .collect()
}

impl Captured {
    fn computed(&self) -> u32 {
        icrc::compute(
            &Ip::V4(self.ip),
            self.udp.src,
            self.udp.dst,
            &self.transport,
        )
    }
}

const RXE: &[u8] = include_bytes!("fixtures/rxe.pcap");
const HSB_EMBEDDED: &[u8] = include_bytes!("fixtures/hsb_embedded_3000B.pcap");
const HSB_SEPARATE: &[u8] = include_bytes!("fixtures/hsb_separate_metadata_30B.pcap");

#[test]
fn every_captured_packet_decodes_and_its_crc_is_right() {
    for (name, pcap, at_least) in [
        ("rxe", RXE, 89),
        ("hsb embedded", HSB_EMBEDDED, 10),
        ("hsb separate", HSB_SEPARATE, 8),
    ] {
        let packets = packets(pcap);
        assert!(packets.len() >= at_least, "{name}: {}", packets.len());
        for (n, captured) in packets.iter().enumerate() {
            assert_eq!(captured.computed(), captured.crc, "{name} packet {n}");
            let packet = Packet::parse(&captured.transport)
                .unwrap_or_else(|e| panic!("{name} packet {n}: {e}"));
            let mut again = [0; doorbell_wire::roce::MAX_HEADER];
            let header = packet.header();
            let len = header.emit(&mut again);
            // The sensor sets the reserved bits beside FECN and BECN.
            again[4] |= captured.transport[4] & 0x3f;
            assert_eq!(
                again[..len],
                captured.transport[..len],
                "{name} packet {n}: {packet}"
            );
            assert_eq!(
                len + packet.payload.len() + usize::from(packet.bth.pad),
                captured.transport.len()
            );
        }
    }
}

#[test]
fn damage_is_seen() {
    for captured in packets(RXE).iter().step_by(7) {
        for bit in 0..captured.transport.len() * 8 {
            // The byte with the congestion bits is outside the CRC, on purpose.
            if bit / 8 == 4 {
                continue;
            }
            let mut transport = captured.transport.clone();
            transport[bit / 8] ^= 1 << (bit % 8);
            let crc = icrc::compute(
                &Ip::V4(captured.ip),
                captured.udp.src,
                captured.udp.dst,
                &transport,
            );
            assert_ne!(crc, captured.crc, "bit {bit}");
        }
    }
}

#[test]
fn an_identification_that_a_socket_hides_is_found() {
    for captured in packets(RXE) {
        assert_ne!(captured.ip.id, 0);
        let hidden = Ipv4 {
            id: 0,
            ..captured.ip
        };
        let zero = icrc::compute(
            &Ip::V4(hidden),
            captured.udp.src,
            captured.udp.dst,
            &captured.transport,
        );
        let solver = IdSolver::new(captured.transport.len());
        assert_eq!(solver.solve(captured.crc, zero), Some(captured.ip.id));
    }
}

#[test]
fn the_sequence_of_the_soft_roce_guest_is_what_it_was() {
    let packets = packets(RXE);
    let parsed: Vec<Packet<'_>> = packets
        .iter()
        .map(|p| Packet::parse(&p.transport).expect("decodes"))
        .collect();
    let first = parsed[0];
    assert_eq!((first.kind, first.place), (Kind::Write, Place::Only));
    assert_eq!(first.bth.psn, Psn::new(0xff_fffa));
    assert!(first.bth.ack_req && !first.bth.migreq);
    let reth = first.ext.reth().expect("a WRITE has one");
    assert_eq!((reth.rkey, reth.len), (0x2a0, 8));
    assert_eq!(first.payload.len(), 8);
    assert_eq!(
        first.to_string(),
        format!(
            "RC WRITE Only -> QP 0x11 PSN 0xfffffa ackreq, 8 B at {:#x} (rkey 0x000002a0), 8 B payload",
            reth.va
        )
    );
    // 5 bytes inline, 3 of padding.
    assert_eq!((parsed[4].bth.pad, parsed[4].payload.len()), (3, 5));
    let count = |kind, place| {
        parsed
            .iter()
            .filter(|p| (p.kind, p.place) == (kind, place))
            .count()
    };
    assert_eq!(count(Kind::Write, Place::Middle), 15 + 1);
    assert_eq!(count(Kind::AtomicAcknowledge, Place::Only), 3);
    assert_eq!(
        parsed
            .iter()
            .filter(|p| p.bth.opcode.transport() == Some(Transport::Uc))
            .count(),
        5
    );
    let rnr = parsed.iter().find_map(|p| match p.ext.aeth()?.kind {
        AethKind::RnrNak { timer } => Some(timer),
        _ => None,
    });
    assert_eq!(rnr, Some(12));
    let last = parsed.last().expect("there are 89");
    assert_eq!(
        last.ext.aeth().map(|a| a.kind),
        Some(AethKind::Nak(NakCode::RemoteAccess))
    );
}

/// A packet computed by hand from the sensor bridge's documentation: 30 bytes, no padding.
#[test]
fn an_unpadded_sensor_packet_is_right() {
    let bytes = hex(
        "4500005a000040004011b93fc0a80002c0a80001300012b7004600002a00ffffff00012300000000000000000000010000beef01\
         0000001e0000003d74657374206d73672030313233343536373839616263646566673a8de8bb",
    );
    let (ip, rest) = Ipv4::parse(&bytes).expect("IPv4");
    let (udp, rest) = Udp::parse(rest).expect("UDP");
    let (transport, crc) = rest.split_at(rest.len() - ICRC_LEN);
    assert_eq!(
        icrc::compute(&Ip::V4(ip), udp.src, udp.dst, transport).to_le_bytes(),
        crc
    );
    let packet = Packet::parse(transport).expect("a UC WRITE");
    assert_eq!(packet.bth.opcode, Opcode(0x2a));
    assert_eq!((packet.bth.dest_qp, packet.payload.len()), (0x123, 30));
    assert_eq!(
        packet.ext.reth().map(|r| (r.va, r.rkey, r.len)),
        Some((0x100, 0xbe_ef01, 30))
    );
}

#[test]
fn truncated_packets_are_refused_with_a_reason() {
    for captured in packets(RXE) {
        let whole = Packet::parse(&captured.transport).expect("decodes");
        let header = whole.header().len();
        for len in 0..header {
            let error = Packet::parse(&captured.transport[..len]).expect_err("too short");
            assert!(error.to_string().contains("truncated"), "{error}");
        }
        for len in header..captured.transport.len() {
            if let Ok(packet) = Packet::parse(&captured.transport[..len]) {
                assert!(packet.payload.len() < whole.payload.len());
            }
        }
    }
}

#[test]
fn opcodes_that_are_not_spoken_are_named() {
    for raw in 0..=255_u8 {
        let mut bytes = [0_u8; 64];
        bytes[0] = raw;
        match Packet::parse(&bytes) {
            Ok(packet) => {
                let spoken = raw == 0x81 || raw <= 0x14 || (0x20..=0x2b).contains(&raw);
                assert!(spoken, "{raw:#x}: {packet}");
                let header: Header = packet.header();
                assert_eq!(header.len() + packet.payload.len(), 64);
            }
            Err(error) => assert!(
                error.to_string().contains(&format!("{raw:#04x}")),
                "{error}"
            ),
        }
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter_map(|b| (b as char).to_digit(16).map(|d| d as u8))
        .collect();
    digits.chunks_exact(2).map(|d| d[0] << 4 | d[1]).collect()
}
