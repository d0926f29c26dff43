//! `--counters`: what the engine did for a case, and so where a rate may saturate.
//!
//! The engine's own counters, summed over the case's queue pairs: many slots a doorbell mean a busy
//! engine, one mean a poster that rings for each; stale reads and parked turns cost time of their own.

use doorbell::{Device, Qp, QpCounters};
use doorbell_gpu::CopierStats;

use crate::units;

/// What the GPU's copier has done; nothing on the host GPU.
pub(crate) fn copies(device: &Device) -> CopierStats {
    device.gpu().copier().map(|c| c.stats()).unwrap_or_default()
}

/// Which way the copies since went, if there were any.
pub(crate) fn copies_since(device: &Device, before: CopierStats) -> Option<String> {
    let now = copies(device);
    let kernel = now.kernel_copies - before.kernel_copies;
    let posted = now.posted.saturating_sub(before.posted);
    // Counted when they are submitted: some may have been on their way before.
    let engine = (now.copies - before.copies).saturating_sub(kernel);
    (engine + kernel > 0).then(|| {
        format!(
            "GPU copies: {} by the copy engine in {} batches, {} by a kernel in {} launches and {} jobs for one that was still there ({} taken back)",
            units::grouped(engine),
            units::grouped(now.batches - before.batches),
            units::grouped(kernel),
            units::grouped((now.kernel_batches - before.kernel_batches).saturating_sub(posted)),
            units::grouped(posted),
            units::grouped(now.taken_back - before.taken_back),
        )
    })
}

/// Counters at one moment.
pub(crate) struct Engine {
    sum: QpCounters,
    /// Passes of the cores in which there was something to do, and times they slept.
    busy: u64,
    slept: u64,
}

impl Engine {
    pub(crate) fn read(device: &Device, qps: &[Qp]) -> Self {
        let mut sum = QpCounters::default();
        for qp in qps {
            let c = qp.counters();
            sum.doorbells += c.doorbells;
            sum.slots_rung += c.slots_rung;
            sum.wqes += c.wqes;
            sum.cqes += c.cqes;
            sum.stale_reads += c.stale_reads;
            sum.parked += c.parked;
            sum.key_lookups += c.key_lookups;
            sum.copies += c.copies;
            sum.flushed += c.flushed;
        }
        let health = device.soft().map(|s| s.hca().health()).unwrap_or_default();
        Self {
            sum,
            busy: health.iter().map(|h| h.counters.busy_rounds).sum(),
            slept: health.iter().map(|h| h.counters.sleeps).sum(),
        }
    }

    /// What happened since, in a sentence.
    pub(crate) fn since(&self, before: &Self) -> String {
        let (now, then) = (&self.sum, &before.sum);
        let doorbells = now.doorbells - then.doorbells;
        let slots = now.slots_rung - then.slots_rung;
        let mut text = format!(
            "engine: {} work requests in {} doorbells seen ({} slots each), {} CQEs, {} busy passes, {} sleeps",
            units::grouped(now.wqes - then.wqes),
            units::grouped(doorbells),
            units::three(slots as f64 / doorbells.max(1) as f64),
            units::grouped(now.cqes - then.cqes),
            units::grouped(self.busy - before.busy),
            units::grouped(self.slept - before.slept),
        );
        for (count, what) in [
            (now.stale_reads - then.stale_reads, "stale reads of a slot"),
            (now.parked - then.parked, "turns parked"),
            (now.key_lookups - then.key_lookups, "keys looked up"),
            (now.copies - then.copies, "by copy engine"),
            (now.flushed - then.flushed, "slots flushed"),
        ] {
            if count > 0 {
                text.push_str(&format!(", {} {what}", units::grouped(count)));
            }
        }
        text
    }
}
