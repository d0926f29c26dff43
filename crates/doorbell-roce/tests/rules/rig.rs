//! One connection and its memory, driven by hand.

use std::collections::HashMap;

use doorbell_roce::{
    Access, Atomic, Config, Connection, Event, LocalFault, Memory, Message, Mtu, Op, Received,
    Refusal, Status,
};
use doorbell_wire::roce::{
    Aeth, AethKind, AtomicEth, Bth, Ext, Header, NakCode, Opcode, Packet, Place, Psn, Reth,
    Transport,
};

/// The region's key and first address.
pub(crate) const KEY: u32 = 0x77;
pub(crate) const BASE: u64 = 0x10_0000;
/// PSNs that the requester, and its peer, begin with.
pub(crate) const OURS: u32 = 100;
pub(crate) const THEIRS: u32 = 500;

/// Memory of one region; nothing about it is clever.
pub(crate) struct Host {
    pub(crate) base: u64,
    pub(crate) region: Vec<u8>,
    pub(crate) local: HashMap<u64, Vec<u8>>,
    /// Payload is lent and not loaded; what was lent: message, offset, length.
    pub(crate) lends: bool,
    pub(crate) lent: Vec<(u64, u32, u32)>,
    /// The message whose local memory is bad, from this offset on.
    pub(crate) bad: Option<(u64, u32)>,
    pub(crate) receives: usize,
    pub(crate) room: usize,
    taken: Vec<u8>,
    pub(crate) received: Vec<(Received, Vec<u8>)>,
    pub(crate) given_back: usize,
    pub(crate) receive_errors: usize,
    pub(crate) executed: Vec<(u64, Atomic)>,
    pub(crate) checks: usize,
    pub(crate) refusal: Option<Refusal>,
    /// Everything settles later, when [`Self::settled`] is moved.
    pub(crate) slow: bool,
    pub(crate) ticket: u64,
    pub(crate) settled: u64,
    /// READs of the region and results of atomics are to be had.
    pub(crate) ready: bool,
}

impl Host {
    fn new() -> Self {
        Self {
            base: BASE,
            region: vec![0; 64 << 10],
            local: HashMap::new(),
            lends: false,
            lent: Vec::new(),
            bad: None,
            receives: 0,
            room: 8192,
            taken: Vec::new(),
            received: Vec::new(),
            given_back: 0,
            receive_errors: 0,
            executed: Vec::new(),
            checks: 0,
            refusal: None,
            slow: false,
            ticket: 0,
            settled: 0,
            ready: true,
        }
    }

    fn status(&mut self) -> Status {
        if !self.slow {
            return Status::Now;
        }
        self.ticket += 1;
        Status::Later(self.ticket)
    }

    fn at(&self, rkey: u32, va: u64, len: usize) -> Result<usize, Refusal> {
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        let at = va.wrapping_sub(self.base) as usize;
        let end = at.checked_add(len).ok_or(Refusal::Access)?;
        if rkey != KEY || end > self.region.len() {
            return Err(Refusal::Access);
        }
        Ok(at)
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.region[at..at + 8].try_into().expect("8 bytes"))
    }

    pub(crate) fn set_word(&mut self, at: usize, value: u64) {
        self.region[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

impl Memory for Host {
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        if let Some((bad, from)) = self.bad
            && bad == message
            && offset >= from
        {
            return Err(LocalFault(9));
        }
        out.copy_from_slice(&self.local[&message][offset as usize..][..out.len()]);
        Ok(true)
    }

    fn lend(&mut self, message: u64, offset: u32, len: u32) -> bool {
        if self.lends {
            self.lent.push((message, offset, len));
        }
        self.lends
    }

    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        let local = self.local.get_mut(&message).ok_or(LocalFault(1))?;
        local[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(self.status())
    }

    fn check(&mut self, rkey: u32, va: u64, len: u32, _: Access) -> Result<(), Refusal> {
        self.checks += 1;
        self.at(rkey, va, len as usize).map(|_| ())
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        let at = self.at(rkey, va, bytes.len())?;
        self.region[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(self.status())
    }

    fn read(&mut self, rkey: u32, va: u64, _: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        let at = self.at(rkey, va, out.len())?;
        out.copy_from_slice(&self.region[at..at + out.len()]);
        Ok(self.ready)
    }

    fn atomic(&mut self, id: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal> {
        let at = self.at(rkey, va, 8)?;
        let old = self.word(at);
        match op {
            Atomic::FetchAdd { add } => self.set_word(at, old.wrapping_add(add)),
            Atomic::CompareSwap { compare, swap } if compare == old => self.set_word(at, swap),
            Atomic::CompareSwap { .. } => {}
        }
        self.executed.push((old, op));
        assert_eq!(id as usize, self.executed.len() - 1, "ids count");
        Ok(self.ready.then_some(old))
    }

    fn atomic_result(&mut self, id: u64) -> Result<Option<u64>, Refusal> {
        Ok(self.ready.then(|| self.executed[id as usize].0))
    }

    fn receive(&mut self) -> bool {
        if self.receives == 0 {
            return false;
        }
        self.receives -= 1;
        self.taken.clear();
        true
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        if offset as usize + bytes.len() > self.room {
            self.receive_errors += 1;
            return Err(Refusal::Invalid);
        }
        self.taken.resize(offset as usize, 0);
        self.taken.extend_from_slice(bytes);
        Ok(self.status())
    }

    fn received(&mut self, received: Received) {
        self.received.push((received, self.taken.clone()));
    }

    fn unreceive(&mut self) {
        self.given_back += 1;
        self.receives += 1;
    }

    fn settled(&mut self) -> u64 {
        self.settled
    }
}

/// A connection under test.
pub(crate) struct Rig {
    pub(crate) connection: Connection,
    pub(crate) host: Host,
    pub(crate) now: u64,
}

/// Reliable, path MTU 256, PSNs from [`OURS`] and [`THEIRS`].
pub(crate) fn config() -> Config {
    Config {
        dest_qpn: 0x42,
        sq_psn: Psn::new(OURS),
        rq_psn: Psn::new(THEIRS),
        path_mtu: Mtu::M256,
        ..Config::default()
    }
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(&config())
    }

    pub(crate) fn with(config: &Config) -> Self {
        Self {
            connection: Connection::new(config).expect("a valid configuration"),
            host: Host::new(),
            now: 1_000,
        }
    }

    pub(crate) fn uc() -> Self {
        Self::with(&Config {
            transport: Transport::Uc,
            ..config()
        })
    }

    pub(crate) fn give(&mut self, bytes: &[u8]) {
        let packet = Packet::parse(bytes).expect("a packet");
        self.connection
            .handle(&packet, false, self.now, &mut self.host);
    }

    /// The next packet.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let mut out = vec![0xcc; 4200];
        let len = self
            .connection
            .transmit(self.now, &mut self.host, &mut out)?;
        out.truncate(len);
        Some(out)
    }

    pub(crate) fn take_all(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.take()).collect()
    }

    /// PSNs of all that it sends now.
    pub(crate) fn psns(&mut self) -> Vec<u32> {
        self.take_all().iter().map(|p| psn(p)).collect()
    }

    /// The only packet that it sends now.
    pub(crate) fn one(&mut self) -> Vec<u8> {
        let mut all = self.take_all();
        assert_eq!(all.len(), 1, "one packet");
        all.remove(0)
    }

    /// The acknowledgements that it sends now, and nothing else: (what, PSN, MSN).
    pub(crate) fn acks(&mut self) -> Vec<(AethKind, u32, u32)> {
        let all = self.take_all();
        all.iter()
            .map(|bytes| {
                let packet = Packet::parse(bytes).expect("a packet");
                assert_eq!(packet.bth.opcode, Opcode::ACK, "{packet}");
                let aeth = packet.ext.aeth().expect("has one");
                (aeth.kind, packet.bth.psn.get(), aeth.msn)
            })
            .collect()
    }

    pub(crate) fn post(&mut self, token: u64, op: Op, bytes: &[u8]) {
        self.host.local.insert(token, bytes.to_vec());
        let message = Message {
            token,
            op,
            len: bytes.len() as u32,
            fence: false,
            solicited: false,
        };
        self.connection.post(message).expect("it is taken");
    }

    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.connection.poll_event(&mut self.host)).collect()
    }

    /// Jumps to the time-out, and says so to the connection.
    pub(crate) fn time_out(&mut self) {
        self.now = self.connection.timeout().expect("it waits for something");
        self.connection.on_timeout(self.now);
    }
}

pub(crate) fn psn(bytes: &[u8]) -> u32 {
    Packet::parse(bytes).expect("a packet").bth.psn.get()
}

pub(crate) fn asks(bytes: &[u8]) -> bool {
    Packet::parse(bytes).expect("a packet").bth.ack_req
}

pub(crate) const WRITE: Op = Op::Write {
    va: BASE,
    rkey: KEY,
    imm: None,
};
pub(crate) const READ: Op = Op::Read {
    va: BASE,
    rkey: KEY,
};
pub(crate) const SEND: Op = Op::Send { imm: None };
pub(crate) const ADD: Op = Op::FetchAdd {
    va: BASE,
    rkey: KEY,
    add: 5,
};

/// A packet as the peer makes it.
pub(crate) fn packet(opcode: Opcode, psn: u32, ext: Ext, ack: bool, payload: &[u8]) -> Vec<u8> {
    let mut bth = Bth::new(opcode, 0x41, Psn::new(psn));
    bth.ack_req = ack;
    bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut out = vec![0; 64];
    let len = Header { bth, ext }.emit(&mut out);
    out.truncate(len);
    out.extend_from_slice(payload);
    out.resize(out.len() + usize::from(bth.pad), 0);
    out
}

pub(crate) fn reth(at: u64, len: u32) -> Ext {
    Ext::Reth(Reth {
        va: BASE + at,
        rkey: KEY,
        len,
    })
}

/// A WRITE in one packet that asks for an acknowledgement.
pub(crate) fn write(psn: u32, at: u64, payload: &[u8]) -> Vec<u8> {
    let opcode = Opcode::write(Transport::Rc, Place::Only, false);
    packet(opcode, psn, reth(at, payload.len() as u32), true, payload)
}

pub(crate) fn send(psn: u32, place: Place, payload: &[u8]) -> Vec<u8> {
    let opcode = Opcode::send(Transport::Rc, place, false);
    packet(opcode, psn, Ext::None, place.ends(), payload)
}

pub(crate) fn read(psn: u32, at: u64, len: u32) -> Vec<u8> {
    packet(Opcode::READ_REQUEST, psn, reth(at, len), true, &[])
}

pub(crate) fn fetch_add(psn: u32, at: u64, add: u64) -> Vec<u8> {
    let eth = AtomicEth {
        va: BASE + at,
        rkey: KEY,
        swap_add: add,
        compare: 0,
    };
    packet(Opcode::FETCH_ADD, psn, Ext::Atomic(eth), true, &[])
}

pub(crate) const ACK: AethKind = AethKind::Ack { credit: 31 };

pub(crate) fn nak(code: NakCode) -> AethKind {
    AethKind::Nak(code)
}

/// What a responder says.
pub(crate) fn answer(kind: AethKind, psn: u32) -> Vec<u8> {
    packet(
        Opcode::ACK,
        psn,
        Ext::Aeth(Aeth { kind, msn: 0 }),
        false,
        &[],
    )
}

pub(crate) fn read_response(psn: u32, place: Place, payload: &[u8]) -> Vec<u8> {
    let ext = match place {
        Place::Middle => Ext::None,
        _ => Ext::Aeth(Aeth { kind: ACK, msn: 0 }),
    };
    packet(Opcode::read_response(place), psn, ext, false, payload)
}

pub(crate) fn atomic_response(psn: u32, value: u64) -> Vec<u8> {
    let ext = Ext::AtomicAck(Aeth { kind: ACK, msn: 0 }, value);
    packet(Opcode::ATOMIC_ACK, psn, ext, false, &[])
}
