//! Our end of two connections (RC and UC): memory, frames, and the loop that drives the state machines.

use std::collections::{HashMap, VecDeque};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use doorbell_roce::{
    Access, Atomic, Connection, Event, LocalFault, Memory, Message, Op, Received, Refusal, Status,
};
use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::{
    Arp, ETHERTYPE_ARP, ETHERTYPE_IPV4, Ethernet, Ipv4, PROTOCOL_UDP, Udp,
};
use doorbell_wire::roce::{ICRC_LEN, PORT, Packet};

pub(crate) const RKEY: u32 = 0x77_1234;
pub(crate) const BASE: u64 = 0x5500_0000_0000;
pub(crate) const OUR_IP: [u8; 4] = [192, 168, 77, 1];
pub(crate) const THEIR_IP: [u8; 4] = [192, 168, 77, 2];
const OUR_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const THEIR_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

pub(crate) struct Buffer {
    pub(crate) bytes: Vec<u8>,
    /// Local offset of each message's data.
    local: HashMap<u64, usize>,
    /// Posted receives: offset and length.
    pub(crate) receives: VecDeque<(usize, usize)>,
    taken: VecDeque<(usize, usize)>,
    pub(crate) received: Vec<(Received, Vec<u8>)>,
    atomics: u64,
}

impl Buffer {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            local: HashMap::new(),
            receives: VecDeque::new(),
            taken: VecDeque::new(),
            received: Vec::new(),
            atomics: 0,
        }
    }

    fn range(&self, rkey: u32, va: u64, len: usize) -> Result<usize, Refusal> {
        let at = va.wrapping_sub(BASE) as usize;
        let inside = at
            .checked_add(len)
            .is_some_and(|end| end <= self.bytes.len());
        if rkey == RKEY && inside {
            Ok(at)
        } else {
            Err(Refusal::Access)
        }
    }
}

impl Memory for Buffer {
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        let at = self.local[&message] + offset as usize;
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(true)
    }

    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        let at = self.local[&message] + offset as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(Status::Now)
    }

    fn check(&mut self, rkey: u32, va: u64, len: u32, _: Access) -> Result<(), Refusal> {
        self.range(rkey, va, len as usize).map(|_| ())
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        let at = self.range(rkey, va, bytes.len())?;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(Status::Now)
    }

    fn read(&mut self, rkey: u32, va: u64, _: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        let at = self.range(rkey, va, out.len())?;
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(true)
    }

    fn atomic(&mut self, _: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal> {
        let at = self.range(rkey, va, 8)?;
        let word: &mut [u8; 8] = (&mut self.bytes[at..at + 8]).try_into().expect("8 bytes");
        let old = u64::from_le_bytes(*word);
        let new = match op {
            Atomic::FetchAdd { add } => old.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if compare == old => swap,
            Atomic::CompareSwap { .. } => old,
        };
        *word = new.to_le_bytes();
        self.atomics += 1;
        Ok(Some(old))
    }

    fn atomic_result(&mut self, _: u64) -> Result<Option<u64>, Refusal> {
        Err(Refusal::Operational)
    }

    fn receive(&mut self) -> bool {
        match self.receives.pop_front() {
            Some(receive) => {
                self.taken.push_back(receive);
                true
            }
            None => false,
        }
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        let &(at, len) = self.taken.back().expect("taken");
        if offset as usize + bytes.len() > len {
            return Err(Refusal::Invalid);
        }
        let at = at + offset as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(Status::Now)
    }

    fn received(&mut self, received: Received) {
        let (at, _) = self.taken.pop_front().expect("taken");
        let bytes = self.bytes[at..at + received.len as usize].to_vec();
        self.received.push((received, bytes));
    }

    fn unreceive(&mut self) {
        let receive = self.taken.pop_back().expect("taken");
        self.receives.push_front(receive);
    }

    fn settled(&mut self) -> u64 {
        0
    }
}

/// A connection with its memory; both of them share one host, as the guest's test program has it.
pub(crate) struct Qp {
    pub(crate) qpn: u32,
    pub(crate) connection: Connection,
    tokens: u64,
    events: VecDeque<Event>,
}

pub(crate) struct End {
    socket: UdpSocket,
    start: Instant,
    pub(crate) buffer: Buffer,
    pub(crate) qps: Vec<Qp>,
    /// Frames that came and were not ours, for messages.
    pub(crate) bad_icrc: u32,
}

impl End {
    pub(crate) fn new(socket: UdpSocket, bytes: Vec<u8>) -> Self {
        Self {
            socket,
            start: Instant::now(),
            buffer: Buffer::new(bytes),
            qps: Vec::new(),
            bad_icrc: 0,
        }
    }

    pub(crate) fn add(&mut self, qpn: u32, connection: Connection) {
        self.qps.push(Qp {
            qpn,
            connection,
            tokens: 0,
            events: VecDeque::new(),
        });
    }

    /// One round: everything that arrived, everything that is to be sent.
    pub(crate) fn turn(&mut self) {
        let mut frame = [0; 9000];
        while let Ok(len) = self.socket.recv(&mut frame) {
            self.frame(&frame[..len]);
        }
        let now = self.now();
        for qp in &mut self.qps {
            if qp.connection.timeout().is_some_and(|at| at <= now) {
                qp.connection.on_timeout(now);
            }
            let mut packet = [0; 4200];
            while let Some(len) = qp.connection.transmit(now, &mut self.buffer, &mut packet) {
                send(&self.socket, &packet[..len]);
            }
            while let Some(event) = qp.connection.poll_event(&mut self.buffer) {
                qp.events.push_back(event);
            }
        }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn frame(&mut self, frame: &[u8]) {
        let Some((ethernet, rest)) = Ethernet::parse(frame) else {
            return;
        };
        if ethernet.ethertype == ETHERTYPE_ARP {
            if let Some(arp) = Arp::parse(rest)
                && arp.operation == 1
                && arp.target_ip == OUR_IP
            {
                let reply = Arp {
                    operation: 2,
                    sender_mac: OUR_MAC,
                    sender_ip: OUR_IP,
                    target_mac: arp.sender_mac,
                    target_ip: arp.sender_ip,
                };
                let ethernet = Ethernet {
                    dst: arp.sender_mac,
                    src: OUR_MAC,
                    ethertype: ETHERTYPE_ARP,
                };
                let bytes = [&ethernet.emit()[..], &reply.emit()[..]].concat();
                let _ = self.socket.send(&bytes);
            }
            return;
        }
        if ethernet.ethertype != ETHERTYPE_IPV4 {
            return;
        }
        let Some((ip, rest)) = Ipv4::parse(rest) else {
            return;
        };
        let Some((udp, rest)) = Udp::parse(rest) else {
            return;
        };
        if ip.protocol != PROTOCOL_UDP || udp.dst != PORT || rest.len() < ICRC_LEN {
            return;
        }
        let (transport, crc) = rest.split_at(rest.len() - ICRC_LEN);
        if icrc::compute(&Ip::V4(ip), udp.src, udp.dst, transport).to_le_bytes() != *crc {
            self.bad_icrc += 1;
            return;
        }
        let packet = Packet::parse(transport).expect("rxe sends what we can read");
        let now = self.now();
        for qp in &mut self.qps {
            if qp.qpn == packet.bth.dest_qp {
                let congested = ip.tos & 3 == 3;
                qp.connection
                    .handle(&packet, congested, now, &mut self.buffer);
            }
        }
    }

    /// Turns until `done` says so.
    pub(crate) fn until(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&mut Self) -> bool,
    ) {
        let until = Instant::now() + limit;
        loop {
            self.turn();
            if done(self) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{what} did not happen within {limit:?}"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn post(&mut self, qp: usize, op: Op, local: usize, len: u32) -> u64 {
        let which = &mut self.qps[qp];
        which.tokens += 1;
        // Tokens are unique over both connections: they share the buffer.
        let token = which.tokens * 2 + qp as u64;
        self.buffer.local.insert(token, local);
        which
            .connection
            .post(Message {
                token,
                op,
                len,
                fence: false,
                solicited: matches!(op, Op::Send { imm: Some(_) }),
            })
            .expect("there is room");
        token
    }

    /// Posts and waits for the outcome.
    pub(crate) fn run(&mut self, qp: usize, op: Op, local: usize, len: u32) -> Event {
        let token = self.post(qp, op, local, len);
        self.outcome(qp, token)
    }

    /// Waits for what became of a message.
    pub(crate) fn outcome(&mut self, qp: usize, token: u64) -> Event {
        let mut outcome = None;
        self.until(
            &format!("message {token}"),
            Duration::from_secs(20),
            |end| {
                while let Some(event) = end.qps[qp].events.pop_front() {
                    let reached = match event {
                        Event::Done { through } => through >= token,
                        Event::Failed { token: failed, .. } => failed == token,
                        Event::Stopped => false,
                    };
                    if reached {
                        outcome = Some(event);
                    }
                }
                outcome.is_some()
            },
        );
        outcome.expect("until saw it")
    }
}

fn send(socket: &UdpSocket, transport: &[u8]) {
    let ip = Ipv4 {
        src: OUR_IP,
        dst: THEIR_IP,
        ..Ipv4::default()
    };
    let udp = Udp {
        src: 0xc123,
        dst: PORT,
        checksum: 0,
    };
    let ethernet = Ethernet {
        dst: THEIR_MAC,
        src: OUR_MAC,
        ethertype: ETHERTYPE_IPV4,
    };
    let crc = icrc::compute(&Ip::V4(ip), udp.src, udp.dst, transport);
    let payload = (transport.len() + ICRC_LEN) as u16;
    let frame = [
        &ethernet.emit()[..],
        &ip.emit(Udp::LEN as u16 + payload)[..],
        &udp.emit(payload)[..],
        transport,
        &crc.to_le_bytes()[..],
    ]
    .concat();
    // A full socket buffer is a lost packet.
    let _ = socket.send(&frame);
}
