//! What every RDMA device must do for queue pairs: two of them over one device's own port, posted to by this CPU, step by step.
//!
//! Bytes go out of the device and in again, so that one host suffices. Each step says what it saw; a step that fails says what was expected,
//! and the next begins with new queue pairs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use doorbell::cpu::{CpuQueue, Post, Ticket, deadline, local, remote};
use doorbell::device_api::{Error as DeviceError, Fetch, Key};
use doorbell::{
    Access, Config, CpuQp, Device, Endpoint, GpuSelect, HcaCores, LinkKind, Mr, Pd, Place, Qp,
    QpState, RemoteMr, Reset,
};

use super::{LeftOut, Noted, Step, heard, port};

/// Bytes of each region: the largest message.
const LARGEST: usize = 8 << 20;
/// Receives of a queue.
const RECEIVES: u32 = 16;
/// Slots of a send queue.
const DEPTH: u32 = 256;
/// Requests under way at most where there are many: a post never waits for room, so that every wait is one that looks for progress.
const UNDER_WAY: usize = 200;
/// A device may take four times what it was set to before each of its repetitions (IBA 9.7.6.1.3), and is silent meanwhile.
const GIVING_UP: Duration = Duration::from_secs(20);
/// Bytes a second below which a long message counts as not moving: its device tells nothing until its end.
const SLOWEST: u64 = 256 << 10;
/// Steps on a device that does as it should.
pub(super) const STEPS: usize = 10;

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amount {
    pub(crate) signals: u64,
    /// A step fails when nothing happens for so long.
    pub(crate) timeout: Duration,
    /// No step begins later; the signals take no more than a part of what is left.
    pub(crate) until: Instant,
    /// The device has some.
    pub(crate) atomics: bool,
}

/// Both sides: devices of this library over one port of an RDMA device.
struct Bench {
    a: Side,
    b: Side,
    timeout: Duration,
}

/// One side.
struct Side {
    device: Device,
    pd: Pd,
    source: Mr,
    target: Mr,
}

impl Side {
    fn new(port: &str) -> Result<Self> {
        let config = Config {
            gpu: Some(GpuSelect::Host),
            hca_cores: Some(HcaCores::Threads(1)),
            verbs: Some(port.to_owned()),
            ..Config::default()
        };
        let device = Device::builder().config(config).open()?;
        let pd = device.pd()?;
        let region = || -> Result<Mr> {
            Ok(pd.register(&device.alloc(Place::Host, LARGEST)?, Access::ALL)?)
        };
        let (source, target) = (region()?, region()?);
        Ok(Self {
            device,
            pd,
            source,
            target,
        })
    }

    fn half(&self) -> Result<(Qp<Reset>, Endpoint)> {
        let qp = self.pd.qp().depth(DEPTH).receive_queue(RECEIVES).build()?;
        let at = qp.endpoint(LinkKind::Verbs, &[])?;
        Ok((qp, Endpoint::from_bytes(&at.to_bytes())?))
    }
}

impl Bench {
    fn new(port: &str, timeout: Duration) -> Result<Self> {
        Ok(Self {
            a: Side::new(port)?,
            b: Side::new(port)?,
            timeout,
        })
    }

    /// Two connected queue pairs.
    fn pair(&self) -> Result<(Qp, Qp)> {
        let ((a, at_a), (b, at_b)) = (self.a.half()?, self.b.half()?);
        let a = a.connect(&self.a.device.destination(&at_b)?)?;
        let b = b.connect(&self.b.device.destination(&at_a)?)?;
        Ok((a, b))
    }

    fn there(&self) -> Result<RemoteMr> {
        Ok(self.b.target.remote_over(LinkKind::Verbs)?)
    }

    /// How to post: there is room, so no wait is meant.
    fn how(&self) -> Post {
        Post::by(deadline(self.timeout))
    }

    /// How long a message of so many bytes may go without a sign.
    fn patience(&self, bytes: u64) -> Duration {
        self.timeout + Duration::from_secs(bytes / SLOWEST)
    }
}

/// What a queue pair has done, as numbers that change while its device works.
fn done_by(qp: &Qp) -> [u64; 4] {
    let counters = qp.counters();
    [
        counters.wqes,
        counters.bytes,
        counters.cqes,
        counters.flushed,
    ]
}

/// Waits for `ticket` for as long as the device gets on: the time-out is about nothing happening.
fn settle(
    qp: &Qp,
    q: &CpuQueue<'_>,
    ticket: Ticket,
    patience: Duration,
) -> Result<(), DeviceError> {
    let (mut seen, mut since, mut polls) = (done_by(qp), Instant::now(), 0u32);
    while !q.poll(ticket)? {
        polls = polls.wrapping_add(1);
        if !polls.is_multiple_of(64) {
            std::hint::spin_loop();
            continue;
        }
        let now = done_by(qp);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if since.elapsed() >= patience {
            // A wait that gives up says in the log what is missing.
            return q.wait(ticket, deadline(Duration::ZERO));
        }
        // The engine may have but this core.
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}

/// Makes room for one more request: where as many are under way as may be, the oldest is waited for.
fn room(
    under_way: &mut VecDeque<Ticket>,
    settled: impl FnOnce(Ticket) -> Result<()>,
) -> Result<()> {
    match under_way.len() {
        UNDER_WAY => under_way.pop_front().map_or(Ok(()), settled),
        _ => Ok(()),
    }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed as u8 ^ (i >> 8) as u8)
        .collect()
}

fn read(region: &Mr, at: usize, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    region.read(at, &mut bytes)?;
    Ok(bytes)
}

fn told(error: DeviceError) -> anyhow::Error {
    anyhow!(crate::device_error::words(error.code()))
}

/// Runs all steps; what cannot even begin is the first step's failure.
///
/// # Errors
/// Those of `note`, which is given each step when it has ended.
pub(crate) fn run(
    port: &mut port::Watched<'_>,
    amount: Amount,
    note: &mut dyn FnMut(Noted) -> Result<()>,
) -> Result<()> {
    type Check = fn(&Bench, Amount) -> Result<String>;
    let checks: [(&'static str, Check); STEPS - 1] = [
        ("sizes", sizes),
        ("inline data and atomics", words),
        ("many in flight", many),
        ("messages", messages),
        ("a receive that comes late", late),
        ("reset and connect again", again),
        ("memory that is not granted", refused),
        ("memory that goes under traffic", under_traffic),
        ("a peer that is gone", gone),
    ];
    let device = port.name;
    let (bench, step) = timed("opening, memory, queue pairs", port, || {
        let bench = Bench::new(device, amount.timeout)?;
        // Whatever the device may refuse for want of resources is refused here.
        for side in [&bench.a, &bench.b] {
            side.source.remote_over(LinkKind::Verbs)?;
            side.target.remote_over(LinkKind::Verbs)?;
        }
        bench.pair()?;
        let said = bench.a.device.verbs_describe()?;
        Ok((bench, said))
    });
    note(Noted::Step(step))?;
    let Some(bench) = bench else { return Ok(()) };
    for (name, check) in checks {
        if Instant::now() >= amount.until {
            note(Noted::LeftOut(LeftOut::for_time(name)))?;
            continue;
        }
        let (_, step) = timed(name, port, || Ok(((), check(&bench, amount)?)));
        note(Noted::Step(step))?;
    }
    Ok(())
}

/// One step. One that fails is the port's failure where that is not up; what the log said meanwhile belongs to it.
fn timed<T>(
    name: &'static str,
    port: &mut port::Watched<'_>,
    f: impl FnOnce() -> Result<(T, String)>,
) -> (Option<T>, Step) {
    let started = Instant::now();
    let ended = match port.still_down() {
        Some(why) => Err(why),
        None => f().map_err(|e| port.because(crate::words(&e))),
    };
    let (value, ok, said) = match ended {
        Ok((value, said)) => (Some(value), true, said),
        Err(said) => (None, false, said),
    };
    let step = Step {
        name: name.to_owned(),
        said,
        output: heard::take(),
        ok,
        millis: started.elapsed().as_millis() as u64,
    };
    (value, step)
}

/// WRITE and READ of everything from nothing to eight megabytes.
fn sizes(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, _other) = bench.pair()?;
    let (mut cpu, there) = (CpuQp::new(&qp)?, bench.there()?);
    let q = cpu.queue()?;
    let all = [
        0,
        1,
        3,
        7,
        8,
        9,
        64,
        255,
        256,
        257,
        1023,
        1024,
        1025,
        4095,
        4096,
        4097,
        65_535,
        65_536,
        1 << 20,
        (1 << 20) + 1,
        LARGEST,
    ];
    for len in all {
        let sent = pattern(len, len);
        bench.a.source.write(0, &sent)?;
        bench
            .b
            .target
            .write(0, &vec![0x55; (len + 8).min(LARGEST)])?;
        bench
            .a
            .target
            .write(0, &vec![0x55; (len + 8).min(LARGEST)])?;
        let (how, patience) = (bench.how(), bench.patience(len as u64));
        let ticket = q.put(
            remote(&there, 0),
            local(&bench.a.source, 0, len as u64),
            how,
        );
        ticket
            .and_then(|t| settle(&qp, &q, t, patience))
            .map_err(told)
            .with_context(|| format!("put of {len}"))?;
        ensure!(
            read(&bench.b.target, 0, len)? == sent,
            "a put of {len} bytes brought others"
        );
        let ticket = q.get(
            remote(&there, 0),
            local(&bench.a.target, 0, len as u64),
            how,
        );
        ticket
            .and_then(|t| settle(&qp, &q, t, patience))
            .map_err(told)
            .with_context(|| format!("get of {len}"))?;
        ensure!(
            read(&bench.a.target, 0, len)? == sent,
            "a get of {len} bytes brought others"
        );
        let after = 8.min(LARGEST - len);
        ensure!(
            read(&bench.b.target, len, after)? == vec![0x55; after],
            "something behind a put of {len} bytes was written"
        );
    }
    Ok(format!(
        "{} sizes up to {LARGEST} bytes, both ways",
        all.len()
    ))
}

/// Inline data, atomics, NOP, DUMP.
fn words(bench: &Bench, amount: Amount) -> Result<String> {
    let (qp, _other) = bench.pair()?;
    let (mut cpu, there) = (CpuQp::new(&qp)?, bench.there()?);
    let q = cpu.queue()?;
    let done = |t: Result<Ticket, DeviceError>| {
        t.and_then(|t| settle(&qp, &q, t, bench.timeout))
            .map_err(told)
    };
    done(q.put_inline(remote(&there, 3000), [1, 2, 3, 4, 5, 6, 7], 25, bench.how()))?;
    let expected = [1u32, 2, 3, 4, 5, 6, 7].map(u32::to_le_bytes).concat();
    ensure!(
        read(&bench.b.target, 3000, 25)? == expected[..25],
        "inline bytes differ"
    );
    done(q.nop(bench.how()))?;
    done(q.dump(bench.how()))?;
    if !amount.atomics {
        return Ok("inline data; this device has no atomics".to_owned());
    }
    bench.b.target.memory().store(64, 5)?;
    done(q.signal_add(remote(&there, 64), 3, bench.how()))?;
    let old = Fetch {
        addr: bench.a.source.addr(),
        key: Key(bench.a.source.key()),
    };
    done(q.fetch_add(remote(&there, 64), 2, old, bench.how()))?;
    ensure!(
        bench.a.source.memory().load(0)? == 8,
        "FETCH_ADD returned another value"
    );
    done(q.compare_swap(remote(&there, 64), 10, 99, old, bench.how()))?;
    done(q.compare_swap(remote(&there, 64), 10, 7, old, bench.how()))?;
    let (old, new) = (
        bench.a.source.memory().load(0)?,
        bench.b.target.memory().load(64)?,
    );
    ensure!(
        (old, new) == (99, 99),
        "COMPARE_SWAP left {new} and returned {old}"
    );
    bench.b.target.memory().store(64, 0)?;
    // A device that is slow, but gets on, counts as many as there is time for.
    let left = amount.until.saturating_duration_since(Instant::now());
    let enough = Instant::now() + left / 3;
    let mut under_way = VecDeque::with_capacity(UNDER_WAY);
    let mut count = 0;
    while count < amount.signals && (count % 64 != 0 || Instant::now() < enough) {
        room(&mut under_way, |oldest| done(Ok(oldest)))?;
        let posted = q.signal_add(remote(&there, 64), 1, bench.how());
        under_way.push_back(posted.map_err(told)?);
        count += 1;
    }
    done(q.nop(bench.how()))?;
    let sum = bench.b.target.memory().load(64)?;
    ensure!(sum == count, "{count} signals added up to {sum}");
    Ok(match count == amount.signals {
        true => format!("{count} signals, each once"),
        false => format!(
            "{count} of {} signals, as many as there was time for, each once",
            amount.signals
        ),
    })
}

/// Order: the last of many writes to one word is what stays, and a signal comes after what was put before it.
fn many(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, _other) = bench.pair()?;
    let (mut cpu, there) = (CpuQp::new(&qp)?, bench.there()?);
    let q = cpu.queue()?;
    let count = 3000u64;
    let mut under_way = VecDeque::with_capacity(UNDER_WAY);
    for i in 0..count {
        room(&mut under_way, |oldest| {
            settle(&qp, &q, oldest, bench.timeout).map_err(told)
        })?;
        let posted = q.put_value(remote(&there, 128), i, 8, bench.how());
        under_way.push_back(posted.map_err(told)?);
    }
    q.nop(bench.how())
        .and_then(|t| settle(&qp, &q, t, bench.timeout))
        .map_err(told)?;
    let last = bench.b.target.memory().load(128)?;
    ensure!(last == count - 1, "the last of {count} writes is {last}");
    qp.check()?;
    Ok(format!("{count} writes in order"))
}

/// SEND, with immediate, into several receives.
fn messages(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, other) = bench.pair()?;
    let (mut one, mut two) = (CpuQp::new(&qp)?, CpuQp::new(&other)?);
    let (q, (_, recv)) = (one.queue()?, two.queues()?);
    let laps = 100u32;
    for lap in 0..laps {
        let len = [0u64, 1, 100, 5000, 70_000][lap as usize % 5];
        let sent = pattern(lap as usize, len as usize);
        bench.a.source.write(0, &sent)?;
        let by = deadline(bench.timeout);
        let into = local(&bench.b.target, 0, 80_000);
        let ticket = recv.recv_post(into, by).map_err(told)?;
        let posted = q
            .send_imm(local(&bench.a.source, 0, len), lap, Post::by(by))
            .map_err(told)?;
        let got = recv.recv_wait(ticket, by).map_err(told)?;
        q.wait(posted, by).map_err(told)?;
        ensure!(
            (u64::from(got.bytes), got.imm) == (len, lap),
            "message {lap} has {} bytes and immediate {}",
            got.bytes,
            got.imm
        );
        ensure!(
            read(&bench.b.target, 0, len as usize)? == sent,
            "message {lap} brought other bytes"
        );
    }
    Ok(format!("{laps} messages up to 70000 bytes"))
}

/// A message waits at the device until there is a receive (RNR).
fn late(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, other) = bench.pair()?;
    let (mut one, mut two) = (CpuQp::new(&qp)?, CpuQp::new(&other)?);
    let (q, (_, recv)) = (one.queue()?, two.queues()?);
    let by = deadline(bench.timeout);
    let posted = q
        .send(local(&bench.a.source, 0, 8), Post::by(by))
        .map_err(told)?;
    std::thread::sleep(Duration::from_millis(100));
    ensure!(
        !q.poll(posted).map_err(told)?,
        "a message was taken without a receive"
    );
    let ticket = recv
        .recv_post(local(&bench.b.target, 0, 8), by)
        .map_err(told)?;
    recv.recv_wait(ticket, by).map_err(told)?;
    q.wait(posted, by).map_err(told)?;
    Ok("held until the receive was there".to_owned())
}

/// The same queue pairs, connected twice.
fn again(bench: &Bench, _: Amount) -> Result<String> {
    let (a, b) = bench.pair()?;
    let (a, b) = (a.reset(bench.timeout)?, b.reset(bench.timeout)?);
    let (at_a, at_b) = (
        a.endpoint(LinkKind::Verbs, &[])?,
        b.endpoint(LinkKind::Verbs, &[])?,
    );
    let a = a.connect(&bench.a.device.destination(&at_b)?)?;
    let _b = b.connect(&bench.b.device.destination(&at_a)?)?;
    put_one(bench, &a, 0x4711)?;
    Ok("reset, connected again, written".to_owned())
}

fn put_one(bench: &Bench, qp: &Qp, value: u64) -> Result<()> {
    let there = bench.there()?;
    let mut cpu = CpuQp::new(qp)?;
    let q = cpu.queue()?;
    let by = deadline(bench.timeout);
    let ticket = q.put_value(remote(&there, 8), value, 8, Post::by(by));
    ticket.and_then(|t| q.wait(t, by)).map_err(told)?;
    let got = bench.b.target.memory().load(8)?;
    ensure!(got == value, "{value:#x} was written, {got:#x} is there");
    Ok(())
}

/// Waits until a queue pair is in error, and gives its syndrome.
fn syndrome(qp: &Qp, timeout: Duration) -> Result<u8> {
    let until = Instant::now() + timeout;
    while qp.state() != QpState::Error {
        ensure!(Instant::now() < until, "no error within {timeout:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(qp.error().context("an error without a word")?.syndrome().0)
}

/// A wrong key fails at the peer, and both sides learn it; what was before it is done.
fn refused(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, other) = bench.pair()?;
    let there = bench.there()?;
    let wrong = RemoteMr {
        key: there.key ^ 0x5a00,
        ..there
    };
    {
        let (mut one, mut two) = (CpuQp::new(&qp)?, CpuQp::new(&other)?);
        let (q, (_, recv)) = (one.queue()?, two.queues()?);
        let by = deadline(bench.timeout);
        let how = Post::by(by);
        recv.recv_post(local(&bench.b.target, 0, 8), by)
            .map_err(told)?;
        q.put_value(remote(&there, 8), 77, 8, how).map_err(told)?;
        let bad = q.put_value(remote(&wrong, 8), 78, 8, how).map_err(told)?;
        match q.wait(bad, by) {
            Ok(()) => bail!("a WRITE with a wrong key completed"),
            Err(DeviceError::TIMED_OUT) => bail!("a WRITE with a wrong key has no end"),
            Err(_) => {}
        }
    }
    let seen = syndrome(&qp, bench.timeout)?;
    ensure!(
        seen == 0x13,
        "syndrome {seen:#04x} instead of 0x13 (remote access)"
    );
    ensure!(
        bench.b.target.memory().load(8)? == 77,
        "the WRITE before it is not there"
    );
    // Over SRD what is refused fails its initiator alone.
    let end = other.endpoint(LinkKind::Verbs, &[])?.verbs;
    let theirs = match end.is_some_and(|v| v.end.srd.is_some()) {
        true => "nothing".to_owned(),
        false => format!("syndrome {:#04x}", syndrome(&other, bench.timeout)?),
    };
    let (a, b) = bench.pair()?;
    put_one(bench, &a, 0x600d)?;
    drop(b);
    Ok(format!(
        "remote access error here, {theirs} there; new queue pairs work"
    ))
}

/// A region is deregistered while the device works with it.
fn under_traffic(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, _other) = bench.pair()?;
    let there = bench.there()?;
    let memory = bench.a.device.alloc(Place::Host, 1 << 20)?;
    let region = bench.a.pd.register(&memory, Access::ALL)?;
    let mut posted = 0;
    {
        let mut cpu = CpuQp::new(&qp)?;
        let q = cpu.queue()?;
        let how = bench.how();
        let from = local(&region, 0, 1 << 20);
        for _ in 0..40 {
            q.put(remote(&there, 0), from, how).map_err(told)?;
            posted += 1;
        }
        drop(region);
        drop(memory);
        // Whatever was not done by then fails, and nothing hangs.
        let patience = bench.patience(40 << 20);
        let end = q
            .nop(bench.how())
            .and_then(|t| settle(&qp, &q, t, patience));
        if let Err(DeviceError::TIMED_OUT) = end {
            bail!("{posted} puts have no end");
        }
    }
    let how = match qp.error() {
        None => "all were done before".to_owned(),
        Some(fault) => {
            let seen = fault.syndrome().0;
            // soft-RoCE calls it an error of the operation.
            ensure!(
                matches!(seen, 0x02 | 0x04),
                "syndrome {seen:#04x} instead of 0x04 (local protection)"
            );
            format!("the rest failed, syndrome {seen:#04x}")
        }
    };
    let (a, _b) = bench.pair()?;
    put_one(bench, &a, 0xfade)?;
    Ok(format!("{posted} puts of 1 MiB: {how}"))
}

/// The peer's queue pair is destroyed: the device gives up after its retries.
fn gone(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, other) = bench.pair()?;
    other.destroy(bench.timeout)?;
    let there = bench.there()?;
    let (started, patience) = (Instant::now(), bench.timeout.max(GIVING_UP));
    {
        let mut cpu = CpuQp::new(&qp)?;
        let q = cpu.queue()?;
        let ticket = q
            .put_value(remote(&there, 8), 1, 8, bench.how())
            .map_err(told)?;
        match settle(&qp, &q, ticket, patience) {
            Ok(()) => bail!("a WRITE to a queue pair that is gone completed"),
            Err(DeviceError::TIMED_OUT) => bail!("no error within {patience:?}"),
            Err(_) => {}
        }
    }
    let seen = syndrome(&qp, patience)?;
    ensure!(
        seen == 0x15,
        "syndrome {seen:#04x} instead of 0x15 (retries exceeded)"
    );
    Ok(format!(
        "given up after {:.1} s",
        started.elapsed().as_secs_f64()
    ))
}
