//! From arguments to cases: every combination that will be measured, checked for sense first.
//! What cannot work is refused here, before anything is set up, with the option to change.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::args::{CqMode, Handler, Initiator, Link, PerfArgs, Place, Sharing, Test};

/// Payload memory that a checked round may take on each side.
const CHECK_BYTES: u64 = 32 << 20;
/// Messages that a checked round has at most, over all threads.
const CHECK_MESSAGES: u64 = 1 << 20;
/// The same for `--quick`: several rounds, with new bytes each, even of slow paths.
const QUICK_BYTES: u64 = 16 << 20;
const QUICK_MESSAGES: u64 = 1 << 17;
/// What an unchecked run cycles through, per thread: perftest's cycle buffer.
const CYCLE_BYTES: u64 = 4096;
/// The same for messages that take receives, where they are longer.
const RECEIVE_BYTES: u64 = 8 << 20;
/// Payload memory on each side, checked or not.
const MAX_BYTES: u64 = 4 << 30;
/// Threads that `--initiator cpu` and the host GPU may be asked for.
const MAX_THREADS: u64 = 1 << 20;

/// When a case is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    /// So many messages a thread (samples, for latencies).
    Iters(u64),
    /// So long.
    Time(Duration),
}

/// One line of the result table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) test: Test,
    pub(crate) initiator: Initiator,
    /// The kernels of `--module` post, not ours: the file's name.
    pub(crate) foreign: Option<String>,
    pub(crate) link: Link,
    /// Payload memory at the target and at the initiator.
    pub(crate) mem: Place,
    pub(crate) local_mem: Place,
    pub(crate) queue_mem: Place,
    pub(crate) sharing: Sharing,
    pub(crate) handler: Handler,
    pub(crate) cq: CqMode,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) qps: u32,
    pub(crate) depth: u32,
    pub(crate) batch: u32,
    pub(crate) size: u64,
    pub(crate) limit: Limit,
    pub(crate) check: bool,
    /// Say what the engine did.
    pub(crate) counters: bool,
    /// Rounds are small, and there are no more after a second.
    pub(crate) quick: bool,
    /// Flip a byte before comparing, so that the check must fail.
    pub(crate) sabotage: bool,
    pub(crate) baseline: bool,
    pub(crate) timeout: Duration,
    pub(crate) seed: u64,
}

impl Case {
    /// Threads of the whole grid.
    pub(crate) fn grid(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.threads)
    }

    /// Messages of a thread's window, a power of two: each has a place of its own there.
    pub(crate) fn places(&self) -> u64 {
        let stride = self.stride();
        let most = if self.check {
            let (bytes, messages) = if self.quick {
                (QUICK_BYTES, QUICK_MESSAGES)
            } else {
                (CHECK_BYTES, CHECK_MESSAGES)
            };
            (bytes / self.grid() / stride).clamp(1, (messages / self.grid()).max(1))
        } else if self.test == Test::SendBw {
            // A receive of its own for each of those to come, or every message waits until the one before was taken.
            (CYCLE_BYTES / stride)
                .max(8.min(RECEIVE_BYTES / stride))
                .max(1)
        } else {
            (CYCLE_BYTES / stride).max(1)
        };
        let most = 1 << most.ilog2();
        match self.limit {
            Limit::Iters(n) if self.check => most.min(n.next_power_of_two()),
            _ => most,
        }
    }

    /// Queue pairs that are posted to; the others are idle.
    pub(crate) fn posters(&self) -> usize {
        (match (self.initiator, self.sharing) {
            (_, Sharing::Gpu) => 1,
            (Initiator::Proxy, _) | (_, Sharing::Block) => self.blocks,
            (_, Sharing::Exclusive) => self.blocks * self.threads,
        }) as usize
    }

    /// What progress is shown for.
    pub(crate) fn label(&self) -> String {
        format!(
            "{} {} {}x{} {}",
            self.test.name(),
            self.who(),
            self.blocks,
            self.threads,
            crate::units::size(self.size)
        )
    }

    /// Bytes from one message's place to the next.
    pub(crate) fn stride(&self) -> u64 {
        if self.test == Test::AtomicRate {
            8
        } else {
            self.size
        }
    }

    /// What the row is called where initiators are listed.
    pub(crate) fn who(&self) -> &'static str {
        if self.foreign.is_some() {
            "module"
        } else {
            self.initiator.name()
        }
    }
}

/// Every case of a run, in the order measured: for each number of blocks and each size, all
/// initiators one after the other, so that what is compared was measured in the same minute.
pub(crate) fn cases(args: &PerfArgs, defaults: &Defaults, seed: u64) -> Result<Vec<Case>> {
    let sizes = match &args.size {
        Some(list) => list.0.clone(),
        None => vec![default_size(args.test)],
    };
    let mut out = Vec::new();
    for &blocks in &args.blocks.0 {
        for &size in &sizes {
            for &initiator in &args.initiator {
                let case = case(args, defaults, initiator, blocks as u32, size, seed)?;
                if let Some(module) = &args.module
                    && initiator != Initiator::Cpu
                {
                    let mut foreign = case.clone();
                    let name = module.file_name().unwrap_or(module.as_os_str());
                    foreign.foreign = Some(name.to_string_lossy().into_owned());
                    out.extend([case, foreign]);
                } else {
                    out.push(case);
                }
            }
        }
    }
    Ok(out)
}

/// What the host library's settings say where no argument does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) depth: u32,
    /// Nobody chose that depth.
    pub(crate) depth_free: bool,
    pub(crate) handler: Handler,
}

/// Slots that many threads on one QP need so that they wait for completions of earlier messages and
/// not for each other: four batches a thread.
fn roomy(defaults: &Defaults, sharers: u64, batch: u64) -> u32 {
    let slots = (4 * sharers * batch).next_power_of_two().min(32_768) as u32;
    if defaults.depth_free {
        slots.max(defaults.depth)
    } else {
        defaults.depth
    }
}

fn default_size(test: Test) -> u64 {
    match test {
        Test::Forward => 32,
        _ => 8,
    }
}

fn case(
    args: &PerfArgs,
    defaults: &Defaults,
    initiator: Initiator,
    blocks: u32,
    size: u64,
    seed: u64,
) -> Result<Case> {
    let test = args.test;
    let check = args.check || (args.quick && !args.no_check);
    let threads = args.threads.unwrap_or(match args.sharing {
        Sharing::Exclusive => 1,
        Sharing::Block | Sharing::Gpu => 32,
    });
    let (blocks, threads) = if test.is_latency() {
        // One message at a time: one poster (and, for ping-pongs, one on the other side).
        if args.blocks.0 != [1] || args.threads.is_some_and(|t| t != 1) {
            bail!(
                "{} measures one message at a time: leave --blocks and --threads at 1",
                test.name()
            );
        }
        (1, 1)
    } else {
        (blocks, threads)
    };
    let grid = u64::from(blocks) * u64::from(threads);
    if grid > MAX_THREADS {
        bail!(
            "{blocks} blocks of {threads} threads are {grid} threads: at most {MAX_THREADS}; lower --blocks or --threads"
        );
    }
    let sharing = if test.is_latency() {
        Sharing::Exclusive
    } else {
        args.sharing
    };
    let qps = qps(args, initiator, sharing, blocks, threads)?;
    let batch = batch(args, initiator, args.depth.unwrap_or(defaults.depth))?;
    let sharers = match sharing {
        Sharing::Exclusive => 1,
        Sharing::Block => threads.into(),
        Sharing::Gpu => grid,
    };
    let depth = args
        .depth
        .unwrap_or_else(|| roomy(defaults, sharers, batch.into()));
    let handler = handler(args, defaults, initiator)?;
    sense(args, initiator, size)?;
    let limit = match (args.iters, args.secs) {
        (Some(n), _) => Limit::Iters(n),
        (_, Some(t)) => Limit::Time(t),
        _ if args.quick => Limit::Iters(quick_iters(test, size, grid)),
        _ => Limit::Time(Duration::from_secs(1)),
    };
    let case = Case {
        test,
        initiator,
        foreign: None,
        link: args.link.kind,
        mem: args.mem,
        local_mem: args.local_mem.unwrap_or(args.mem),
        queue_mem: args.queue_mem.unwrap_or(Place::Host),
        sharing,
        handler,
        cq: args.cq.unwrap_or(CqMode::Collapsed),
        blocks,
        threads,
        qps,
        depth,
        batch,
        size,
        limit,
        check,
        counters: args.counters,
        quick: args.quick,
        sabotage: args.sabotage,
        baseline: !args.no_baseline,
        timeout: args.timeout,
        seed,
    };
    let bytes = case.places() * case.stride() * case.grid();
    if bytes > MAX_BYTES {
        bail!(
            "{grid} threads with messages of {size} bytes take {bytes} bytes a side: at most {MAX_BYTES}; lower --size, --blocks or --threads"
        );
    }
    Ok(case)
}

fn qps(
    args: &PerfArgs,
    initiator: Initiator,
    sharing: Sharing,
    blocks: u32,
    threads: u32,
) -> Result<u32> {
    let (needed, each) = match (initiator, sharing) {
        (_, Sharing::Gpu) => (1, "all threads share one"),
        (Initiator::Proxy, _) | (_, Sharing::Block) => (blocks, "every block has its own"),
        (_, Sharing::Exclusive) => (blocks * threads, "every thread has its own"),
    };
    // More queue pairs than are posted to are idle ones: what they cost is worth measuring.
    let qps = args.qps.unwrap_or(needed);
    if qps < needed {
        bail!(
            "--qps {qps} is too few: with --sharing {} {each}, so {blocks} blocks of {threads} threads need {needed}",
            sharing.name()
        );
    }
    if qps > 65_536 {
        bail!("{qps} QPs are more than 65536: lower --blocks, --threads or --qps");
    }
    Ok(qps)
}

/// Messages of `send-bw` that share one ring (`doorbell_kernels`, messages): a queue has to hold them.
const BURST: u32 = 16;

fn batch(args: &PerfArgs, initiator: Initiator, depth: u32) -> Result<u32> {
    let name = args.test.name();
    if args.test == Test::SendBw && depth < BURST {
        bail!(
            "{name} rings once for {BURST} messages, which a queue of {depth} slots cannot hold: raise --depth to {BURST} or more"
        );
    }
    let batched = matches!(args.test, Test::PutBw | Test::Post) && initiator != Initiator::Proxy;
    let batch = match (args.batch, batched) {
        (None, true) => 32.min((depth / 2).max(1)),
        (None, false) | (Some(1), _) => 1,
        (Some(_), false) if initiator == Initiator::Proxy && args.initiator.len() > 1 => 1,
        (Some(_), false) if initiator == Initiator::Proxy => {
            bail!("the proxy rings as it finds commands: leave --batch out with --initiator proxy")
        }
        (Some(n), false) => {
            bail!("{name} posts one message a doorbell: leave --batch {n} out")
        }
        (Some(n), true) => n,
    };
    if batch > depth {
        bail!(
            "a batch of {batch} does not fit a queue of {depth} slots: lower --batch or raise --depth"
        );
    }
    Ok(batch)
}

fn handler(args: &PerfArgs, defaults: &Defaults, initiator: Initiator) -> Result<Handler> {
    match (initiator, args.handler) {
        (Initiator::Assisted, None | Some(Handler::Producer)) => Ok(Handler::Producer),
        (Initiator::Assisted, Some(other)) => bail!(
            "--initiator assisted means that the CPU rings: it takes --handler producer, not {}",
            other.name()
        ),
        (_, Some(handler)) => Ok(handler),
        (_, None) => Ok(defaults.handler),
    }
}

/// Combinations that mean nothing.
fn sense(args: &PerfArgs, initiator: Initiator, size: u64) -> Result<()> {
    let name = args.test.name();
    match args.test {
        Test::Post => {
            if initiator == Initiator::Proxy {
                bail!(
                    "post measures a kernel's own posting: --initiator proxy does not post there"
                );
            }
            if args.link.kind != Link::Loopback {
                bail!("post has no engine and so no link: leave --link out");
            }
        }
        Test::Forward => {
            if initiator != Initiator::Gpu {
                bail!("forward is answered by a kernel: leave --initiator at gpu");
            }
            if args.link.kind != Link::Loopback {
                bail!("forward measures the HCA of this process: leave --link out");
            }
            if size != 32 {
                bail!("forward sends 32 bytes and a flag: leave --size out");
            }
        }
        Test::SendBw => {
            if args.blocks.0 != [1] || args.threads.is_some_and(|t| t != 1) {
                bail!("{name} has one sender and one receiver: leave --blocks and --threads at 1");
            }
            if args.sharing != Sharing::Exclusive {
                bail!("{name} has one sender and one receiver: leave --sharing out");
            }
        }
        Test::AtomicRate if size != 8 && args.size.is_some() => {
            bail!("atomics have 8 bytes: leave --size out or at 8");
        }
        Test::PutLat | Test::SignalLat | Test::GetLat if !size.is_multiple_of(8) => {
            bail!("{name} moves words of 8 bytes: --size {size} is not a multiple of 8");
        }
        _ => {}
    }
    if initiator == Initiator::Proxy {
        if args.test != Test::PutBw {
            bail!("--initiator proxy serves put-bw only: {name} takes gpu, assisted or cpu");
        }
        if args.sharing == Sharing::Exclusive && args.threads.is_some_and(|t| t > 1) {
            bail!("the proxy has a command queue for each block: add --sharing block");
        }
    }
    if args.queue_mem == Some(Place::Gpu) && args.test != Test::Post {
        bail!("the engine reads queues in host memory: --queue-mem gpu is for post only");
    }
    if initiator == Initiator::Cpu && (args.mem == Place::Gpu || args.local_mem == Some(Place::Gpu))
    {
        bail!("--initiator cpu uses host memory: leave --mem and --local-mem at host");
    }
    Ok(())
}

/// Messages a thread that make a quick run of about a second on two cores, whatever the size.
fn quick_iters(test: Test, size: u64, grid: u64) -> u64 {
    if test.is_latency() {
        return 10_000;
    }
    let messages = (256u64 << 20) / size.max(256);
    (messages / grid).clamp(64, 1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn parse(text: &str) -> Result<Vec<Case>> {
        let all = ["doorbell", "perf"]
            .into_iter()
            .chain(text.split_whitespace());
        match Cli::try_parse_from(all)?.command {
            Command::Perf(args) => {
                let defaults = Defaults {
                    depth: 1024,
                    depth_free: true,
                    handler: Handler::Record,
                };
                cases(&args, &defaults, 1)
            }
            _ => unreachable!("the words begin with perf"),
        }
    }

    #[test]
    fn lists_multiply_and_compared_rows_are_neighbours() {
        let cases = parse("put-bw --blocks 1,2 --size 8,64 --initiator gpu,cpu").unwrap();
        let shapes: Vec<_> = cases
            .iter()
            .map(|c| (c.blocks, c.size, c.initiator))
            .collect();
        assert_eq!(shapes.len(), 8);
        assert_eq!(shapes[0], (1, 8, Initiator::Gpu));
        assert_eq!(shapes[1], (1, 8, Initiator::Cpu));
        assert_eq!(shapes[2], (1, 64, Initiator::Gpu));
        assert_eq!(shapes[7], (2, 64, Initiator::Cpu));
    }

    #[test]
    fn defaults_follow_the_sharing_mode() {
        let one = |text: &str| parse(text).unwrap().remove(0);
        let case = one("put-bw --blocks 4");
        assert_eq!((case.threads, case.qps, case.batch), (1, 4, 32));
        let case = one("put-bw --blocks 4 --sharing block");
        assert_eq!((case.threads, case.qps), (32, 4));
        let case = one("put-bw --blocks 4 --sharing gpu");
        assert_eq!((case.threads, case.qps), (32, 1));
        // Shared queues are deeper, unless somebody says how deep.
        assert_eq!(one("put-bw").depth, 1024);
        let many = "put-bw --sharing gpu --blocks 64 --batch 1";
        assert_eq!(one(many).depth, 8192);
        assert_eq!(one(&format!("{many} --depth 1024")).depth, 1024);
        let case = one("put-bw --qps 4096");
        assert_eq!((case.grid(), case.qps), (1, 4096));
        let case = one("put-lat");
        assert_eq!((case.batch, case.check), (1, false));
        assert_eq!(case.limit, Limit::Time(Duration::from_secs(1)));
        let case = one("put-bw --quick");
        assert!(case.check);
        assert!(matches!(case.limit, Limit::Iters(_)));
        assert!(!one("put-bw --quick --no-check").check);
        assert_eq!(
            one("put-bw --initiator assisted").handler,
            Handler::Producer
        );
    }

    #[test]
    fn windows_fit_their_budget() {
        for text in [
            "put-bw --check --size 8",
            "put-bw --check --size 1M",
            "put-bw --check --size 64M",
            "put-bw --check --size 64 --blocks 512 --threads 32 --sharing block",
            "put-bw --size 8",
            "put-bw --size 1M",
        ] {
            let case = parse(text).unwrap().remove(0);
            let messages = case.places();
            assert!(messages >= 1, "{text}");
            if messages > 1 {
                assert!(
                    messages * case.stride() * case.grid() <= CHECK_BYTES,
                    "{text}"
                );
            }
        }
        let case = parse("put-bw --check --iters 10").unwrap().remove(0);
        assert_eq!(case.places(), 16);
        for (size, places) in [("8", 512), ("64K", 8), ("1M", 8), ("4M", 2), ("64M", 1)] {
            let case = parse(&format!("send-bw --size {size}")).unwrap().remove(0);
            assert_eq!(case.places(), places, "{size}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_option_to_change() {
        for (text, part) in [
            ("put-bw --blocks 4 --qps 2", "need 4"),
            ("put-bw --batch 64 --depth 32", "raise --depth"),
            (
                "put-bw --initiator assisted --handler record",
                "--handler producer",
            ),
            ("put-lat --blocks 2", "leave --blocks"),
            ("put-lat --batch 4", "--batch"),
            ("post --initiator proxy", "proxy"),
            ("post --link shm", "--link"),
            ("forward --initiator cpu", "--initiator"),
            ("forward --size 64", "leave --size"),
            ("atomic-rate --size 16", "--size"),
            ("put-lat --size 4", "multiple of 8"),
            ("get-bw --batch 4", "leave --batch"),
            ("put-bw --initiator proxy --batch 4", "proxy rings"),
            ("put-bw --initiator proxy --threads 4", "--sharing block"),
            ("put-bw --queue-mem gpu", "post only"),
            ("put-bw --initiator cpu --mem gpu", "--local-mem"),
            ("get-bw --initiator proxy", "put-bw only"),
            ("put-bw --size 1G --blocks 64", "lower --size"),
            ("put-bw --blocks 65535 --threads 1024", "at most 1048576"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
