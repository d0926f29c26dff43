//! What every RDMA device must do for queue pairs: two of them over one device's own port, posted to by this CPU, step by step.
//!
//! Bytes go out of the device and in again, so that one host suffices. Each step says what it saw; a step that fails says what was expected,
//! and the next begins with new queue pairs.

use std::time::{Duration, Instant};

use super::Step;
use anyhow::{Context as _, Result, anyhow, bail, ensure};
use doorbell::cpu::{self, Post, deadline, local, remote};
use doorbell::device_api::{Error as DeviceError, Fetch, Key};
use doorbell::{
    Access, Config, CpuQp, Device, Endpoint, GpuSelect, HcaCores, LinkKind, Mr, Pd, Place, Qp,
    QpState, RemoteMr, Reset,
};

/// Bytes of each region: the largest message.
const LARGEST: usize = 8 << 20;
/// Receives of a queue.
const RECEIVES: u32 = 16;

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amount {
    pub(crate) signals: u64,
    pub(crate) timeout: Duration,
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
        let qp = self.pd.qp().depth(256).receive_queue(RECEIVES).build()?;
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
    anyhow!(crate::perf::explain_device(error.code()))
}

/// Runs all steps; what cannot even begin is the first step's failure.
///
/// # Errors
/// Those of `note`, which is given each step when it has ended.
pub(crate) fn run(
    port: &str,
    amount: Amount,
    note: &mut dyn FnMut(Step) -> Result<()>,
) -> Result<()> {
    type Check = fn(&Bench, Amount) -> Result<String>;
    let checks: [(&'static str, Check); 9] = [
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
    let (bench, step) = timed("opening, memory, queue pairs", || {
        let bench = Bench::new(port, amount.timeout)?;
        // Whatever the device may refuse for want of resources is refused here.
        for side in [&bench.a, &bench.b] {
            side.source.remote_over(LinkKind::Verbs)?;
            side.target.remote_over(LinkKind::Verbs)?;
        }
        bench.pair()?;
        let said = bench.a.device.verbs_describe()?;
        Ok((bench, said))
    });
    note(step)?;
    let Some(bench) = bench else { return Ok(()) };
    for (name, check) in checks {
        let (_, step) = timed(name, || Ok(((), check(&bench, amount)?)));
        note(step)?;
    }
    Ok(())
}

fn timed<T>(name: &'static str, f: impl FnOnce() -> Result<(T, String)>) -> (Option<T>, Step) {
    let started = Instant::now();
    let (value, ok, said) = match f() {
        Ok((value, said)) => (Some(value), true, said),
        Err(e) => (None, false, crate::words(&e)),
    };
    let step = Step {
        name: name.to_owned(),
        said,
        output: None,
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
        let by = deadline(bench.timeout);
        let how = Post::by(by);
        let ticket = q.put(
            remote(&there, 0),
            local(&bench.a.source, 0, len as u64),
            how,
        );
        ticket
            .and_then(|t| q.wait(t, by))
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
            .and_then(|t| q.wait(t, by))
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
    let by = deadline(bench.timeout + Duration::from_millis(amount.signals));
    let how = Post::by(by);
    let done = |t: Result<cpu::Ticket, DeviceError>| t.and_then(|t| q.wait(t, by)).map_err(told);
    done(q.put_inline(remote(&there, 3000), [1, 2, 3, 4, 5, 6, 7], 25, how))?;
    let expected = [1u32, 2, 3, 4, 5, 6, 7].map(u32::to_le_bytes).concat();
    ensure!(
        read(&bench.b.target, 3000, 25)? == expected[..25],
        "inline bytes differ"
    );
    done(q.nop(how))?;
    done(q.dump(how))?;
    if !amount.atomics {
        return Ok("inline data; this device has no atomics".to_owned());
    }
    bench.b.target.memory().store(64, 5)?;
    done(q.signal_add(remote(&there, 64), 3, how))?;
    let old = Fetch {
        addr: bench.a.source.addr(),
        key: Key(bench.a.source.key()),
    };
    done(q.fetch_add(remote(&there, 64), 2, old, how))?;
    ensure!(
        bench.a.source.memory().load(0)? == 8,
        "FETCH_ADD returned another value"
    );
    done(q.compare_swap(remote(&there, 64), 10, 99, old, how))?;
    done(q.compare_swap(remote(&there, 64), 10, 7, old, how))?;
    let (old, new) = (
        bench.a.source.memory().load(0)?,
        bench.b.target.memory().load(64)?,
    );
    ensure!(
        (old, new) == (99, 99),
        "COMPARE_SWAP left {new} and returned {old}"
    );
    bench.b.target.memory().store(64, 0)?;
    for _ in 0..amount.signals {
        q.signal_add(remote(&there, 64), 1, how).map_err(told)?;
    }
    done(q.nop(how))?;
    let sum = bench.b.target.memory().load(64)?;
    ensure!(
        sum == amount.signals,
        "{} signals added up to {sum}",
        amount.signals
    );
    Ok(format!("{} signals, each once", amount.signals))
}

/// Order: the last of many writes to one word is what stays, and a signal comes after what was put before it.
fn many(bench: &Bench, _: Amount) -> Result<String> {
    let (qp, _other) = bench.pair()?;
    let (mut cpu, there) = (CpuQp::new(&qp)?, bench.there()?);
    let q = cpu.queue()?;
    let by = deadline(bench.timeout);
    let how = Post::by(by);
    let count = 3000u64;
    for i in 0..count {
        q.put_value(remote(&there, 128), i, 8, how).map_err(told)?;
    }
    q.nop(how).and_then(|t| q.wait(t, by)).map_err(told)?;
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
        let how = Post::by(deadline(bench.timeout));
        let from = local(&region, 0, 1 << 20);
        for _ in 0..40 {
            q.put(remote(&there, 0), from, how).map_err(told)?;
            posted += 1;
        }
        drop(region);
        drop(memory);
        // Whatever was not done by then fails, and nothing hangs.
        let by = deadline(bench.timeout);
        let end = q.nop(Post::by(by)).and_then(|t| q.wait(t, by));
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
    let started = Instant::now();
    {
        let mut cpu = CpuQp::new(&qp)?;
        let q = cpu.queue()?;
        let by = deadline(bench.timeout);
        let ticket = q
            .put_value(remote(&there, 8), 1, 8, Post::by(by))
            .map_err(told)?;
        match q.wait(ticket, by) {
            Ok(()) => bail!("a WRITE to a queue pair that is gone completed"),
            Err(DeviceError::TIMED_OUT) => bail!("no error within {:?}", bench.timeout),
            Err(_) => {}
        }
    }
    let seen = syndrome(&qp, bench.timeout)?;
    ensure!(
        seen == 0x15,
        "syndrome {seen:#04x} instead of 0x15 (retries exceeded)"
    );
    Ok(format!(
        "given up after {:.1} s",
        started.elapsed().as_secs_f64()
    ))
}
