//! Both sides of what may go wrong between two hosts. This test program itself runs in both guests: the near side has the test and posts, the
//! far side does as it is told, a line at a time over TCP.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use doorbell::cpu::{self, Post, deadline, local, remote};
use doorbell::device_api::Error as DeviceError;
use doorbell::{
    Access, AnyQp, Config, CpuQp, Device, Endpoint, GpuSelect, HcaCores, LinkKind, Mr, Pd, Place,
    QpState, RemoteMr,
};

/// Where the far side listens.
const FAR: &str = "192.168.77.2:18700";
/// A step, of which the longest is a device that gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a region.
const BYTES: usize = 256 << 10;
/// Puts under way when memory goes: what takes emulated guests more than a second.
const PUTS: u64 = 120;

const REMOTE_ACCESS: u8 = 0x13;
const RETRIES: u8 = 0x15;
const LOCAL: [u8; 2] = [0x02, 0x04];

/// What each side has.
struct Side {
    device: Device,
    pd: Pd,
    region: Mr,
}

impl Side {
    fn new() -> Self {
        let config = Config {
            gpu: Some(GpuSelect::Host),
            hca_cores: Some(HcaCores::Threads(1)),
            verbs: Some("rxe0".to_owned()),
            ..Config::default()
        };
        let device = Device::builder().config(config).open().expect("a device");
        let pd = device.pd().expect("a domain");
        let region = Self::region(&device, &pd);
        Self { device, pd, region }
    }

    fn region(device: &Device, pd: &Pd) -> Mr {
        let memory = device.alloc(Place::Host, BYTES).expect("memory");
        pd.register(&memory, Access::ALL).expect("a region")
    }

    fn qp(&self) -> AnyQp {
        let qp = self.pd.qp().depth(256).receive_queue(16).build();
        qp.expect("a queue pair").into()
    }

    /// How the other side reaches a queue pair and the region, as text.
    fn endpoint(&self, qp: &AnyQp) -> String {
        let region = self.region.remote_over(LinkKind::Verbs);
        let at = qp.endpoint(LinkKind::Verbs, &[region.expect("registered")]);
        let mut text = String::new();
        for byte in at.expect("an endpoint").to_bytes() {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// Connects to what the other side's `endpoint` said; returns its region.
    fn connect(&self, qp: &AnyQp, text: &str) -> RemoteMr {
        let byte = |i| u8::from_str_radix(&text[i..i + 2], 16).expect("hexadecimal digits");
        let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
        let there = Endpoint::from_bytes(&bytes).expect("an endpoint");
        let to = self.device.destination(&there).expect("a destination");
        qp.connect(&to).expect("connected");
        there.regions[0]
    }
}

/// The line to the other side.
struct Line(BufReader<TcpStream>);

impl Line {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        stream.set_nodelay(true).expect("no delay");
        Self(BufReader::new(stream))
    }

    fn say(&mut self, words: &str) {
        let line = format!("{words}\n");
        let said = self.0.get_mut().write_all(line.as_bytes());
        said.expect("the other side listens");
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("the other side speaks");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, words: &str) -> String {
        self.say(words);
        self.hear()
    }
}

/// Waits until a queue pair is in error, and gives its syndrome.
fn syndrome(qp: &AnyQp) -> u8 {
    let until = Instant::now() + PATIENCE;
    while qp.state() != QpState::Error {
        assert!(Instant::now() < until, "no error within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    qp.error().expect("an error without a word").syndrome().0
}

#[test]
#[ignore = "one side of two, which peer_verbs_between_two_guests runs in a guest"]
fn far() {
    let mut side = Side::new();
    let mut qp = side.qp();
    let listener = TcpListener::bind(FAR).expect("the address of the first guest");
    let (stream, _) = listener.accept().expect("the near side");
    let mut line = Line::new(stream);
    loop {
        let heard = line.hear();
        let (word, rest) = heard.split_once(' ').unwrap_or((&heard, ""));
        let answer = match word {
            "new" => {
                qp = side.qp();
                side.endpoint(&qp)
            }
            "reset" => {
                qp.reset(PATIENCE).expect("reset");
                side.endpoint(&qp)
            }
            "connect" => {
                side.connect(&qp, rest);
                "connected".to_owned()
            }
            "receive" => {
                let (mut cpu, by) = (CpuQp::new(&qp).expect("exported"), deadline(PATIENCE));
                let (_, recv) = cpu.queues().expect("its queues");
                let into = local(&side.region, 64, 64);
                let ticket = recv.recv_post(into, by).expect("posted");
                let got = recv.recv_wait(ticket, by).expect("a message");
                format!("{} bytes, immediate {}", got.bytes, got.imm)
            }
            "word" => {
                let at = rest.parse().expect("an offset");
                format!("{:#x}", side.region.memory().load(at).expect("a word"))
            }
            "syndrome" => format!("{:#04x}", syndrome(&qp)),
            "free" => {
                let new = Side::region(&side.device, &side.pd);
                let old = std::mem::replace(&mut side.region, new);
                old.deregister(PATIENCE).expect("deregistered");
                "free".to_owned()
            }
            "destroy" => {
                qp.destroy(PATIENCE).expect("destroyed");
                "destroyed".to_owned()
            }
            "end" => return,
            other => panic!("the near side said {other:?}"),
        };
        line.say(&answer);
    }
}

/// The near side.
struct Near {
    side: Side,
    line: Line,
}

impl Near {
    fn new() -> Self {
        let side = Side::new();
        let until = Instant::now() + PATIENCE;
        let stream = loop {
            match TcpStream::connect(FAR) {
                Ok(stream) => break stream,
                Err(e) => assert!(Instant::now() < until, "no far side: {e}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        let line = Line::new(stream);
        Self { side, line }
    }

    /// Connects `qp` to the queue pair that the far side says: a `new` one, or its last after a `reset`.
    fn connect(&mut self, qp: &AnyQp, which: &str) -> RemoteMr {
        let there = self.line.ask(which);
        let here = self.side.endpoint(qp);
        let region = self.side.connect(qp, &there);
        assert_eq!(self.line.ask(&format!("connect {here}")), "connected");
        region
    }

    fn pair(&mut self) -> (AnyQp, RemoteMr) {
        let qp = self.side.qp();
        let there = self.connect(&qp, "new");
        (qp, there)
    }

    /// A word is written, and is there.
    fn writes(&mut self, qp: &AnyQp, there: &RemoteMr, value: u64) {
        put(qp, remote(there, 8), value).expect("written");
        assert_eq!(self.line.ask("word 8"), format!("{value:#x}"));
    }

    /// Many puts of all of `from`; returns how they ended, once `meanwhile` has been done with it.
    fn puts(
        &mut self,
        qp: &AnyQp,
        there: &RemoteMr,
        from: Mr,
        meanwhile: impl FnOnce(&mut Self, Mr),
    ) -> Result<(), DeviceError> {
        let mut cpu = CpuQp::new(qp).expect("exported");
        let (queue, by) = (cpu.queue().expect("its queue"), deadline(PATIENCE));
        let how = Post::by(by);
        for _ in 0..PUTS {
            let from = local(&from, 0, BYTES as u64);
            queue.put(remote(there, 0), from, how).expect("posted");
        }
        meanwhile(self, from);
        queue.nop(how).and_then(|t| queue.wait(t, by))
    }
}

fn put(qp: &AnyQp, to: cpu::Remote, value: u64) -> Result<(), DeviceError> {
    let (mut cpu, by) = (CpuQp::new(qp).expect("exported"), deadline(PATIENCE));
    let queue = cpu.queue().expect("its queue");
    let ticket = queue.put_value(to, value, 8, Post::by(by))?;
    queue.wait(ticket, by)
}

fn failed(ended: Result<(), DeviceError>) {
    let why = ended.expect_err("this cannot be done");
    assert_ne!(why, DeviceError::TIMED_OUT, "it has no end");
}

#[test]
#[ignore = "one side of two, which peer_verbs_between_two_guests runs in a guest"]
fn near() {
    let mut near = Near::new();
    for (name, step) in [
        ("a receive that comes late", late as fn(&mut Near)),
        ("a wrong key, and the same queue pairs again", wrong_key),
        ("reset and connected again, three times", again),
        ("our memory goes under traffic", ours_goes),
        ("their memory goes under traffic", theirs_goes),
        ("a queue pair that is gone", gone),
    ] {
        let began = Instant::now();
        step(&mut near);
        println!("well: {name} ({} ms)", began.elapsed().as_millis());
    }
    near.line.say("end");
}

/// A message waits at the device until there is a receive (RNR).
fn late(near: &mut Near) {
    let (qp, _) = near.pair();
    let mut cpu = CpuQp::new(&qp).expect("exported");
    let (queue, by) = (cpu.queue().expect("its queue"), deadline(PATIENCE));
    near.side.region.write(0, b"patience").expect("written");
    let from = local(&near.side.region, 0, 8);
    let ticket = queue.send_imm(from, 7, Post::by(by)).expect("posted");
    std::thread::sleep(Duration::from_millis(300));
    let taken = queue.poll(ticket).expect("no error");
    assert!(!taken, "a message was taken without a receive");
    assert_eq!(near.line.ask("receive"), "8 bytes, immediate 7");
    queue.wait(ticket, by).expect("taken");
    let word = u64::from_le_bytes(*b"patience");
    assert_eq!(near.line.ask("word 64"), format!("{word:#x}"));
}

/// A wrong key fails both queue pairs, what was before it is done, and both can be used again.
fn wrong_key(near: &mut Near) {
    let (qp, there) = near.pair();
    near.writes(&qp, &there, 77);
    let key = there.key ^ 0x5a00;
    failed(put(&qp, remote(&RemoteMr { key, ..there }, 8), 78));
    assert_eq!(syndrome(&qp), REMOTE_ACCESS);
    // What the responder's device calls it is its own affair; that it stops is not.
    let theirs = near.line.ask("syndrome");
    assert!(theirs.starts_with("0x"), "{theirs}");
    assert_eq!(near.line.ask("word 8"), "0x4d");
    qp.reset(PATIENCE).expect("reset");
    let there = near.connect(&qp, "reset");
    near.writes(&qp, &there, 79);
}

fn again(near: &mut Near) {
    let (qp, mut there) = near.pair();
    for lap in 0..3 {
        near.writes(&qp, &there, 100 + lap);
        qp.reset(PATIENCE).expect("reset");
        there = near.connect(&qp, "reset");
    }
    near.writes(&qp, &there, 200);
}

/// A region of ours is deregistered while the device reads it: what was not done by then fails here, and the peer can be reached again.
fn ours_goes(near: &mut Near) {
    let (qp, there) = near.pair();
    let region = Side::region(&near.side.device, &near.side.pd);
    failed(near.puts(&qp, &there, region, |_, region| {
        region.deregister(PATIENCE).expect("deregistered");
    }));
    let seen = syndrome(&qp);
    // soft-RoCE calls it an error of the operation.
    assert!(LOCAL.contains(&seen), "syndrome {seen:#04x}");
    let (qp, there) = near.pair();
    near.writes(&qp, &there, 300);
}

/// The peer deregisters what is written: its device refuses what comes after.
fn theirs_goes(near: &mut Near) {
    let (qp, there) = near.pair();
    let region = Side::region(&near.side.device, &near.side.pd);
    failed(near.puts(&qp, &there, region, |near, _| {
        assert_eq!(near.line.ask("free"), "free");
    }));
    assert_eq!(syndrome(&qp), REMOTE_ACCESS);
    let (qp, there) = near.pair();
    near.writes(&qp, &there, 400);
}

/// The peer's queue pair is destroyed: the device gives up after its retries.
fn gone(near: &mut Near) {
    let (qp, there) = near.pair();
    assert_eq!(near.line.ask("destroy"), "destroyed");
    failed(put(&qp, remote(&there, 8), 1));
    assert_eq!(syndrome(&qp), RETRIES);
    let (qp, there) = near.pair();
    near.writes(&qp, &there, 500);
}
