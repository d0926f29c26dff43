//! Launching a kernel, waiting for it while watching what it does, and reading what it left.
//!
//! No wait is for ever: when no work request completes for the time-out, or a watcher reports an
//! error (a dead peer), the queue pairs are failed, which gives every waiting kernel an answer.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use doorbell::{Memory, Place, Qp};
use doorbell_device::Failure;
use doorbell_gpu::{Dims, GpuError, LaunchOpts};
use doorbell_kernels::params::{Params, Status};
use doorbell_wire::{Syndrome, Vendor};

use super::bench::Bench;
use super::patience::Patience;

/// A kernel ends by itself; that nothing happens is noticed by who waits for it, who then fails its queue pairs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(3600);
/// Between two looks at the clock and at progress.
const SLICE: Duration = Duration::from_millis(20);
/// The kernel of the bare round trip.
pub(crate) const BARE: &str = "bare_echo";
/// What a kernel whose queue pairs were failed gets to end.
const GRACE: Duration = Duration::from_secs(3);
/// What closing waits for an engine or a peer that does not answer, once a run has failed: its time was up before.
const CLOSING: Duration = Duration::from_millis(500);

/// A launched kernel.
pub(crate) struct Running<'a> {
    bench: &'a Bench,
    launch: doorbell_gpu::Launch,
    /// For traces; dropped with this.
    _note: doorbell::KernelNote,
    /// This thread runs a caller-driven engine while it waits.
    drives: bool,
}

impl Bench {
    /// Starts a kernel of ours, or the one of the same name in the foreign module.
    ///
    /// # Safety
    /// `params` is what the kernel expects, and what it names (queue pairs, regions, status
    /// memory) is of this bench and outlives the kernel.
    pub(crate) unsafe fn start<P: Params>(
        &self,
        name: &str,
        foreign: bool,
        dims: Dims,
        params: &P,
    ) -> Result<Running<'_>> {
        let gpu = self.device.gpu();
        let kernel = match (&self.foreign, foreign) {
            (Some(image), true) => image.kernel(name)?,
            (None, true) => bail!("no foreign module was loaded"),
            (_, false) => gpu.kernel(name)?,
        };
        let opts = LaunchOpts {
            // A kernel without queues has no engine to drive, which would slow its polling.
            relax: match name {
                BARE => None,
                _ => self.device.provider().relax_hook(),
            },
            emulate_warp: self.device.settings().emulate_warp,
        };
        // SAFETY: passed on.
        let launch = unsafe { gpu.launch(&kernel, dims, params.as_bytes(), opts)? };
        Ok(Running {
            bench: self,
            launch,
            _note: self.device.note_kernel(name),
            // On the host GPU the kernel's own threads do.
            drives: self.device.is_caller_driven() && gpu.is_cuda(),
        })
    }
}

/// What is looked at while a kernel runs.
pub(crate) struct Watch<'a> {
    pub(crate) qps: &'a [Qp],
    /// Without a completion for so long, the run has failed.
    pub(crate) timeout: Duration,
    /// Called now and then with the number of work requests executed; its error ends the run.
    pub(crate) tick: &'a mut dyn FnMut(u64) -> Result<()>,
}

impl Watch<'_> {
    fn executed(&self) -> u64 {
        self.qps.iter().map(|qp| qp.counters().wqes).sum()
    }

    /// Packets that went or came for the first time: a large message makes progress before it completes. Asking takes the
    /// engine's time, so it is done when nothing has completed for a while.
    fn moved(&self) -> i128 {
        let of = |(name, count): (&str, u64)| match name {
            "tx_packets" | "rx_packets" => i128::from(count),
            "retransmitted_packets"
            | "duplicate_request"
            | "out_of_sequence"
            | "unexpected_packets"
            | "rnr_nak_retry_err" => -i128::from(count),
            _ => 0,
        };
        let all = self.qps.iter().flat_map(|qp| qp.roce_counters());
        all.map(of).sum()
    }
}

impl Running<'_> {
    /// Somebody else (a proxy's threads) runs a caller-driven engine.
    pub(crate) fn driven_by_others(mut self) -> Self {
        self.drives = false;
        self
    }

    /// Waits for the kernel's end; how long it ran.
    pub(crate) fn finish(mut self, watch: &mut Watch<'_>) -> Result<Duration> {
        let mut seen = watch.executed();
        let mut patience = Patience::new(watch.timeout);
        let own = [std::process::id()];
        let mut moved = None;
        loop {
            if let Some(took) = self.slice(self.drives)? {
                not_released(self.bench, watch.qps)?;
                return Ok(took);
            }
            let executed = watch.executed();
            if executed != seen {
                (seen, moved) = (executed, None);
                patience.restart();
            }
            let idle = patience.idle();
            if idle > watch.timeout && moved.is_some_and(|before| watch.moved() > before) {
                moved = None;
                patience.restart();
            } else if idle > watch.timeout / 2 && moved.is_none() {
                moved = Some(watch.moved());
            }
            let trouble = match (watch.tick)(executed) {
                Err(e) => Some(e),
                Ok(()) if patience.over(&own) => Some(stalled(self.bench, watch)),
                Ok(()) => None,
            };
            if let Some(trouble) = trouble {
                return Err(self.give_up(watch, trouble));
            }
        }
    }

    /// Do the kernel's own threads run a caller-driven engine now, while they wait?
    pub(crate) fn runs_engine(&mut self) -> bool {
        let theirs = !self.drives && self.bench.device.is_caller_driven();
        // How it failed is said by who waits for its end.
        theirs && matches!(self.launch.is_done(), Ok(false))
    }

    /// An error if the kernel has ended, which it should not have.
    pub(crate) fn still_runs(&mut self) -> Result<()> {
        if self.launch.is_done()? {
            bail!("the kernel ended early");
        }
        Ok(())
    }

    /// Waits for one slice; the time it ran, once it has ended.
    fn slice(&mut self, drive: bool) -> Result<Option<Duration>> {
        if !drive {
            return Ok(match self.launch.wait(SLICE) {
                Ok(took) => Some(took),
                Err(GpuError::TimedOut { .. }) => None,
                Err(e) => return Err(e.into()),
            });
        }
        let until = Instant::now() + SLICE;
        while Instant::now() < until {
            // Asking the driver costs about a microsecond, so it is asked seldom.
            for _ in 0..1024 {
                self.bench.device.poll();
            }
            if self.launch.is_done()? {
                return Ok(Some(self.launch.wait(Duration::ZERO)?));
            }
        }
        Ok(None)
    }

    fn give_up(mut self, watch: &Watch<'_>, trouble: anyhow::Error) -> anyhow::Error {
        self.bench.device.hurry(CLOSING);
        for qp in watch.qps {
            // One that has failed already is none the worse.
            let _ = qp.fail();
        }
        self.launch.abort();
        let until = Instant::now() + GRACE;
        let drive = self.bench.device.is_caller_driven();
        while Instant::now() < until {
            if !matches!(self.slice(drive), Ok(None)) {
                return trouble;
            }
        }
        trouble.context("the kernel did not end although its queue pairs were failed")
    }
}

/// A kernel that ended well on a queue pair that failed was let go (`DOORBELL_ON_ERROR=release`): what it counted did not happen.
fn not_released(bench: &Bench, qps: &[Qp]) -> Result<()> {
    if bench.device.settings().on_error != doorbell::OnError::Release {
        return Ok(());
    }
    let Some((qp, fault)) = qps.iter().find_map(|qp| Some((qp, qp.error()?))) else {
        return Ok(());
    };
    let mut text = format!(
        "QP {:#08x} failed and its kernels were let go, so nothing was measured: {fault}",
        qp.qpn()
    );
    tell_missing(&mut text, &bench.device);
    Err(anyhow!(text))
}

fn stalled(bench: &Bench, watch: &Watch<'_>) -> anyhow::Error {
    let mut text = format!(
        "nothing completed for {}",
        crate::units::span(watch.timeout)
    );
    for qp in watch.qps {
        match qp.error() {
            Some(fault) => {
                text.push_str(&format!("; QP {:#08x}: {fault}", qp.qpn()));
                break;
            }
            None => continue,
        }
    }
    let clear = tell_missing(&mut text, &bench.device);
    if let Some(qp) = watch.qps.first().filter(|_| clear) {
        let counters = qp.counters();
        text.push_str(&format!(
            "; QP {:#08x} is {}: {} slots rung, {} work requests executed",
            qp.qpn(),
            qp.state(),
            counters.slots_rung,
            counters.wqes
        ));
    }
    match clear {
        true => anyhow!("{text}; raise --timeout if the machine is that slow"),
        false => anyhow!(text),
    }
}

/// What a wait that is over lacks, behind what is said of it. `true`: nothing that is known, so it may just have been slow.
pub(crate) fn tell_missing(text: &mut String, device: &doorbell::Device) -> bool {
    let lines = device.diagnosis();
    for line in &lines {
        text.push_str("; ");
        text.push_str(line);
    }
    lines
        .first()
        .is_none_or(|line| line.starts_with(doorbell::report::NOTHING))
}

/// One [`Status`] a thread, in memory that kernels write.
pub(crate) struct Statuses {
    memory: Memory,
    count: u64,
}

const STATUS: usize = size_of::<Status>();

impl Statuses {
    pub(crate) fn new(bench: &Bench, count: u64) -> Result<Self> {
        let memory = bench.device.alloc(Place::Host, count as usize * STATUS)?;
        Ok(Self { memory, count })
    }

    /// The pointer that kernels take.
    pub(crate) fn addr(&self) -> u64 {
        self.memory.device_addr()
    }

    /// Pointer to one of them.
    pub(crate) fn addr_of(&self, index: u64) -> u64 {
        self.addr() + index * STATUS as u64
    }

    /// What was left in each.
    pub(crate) fn read(&self) -> Result<Vec<Status>> {
        let mut bytes = vec![0; self.count as usize * STATUS];
        self.memory.read(0, &mut bytes)?;
        let word = |b: &[u8], i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&b[8 * i..8 * i + 8]);
            u64::from_ne_bytes(word)
        };
        Ok(bytes
            .chunks_exact(STATUS)
            .map(|b| Status {
                error: word(b, 0),
                posted: word(b, 1),
                completed: word(b, 2),
                ns: word(b, 3),
            })
            .collect())
    }
}

/// The first thread that reports an error, in words: which thread, which QP, what happened.
pub(crate) fn first_failure<'q>(
    statuses: &[Status],
    qp_of: impl Fn(u64) -> Option<&'q Qp>,
) -> Result<()> {
    let failed = || statuses.iter().filter(|s| s.error != 0);
    let Some((thread, status)) = statuses.iter().enumerate().find(|(_, s)| s.error != 0) else {
        return Ok(());
    };
    let why = crate::device_error::words(status.error);
    let failure = doorbell_device::Error::from_code(status.error).map(|e| e.failure());
    let mut text = format!("thread {thread}: {why}");
    if let Some(qp) = qp_of(thread as u64) {
        text = format!("thread {thread} on QP {:#08x}: {why}", qp.qpn());
        // The engine may know of an earlier error; its own words about this one would repeat it.
        if let Some(fault) = qp.error()
            && !says_the_same(status.error, &fault)
        {
            text.push_str(&format!("; the engine says: {fault}"));
        }
        text.push_str(silence(status.error, || link_of(qp)));
    }
    text.push_str(&format!("; it had posted {}", status.posted));
    // Kernels that keep many requests under way count what is complete at their end alone.
    if status.completed != 0 {
        text.push_str(&format!(" and seen {} complete", status.completed));
    }
    if matches!(
        failure,
        Some(Failure::TimedOut | Failure::NoSpace | Failure::Stuck)
    ) && let Some(qp) = qp_of(thread as u64)
        && tell_missing(&mut text, &qp.pd().device())
        && matches!(failure, Some(Failure::TimedOut))
    {
        text.push_str("; raise --timeout if the machine is that slow");
    }
    let others = failed().count() - 1;
    if others > 0 {
        text.push_str(&format!(" ({others} other threads failed too)"));
    }
    Err(anyhow!(text))
}

/// The link of a queue pair, as reports name it.
fn link_of(qp: &Qp) -> String {
    let report = qp.pd().device().report(Duration::ZERO);
    let mut own = report.qps.into_iter().filter(|q| q.qpn == qp.qpn());
    own.next().map_or(String::new(), |q| q.link)
}

/// What to look at where a peer did not answer; nothing where that is not what happened.
fn silence(code: u64, link: impl FnOnce() -> String) -> &'static str {
    let error = doorbell_device::Error::from_code(code).map(|e| e.failure());
    let Some(Failure::Completion {
        syndrome, vendor, ..
    }) = error
    else {
        return "";
    };
    if Syndrome(syndrome) != Syndrome::TRANSPORT_RETRY {
        return "";
    }
    match (Vendor(vendor), link().as_str()) {
        (Vendor::NONE, "roce") => {
            "; look whether the peer runs and gets CPU time, and whether UDP passes both ways in packets of that size"
        }
        (Vendor::NONE, "verbs") => {
            "; look whether the peer runs and gets CPU time, and whether the two devices reach each other in packets of the path MTU (lower --mtu; `doorbell info` names address and path MTU)"
        }
        (Vendor::NONE, _) => "; look whether the peer runs and gets CPU time",
        (Vendor::ENGINE_DOWN, "verbs") => {
            "; the RDMA device is gone, stopped, or its port went down: the lines above say which, `rdma link` how it is now"
        }
        _ => "",
    }
}

fn says_the_same(code: u64, fault: &doorbell::QpFault) -> bool {
    match doorbell_device::Error::from_code(code).map(|e| e.failure()) {
        Some(Failure::Completion {
            syndrome,
            vendor,
            wqe_index,
        }) => {
            Syndrome(syndrome) == fault.syndrome()
                && Vendor(vendor) == fault.vendor()
                && wqe_index == fault.wqe_index()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number that a kernel does not keep is not told as if it were known.
    #[test]
    fn what_is_not_counted_is_not_said() {
        let failed = |completed| Status {
            error: doorbell_device::Error::TIMED_OUT.code(),
            posted: 1324,
            completed,
            ns: 0,
        };
        let say = |completed| {
            let statuses = [failed(completed)];
            let error = first_failure(&statuses, |_| None).expect_err("it has failed");
            error.to_string()
        };
        let text = say(0);
        assert!(text.ends_with("; it had posted 1324"), "{text}");
        let text = say(1300);
        assert!(
            text.ends_with("posted 1324 and seen 1300 complete"),
            "{text}"
        );
    }

    /// What can be done is said of the link that it is: no NIC is reached by UDP sockets.
    #[test]
    fn where_a_peer_did_not_answer_each_link_has_its_own_places_to_look() {
        let of = |vendor: Vendor, link: &str| {
            let error =
                doorbell_device::Error::completion(Syndrome::TRANSPORT_RETRY.0, vendor.0, 7);
            silence(error.code(), || link.to_owned())
        };
        assert!(of(Vendor::NONE, "roce").contains("UDP passes"));
        let verbs = of(Vendor::NONE, "verbs");
        assert!(
            verbs.contains("path MTU") && !verbs.contains("UDP"),
            "{verbs}"
        );
        assert!(!of(Vendor::NONE, "shm").contains("UDP"));
        // A vendor syndrome says what it was.
        assert_eq!(of(Vendor::PEER_DEAD, "roce"), "");
        assert!(of(Vendor::ENGINE_DOWN, "verbs").contains("its port went down"));
    }
}
