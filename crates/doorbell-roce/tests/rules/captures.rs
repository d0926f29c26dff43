//! Conversations of others, with one side replaced by a connection: what it says is what they said.
//!
//! `rxe.pcap`: two Linux kernels (soft-RoCE, path MTU 1024); `hsb_*.pcap`: a camera bridge that sends UC WRITEs and does not pad.

use doorbell_roce::{Config, Event, Failure, Message, Mtu, Op};
use doorbell_wire::roce::net::{ETHERTYPE_IPV4, Ethernet, Ipv4, PROTOCOL_UDP, Udp};
use doorbell_wire::roce::{AethKind, Ext, ICRC_LEN, Kind, Packet, Psn, Transport};

use super::rig::{KEY, Rig, psn};

const RXE: &[u8] = include_bytes!("../../../doorbell-wire/tests/fixtures/rxe.pcap");
const HSB: [&[u8]; 2] = [
    include_bytes!("../../../doorbell-wire/tests/fixtures/hsb_embedded_3000B.pcap"),
    include_bytes!("../../../doorbell-wire/tests/fixtures/hsb_separate_metadata_30B.pcap"),
];
/// The key of the kernel's region.
const THEIR_KEY: u32 = 0x2a0;

struct Captured {
    /// From the side that posts the requests?
    request: bool,
    bytes: Vec<u8>,
}

impl Captured {
    fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.bytes).expect("a packet")
    }
}

/// The RoCE packets of one transport; the requester is the host whose address ends in `requester`.
fn packets(pcap: &[u8], of: Transport, requester: u8) -> Vec<Captured> {
    let mut rest = &pcap[24..];
    let mut all = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().expect("4 bytes")) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let Some((ethernet, ip)) = Ethernet::parse(frame) else {
            continue;
        };
        if ethernet.ethertype != ETHERTYPE_IPV4 {
            continue;
        }
        let (ip, udp) = Ipv4::parse(ip).expect("IPv4");
        let (udp, bytes) = match Udp::parse(udp) {
            Some(udp) if ip.protocol == PROTOCOL_UDP => udp,
            _ => continue,
        };
        if udp.dst != doorbell_wire::roce::PORT {
            continue;
        }
        let captured = Captured {
            request: ip.src[3] == requester,
            bytes: bytes[..bytes.len() - ICRC_LEN].to_vec(),
        };
        if captured.packet().bth.opcode.transport() == Some(of) {
            all.push(captured);
        }
    }
    all
}

fn config(transport: Transport) -> Config {
    let (qpn, psn) = match transport {
        Transport::Rc => (0x11, 0xff_fffa),
        Transport::Uc => (0x12, 0x100),
    };
    Config {
        transport,
        dest_qpn: qpn,
        sq_psn: Psn::new(psn),
        rq_psn: Psn::new(psn),
        path_mtu: Mtu::M1024,
        ..Config::default()
    }
}

/// Gives a captured request to a responder whose region begins where the capture's did, under this test's key.
fn give(rig: &mut Rig, captured: &Captured) {
    let mut packet = captured.packet();
    match &mut packet.ext {
        Ext::Reth(reth) | Ext::RethImm(reth, _) if reth.rkey == THEIR_KEY => reth.rkey = KEY,
        Ext::Atomic(eth) if eth.rkey == THEIR_KEY => eth.rkey = KEY,
        _ => {}
    }
    rig.connection
        .handle(&packet, false, rig.now, &mut rig.host);
}

fn consumes_a_receive(packet: &Packet<'_>) -> bool {
    packet.ext.imm().is_some() || (packet.kind == Kind::Send && packet.place.begins())
}

/// Everything that an answer says.
fn said<'a>(packet: &Packet<'a>) -> (Kind, Psn, Ext, &'a [u8]) {
    (packet.kind, packet.bth.psn, packet.ext, packet.payload)
}

/// The kernel's requests into a responder: each answer has the kernel's opcode, PSN, syndrome, message count, value and payload.
#[test]
fn our_responder_says_what_the_kernel_said() {
    let packets = packets(RXE, Transport::Rc, 3);
    let mut rig = Rig::with(&config(Transport::Rc));
    let reth = *packets[0].packet().ext.reth().expect("a WRITE");
    rig.host.base = reth.va;
    let mut expected = packets.iter().filter(|p| !p.request);
    let mut answers = 0;
    for (n, captured) in packets.iter().enumerate().filter(|(_, p)| p.request) {
        let packet = captured.packet();
        let answer = |kind: Kind| {
            let later = packets[n..].iter().filter(|p| !p.request);
            later
                .map(Captured::packet)
                .skip_while(move |p| p.bth.psn != packet.bth.psn)
                .take_while(move |p| p.kind == kind)
        };
        // Receives and memory were as the kernel's program had them.
        if consumes_a_receive(&packet) {
            let waits = |p: Packet<'_>| {
                matches!(p.ext.aeth().map(|a| a.kind), Some(AethKind::RnrNak { .. }))
            };
            let not_ready = answer(Kind::Acknowledge).next().is_some_and(waits);
            rig.host.receives = usize::from(!not_ready);
        }
        if let (Kind::FetchAdd, Ext::Atomic(eth)) = (packet.kind, packet.ext) {
            rig.host.set_word((eth.va - reth.va) as usize, 0x64);
        }
        if let (Kind::ReadRequest, Some(read)) = (packet.kind, packet.ext.reth()) {
            let mut at = (read.va - reth.va) as usize;
            for response in answer(Kind::ReadResponse) {
                rig.host.region[at..at + response.payload.len()].copy_from_slice(response.payload);
                at += response.payload.len();
            }
        }
        give(&mut rig, captured);
        // Taken after each request, since the kernel does not coalesce.
        for bytes in rig.take_all() {
            let ours = Packet::parse(&bytes).expect("a packet");
            let theirs = expected.next().expect("no more than the kernel");
            assert_eq!(said(&ours), said(&theirs.packet()), "to {packet}");
            answers += 1;
        }
    }
    assert!(expected.next().is_none(), "the kernel said more");
    assert!(answers > 30, "{answers}");
    assert_eq!(rig.connection.counters().out_of_buffer, 7);
    assert_eq!(rig.connection.counters().resp_remote_access_errors, 1);
    assert_eq!(rig.host.received.len(), 6, "five SENDs and an immediate");
}

/// Posts the message that begins with the `n`-th packet.
fn post(rig: &mut Rig, packets: &[Captured], n: usize, token: u64) -> u32 {
    let first = packets[n].packet();
    let mut bytes = Vec::new();
    let mut imm = None;
    for packet in packets[n..].iter().filter(|p| p.request) {
        let packet = packet.packet();
        bytes.extend_from_slice(packet.payload);
        imm = packet.ext.imm();
        if packet.place.ends() {
            break;
        }
    }
    let op = match (first.kind, first.ext) {
        (Kind::Write, Ext::Reth(reth) | Ext::RethImm(reth, _)) => Op::Write {
            va: reth.va,
            rkey: reth.rkey,
            imm,
        },
        (Kind::Send, _) => Op::Send { imm },
        (Kind::ReadRequest, Ext::Reth(reth)) => {
            bytes.resize(reth.len as usize, 0);
            Op::Read {
                va: reth.va,
                rkey: reth.rkey,
            }
        }
        (kind, Ext::Atomic(eth)) => {
            bytes.resize(8, 0);
            let (va, rkey) = (eth.va, eth.rkey);
            if kind == Kind::FetchAdd {
                let add = eth.swap_add;
                Op::FetchAdd { va, rkey, add }
            } else {
                Op::CompareSwap {
                    va,
                    rkey,
                    compare: eth.compare,
                    swap: eth.swap_add,
                }
            }
        }
        _ => panic!("{first} begins no message"),
    };
    let len = bytes.len() as u32;
    rig.host.local.insert(token, bytes);
    let message = Message {
        token,
        op,
        len,
        fence: false,
        solicited: first.bth.solicited,
    };
    rig.connection.post(message).expect("it is taken");
    len.div_ceil(1024).max(1)
}

/// The kernel's work requests into a requester, and the kernel's answers: byte for byte the kernel's packets, but for the migration bit.
#[test]
fn our_requester_sends_what_the_kernel_sent() {
    for (transport, last) in [(Transport::Rc, 24), (Transport::Uc, 2)] {
        let packets = packets(RXE, transport, 3);
        let mut rig = Rig::with(&config(transport));
        let mut next = config(transport).sq_psn;
        let mut token = 0;
        let mut sent = std::collections::VecDeque::new();
        let mut events = Vec::new();
        for (n, captured) in packets.iter().enumerate() {
            let packet = captured.packet();
            if !captured.request {
                rig.give(&captured.bytes);
                events.extend(rig.events());
                continue;
            }
            if packet.bth.psn == next {
                next = next.add(post(&mut rig, &packets, n, token));
                token += 1;
                sent.extend(rig.take_all());
            } else if sent.is_empty() {
                // Sent again, after "not ready".
                rig.time_out();
                sent.extend(rig.take_all());
            }
            let mut ours: Vec<u8> = sent
                .pop_front()
                .unwrap_or_else(|| panic!("nothing for {packet}"));
            assert_eq!(ours[1] & 0x40, 0x40);
            ours[1] &= !0x40;
            assert_eq!(ours, captured.bytes, "{packet}");
        }
        events.extend(rig.events());
        assert!(
            sent.is_empty(),
            "more than the kernel: {:#x}",
            psn(&sent[0])
        );
        assert_eq!(token, last + 1);
        let end = match transport {
            Transport::Rc => Event::Failed {
                token: last,
                failure: Failure::RemoteAccess,
            },
            Transport::Uc => Event::Done { through: last },
        };
        assert_eq!(events.last(), Some(&end));
        if transport == Transport::Rc {
            assert_eq!(rig.connection.counters().rnr_nak_retry_err, 7);
            let reads: Vec<_> = packets
                .iter()
                .map(Captured::packet)
                .filter(|p| p.kind == Kind::ReadResponse)
                .collect();
            assert_eq!(rig.host.local[&4], reads[0].payload);
            assert_eq!(
                rig.host.local[&5],
                reads[1..]
                    .iter()
                    .flat_map(|p| p.payload)
                    .copied()
                    .collect::<Vec<_>>()
            );
            assert_eq!(rig.host.local[&6], 0x64_u64.to_le_bytes());
        }
    }
}

/// The kernel's UC packets into a receiver: a WRITE of three packets, one with immediate, a SEND.
#[test]
fn what_the_kernel_sends_unreliably_arrives() {
    let mut rig = Rig::with(&config(Transport::Uc));
    rig.host.receives = 2;
    let packets = packets(RXE, Transport::Uc, 3);
    let reth = *packets[0].packet().ext.reth().expect("a WRITE");
    rig.host.base = reth.va;
    for captured in &packets {
        give(&mut rig, captured);
    }
    let middle = packets[1].packet();
    assert_eq!(rig.host.region[1024..2048], *middle.payload);
    assert_eq!(rig.host.received.len(), 2);
    assert_eq!(rig.host.received[0].0.imm, Some(0xcafe_0001));
    assert_eq!(rig.host.received[1].1, packets[4].packet().payload);
    let counters = rig.connection.counters();
    assert_eq!(
        (counters.rx_write_requests, counters.out_of_sequence),
        (2, 0)
    );
    assert_eq!(rig.take_all().len(), 0);
}

/// A camera bridge into a receiver that knows no peer: every frame lands, immediates complete receives, nothing is answered.
#[test]
fn a_sensor_without_a_connection_is_received() {
    for pcap in HSB {
        let packets = packets(pcap, Transport::Uc, 2);
        assert!(packets.len() >= 8);
        let mut rig = Rig::with(&Config {
            dest_qpn: 0,
            path_mtu: Mtu::M4096,
            ..config(Transport::Uc)
        });
        let mut immediates = 0;
        for captured in &packets {
            let mut packet = captured.packet();
            let (Ext::Reth(reth) | Ext::RethImm(reth, _)) = &mut packet.ext else {
                panic!("{packet} is no WRITE")
            };
            reth.rkey = KEY;
            let va = reth.va;
            rig.host.base = va & !0xfff;
            if packet.ext.imm().is_some() {
                rig.host.receives = 1;
                immediates += 1;
            }
            rig.connection
                .handle(&packet, false, rig.now, &mut rig.host);
            let at = (va & 0xfff) as usize;
            assert_eq!(
                rig.host.region[at..at + packet.payload.len()],
                *packet.payload
            );
        }
        let counters = rig.connection.counters();
        assert_eq!(counters.rx_write_requests, packets.len() as u64);
        assert_eq!(
            (rig.host.received.len(), rig.take_all().len()),
            (immediates, 0)
        );
        assert!(immediates > 0);
    }
}
