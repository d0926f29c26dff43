//! Packets from somebody who guesses: valid-looking, with PSNs near the right ones, known and unknown keys, absurd lengths, opcodes in any
//! order, answers to what was never asked. Nothing panics, nothing outside a granted range is touched, nothing grows without bound.

use doorbell_roce::{
    Access, Atomic, Config, Connection, LocalFault, Memory, Message, Mtu, Op, Received, Refusal,
    Status,
};
use doorbell_wire::roce::{
    Aeth, AethKind, AtomicEth, Bth, Ext, Header, Kind, NakCode, Opcode, Packet, Psn, Reth,
    Transport,
};

const KEY: u32 = 0x600d;
const BASE: u64 = 0xffff_ffff_ffff_0000;
const SIZE: u64 = 0x8000;
/// Packets that one connection meets: few, since most connections soon meet one that ends them.
const LIFE: u64 = 100;
/// What a message's own buffer has.
const LOCAL: u32 = 9000;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Memory that panics when something reaches beyond what it granted.
struct Strict {
    settled: u64,
    receives: u32,
    taken: u32,
    received: u64,
    written: u64,
}

impl Strict {
    /// What a key table does, and what must hold whatever the transport asks.
    fn granted(rkey: u32, va: u64, len: u64) -> Result<(), Refusal> {
        let at = va.wrapping_sub(BASE);
        if rkey != KEY || at > SIZE || len > SIZE - at {
            return Err(Refusal::Access);
        }
        Ok(())
    }
}

impl Memory for Strict {
    fn load(&mut self, _: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        assert!(
            offset as usize + out.len() <= LOCAL as usize,
            "beyond the message"
        );
        out.fill(1);
        Ok(true)
    }

    fn store(&mut self, _: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        assert!(
            offset as usize + bytes.len() <= LOCAL as usize,
            "beyond the message"
        );
        Ok(Status::Now)
    }

    fn check(&mut self, rkey: u32, va: u64, len: u32, _: Access) -> Result<(), Refusal> {
        Self::granted(rkey, va, u64::from(len))
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        // `check` came first, for the whole message: so this cannot fail.
        Self::granted(rkey, va, bytes.len() as u64).expect("only what was granted");
        self.written += 1;
        if self.written.is_multiple_of(3) {
            return Ok(Status::Later(self.settled + 1));
        }
        Ok(Status::Now)
    }

    fn read(&mut self, rkey: u32, va: u64, _: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        Self::granted(rkey, va, out.len() as u64).expect("only what was granted");
        out.fill(2);
        Ok(true)
    }

    fn atomic(&mut self, _: u64, rkey: u32, va: u64, _: Atomic) -> Result<Option<u64>, Refusal> {
        Self::granted(rkey, va, 8).expect("only what was granted");
        assert!(va.is_multiple_of(8));
        Ok(Some(5))
    }

    fn atomic_result(&mut self, _: u64) -> Result<Option<u64>, Refusal> {
        Err(Refusal::Operational)
    }

    fn receive(&mut self) -> bool {
        if self.receives == 0 {
            return false;
        }
        self.receives -= 1;
        self.taken += 1;
        true
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        assert!(self.taken > 0, "no receive was taken");
        if u64::from(offset) + bytes.len() as u64 > 4096 {
            return Err(Refusal::Invalid);
        }
        Ok(Status::Now)
    }

    fn received(&mut self, _: Received) {
        self.taken = self.taken.checked_sub(1).expect("no receive was taken");
        self.received += 1;
    }

    fn unreceive(&mut self) {
        self.taken = self.taken.checked_sub(1).expect("no receive was taken");
        self.receives += 1;
    }

    fn settled(&mut self) -> u64 {
        self.settled
    }
}

/// A packet that a clever stranger would send.
fn draw(random: &mut Random, transport: Transport, near: [u32; 2], out: &mut [u8; 4200]) -> usize {
    let opcode = match random.below(8) {
        0 => Opcode(random.next() as u8),
        1 => Opcode::CNP,
        _ => {
            let uc = if transport == Transport::Uc { 0x20 } else { 0 };
            Opcode(uc | random.below(0x15) as u8)
        }
    };
    let near = near[random.below(2) as usize];
    let psn = match random.below(8) {
        0 => random.next() as u32,
        1..=2 => near
            .wrapping_add(random.below(200) as u32)
            .wrapping_sub(100),
        _ => near.wrapping_add(random.below(6) as u32).wrapping_sub(1),
    };
    let va = match random.below(4) {
        0 => random.next(),
        1 => BASE.wrapping_add(SIZE - random.below(64)),
        _ => BASE.wrapping_add(random.below(SIZE) & !7),
    };
    let rkey = if random.below(16) == 0 {
        random.next() as u32
    } else {
        KEY
    };
    let len = match random.below(6) {
        0 => random.next() as u32,
        1 => 0,
        2 => 1024,
        3 => random.below(5000) as u32,
        _ => random.below(1024) as u32,
    };
    let syndrome = match random.below(8) {
        0 => AethKind::RnrNak {
            timer: random.next() as u8,
        },
        1 => AethKind::Nak(NakCode::PsnSequence),
        2 if random.below(50) == 0 => AethKind::Nak(NakCode::RemoteAccess),
        3 if random.below(50) == 0 => AethKind::Reserved(random.next() as u8),
        _ => AethKind::Ack { credit: 31 },
    };
    let aeth = Aeth {
        kind: syndrome,
        msn: random.next() as u32 & 0xff_ffff,
    };
    let imm = random.next() as u32;
    let reth = Reth { va, rkey, len };
    let ext = match opcode.decode() {
        Some((Kind::Write, place, true)) if place.begins() => Ext::RethImm(reth, imm),
        Some((Kind::Write, place, false)) if place.begins() => Ext::Reth(reth),
        Some((Kind::Write | Kind::Send, _, true)) => Ext::Imm(imm),
        Some((Kind::ReadRequest, ..)) => Ext::Reth(reth),
        Some((Kind::Acknowledge, ..)) => Ext::Aeth(aeth),
        Some((Kind::ReadResponse, place, _)) if place != doorbell_wire::roce::Place::Middle => {
            Ext::Aeth(aeth)
        }
        Some((Kind::AtomicAcknowledge, ..)) => Ext::AtomicAck(aeth, random.next()),
        Some((Kind::CompareSwap | Kind::FetchAdd, ..)) => Ext::Atomic(AtomicEth {
            va,
            rkey,
            swap_add: random.next(),
            compare: random.next(),
        }),
        Some((Kind::Cnp, ..)) => Ext::Cnp,
        _ => Ext::None,
    };
    let mut bth = Bth::new(opcode, 1, Psn::new(psn));
    bth.ack_req = random.below(2) == 0;
    bth.pad = if random.below(8) == 0 {
        random.below(4) as u8
    } else {
        0
    };
    let header = Header { bth, ext }.emit(out);
    let payload = match random.below(8) {
        0 => 1024,
        1 => 0,
        2 => random.below(1100) as usize,
        _ => len.min(1024) as usize,
    };
    let total = header + payload;
    // Now and then a bit of the header is wrong, whatever it was.
    if random.below(4) == 0 {
        let bit = random.below(header as u64 * 8) as usize;
        out[bit / 8] ^= 1 << (bit % 8);
    }
    if random.below(50) == 0 {
        return random.below(total as u64 + 1) as usize;
    }
    total
}

fn attack(packets: u64, seed: u64) -> (u64, u64, u64) {
    let mut random = Random(seed | 1);
    let mut bytes = [0_u8; 4200];
    let mut out = [0_u8; 4200];
    let (mut written, mut received, mut events) = (0, 0, 0);
    let mut left = packets;
    while left > 0 {
        let transport = if random.below(4) == 0 {
            Transport::Uc
        } else {
            Transport::Rc
        };
        let config = Config {
            transport,
            dest_qpn: 1,
            sq_psn: Psn::new(random.next() as u32),
            rq_psn: Psn::new(random.next() as u32),
            path_mtu: Mtu::M1024,
            max_rd_atomic: random.below(5) as u8,
            max_dest_rd_atomic: random.below(5) as u8,
            ..Config::default()
        };
        let mut connection = Connection::new(&config).expect("valid");
        let mut memory = Strict {
            settled: 0,
            receives: 8,
            taken: 0,
            received: 0,
            written: 0,
        };
        // Where the two halves stand; a stranger who listens knows.
        let mut near = [config.rq_psn.get(), config.sq_psn.get()];
        let mut now = 0;
        let mut token = 0;
        for _ in 0..LIFE.min(left) {
            now += random.below(20_000);
            memory.settled += random.below(2);
            memory.receives = memory.receives.max(random.below(4) as u32);
            let len = draw(&mut random, transport, near, &mut bytes);
            if let Ok(packet) = Packet::parse(&bytes[..len]) {
                connection.handle(&packet, random.below(10) == 0, now, &mut memory);
                if packet.bth.psn == Psn::new(near[0]) {
                    near[0] = packet.bth.psn.add(1).get();
                }
            }
            if random.below(4) == 0 && connection.has_room() {
                token += 1;
                let len = random.below(u64::from(LOCAL)) as u32;
                let (va, rkey) = (8, 9);
                let (op, len) = match random.below(5) {
                    0 => (Op::Read { va, rkey }, len),
                    1 => (Op::FetchAdd { va, rkey, add: 1 }, 8),
                    2 => (Op::Send { imm: Some(1) }, len),
                    _ => (
                        Op::Write {
                            va,
                            rkey,
                            imm: None,
                        },
                        len,
                    ),
                };
                // READs are refused where there are none.
                let _ = connection.post(Message {
                    token,
                    op,
                    len,
                    fence: false,
                    solicited: false,
                });
            }
            if connection.timeout().is_some_and(|at| at <= now) {
                connection.on_timeout(now);
            }
            for _ in 0..8 {
                let Some(len) = connection.transmit(now, &mut memory, &mut out) else {
                    break;
                };
                let sent = Packet::parse(&out[..len]).expect("what we send is well formed");
                if matches!(sent.kind, Kind::Write | Kind::Send | Kind::ReadRequest) {
                    near[1] = sent.bth.psn.get();
                }
            }
            while connection.poll_event(&mut memory).is_some() {
                events += 1;
            }
        }
        left -= LIFE.min(left);
        written += memory.written;
        received += memory.received;
    }
    (written, received, events)
}

#[test]
fn guesses_do_no_harm() {
    let (written, received, events) = attack(100_000, 42);
    // The guesses are good enough to get through now and then, or this test would see nothing.
    assert!(
        written > 200 && received > 1_000 && events > 1_000,
        "{written} {received} {events}"
    );
}

#[test]
#[ignore = "heavy: 10^8 packets, or DOORBELL_FUZZ_PACKETS"]
fn heavy_guesses() {
    let packets = std::env::var("DOORBELL_FUZZ_PACKETS").map_or(100_000_000, |n| {
        n.parse().expect("DOORBELL_FUZZ_PACKETS is a number")
    });
    let (written, received, events) = attack(packets, 7);
    println!("{packets} packets: {written} writes, {received} receives, {events} events");
    assert!(written > packets / 1_000);
}
