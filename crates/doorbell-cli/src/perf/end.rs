//! One end of a ping-pong: what it sends, where messages arrive, its signal word.
//!
//! Three windows of one registered region with canaries around them. What each must hold before
//! and after a launch follows from the seed, the launch's number and its rounds.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::bench::Bench;
use super::check::{Layout, Picture, Verdict};
use super::latency::PlayOrder;
use super::side::{MAX_TOTAL, Reach, Side, SideSpec};
use super::tally::Tally;

/// What an end is made of.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct EndSpec {
    pub(crate) size: u64,
    pub(crate) on_gpu: bool,
    pub(crate) shared: bool,
    /// Reached by RDMA devices.
    #[serde(default)]
    pub(crate) verbs: bool,
}

/// The memory of one end.
pub(crate) struct End {
    side: Side,
    layout: Layout,
}

/// What a peer process found wrong at its end.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Faults {
    errors: u64,
    compared: u64,
    told: Vec<String>,
}

impl Faults {
    pub(crate) fn of(tally: Tally) -> Self {
        Self {
            errors: tally.errors,
            compared: tally.compared,
            told: tally.faults,
        }
    }

    pub(crate) fn add_to(self, tally: &mut Tally) {
        tally.errors += self.errors;
        tally.compared += self.compared;
        tally.faults.extend(self.told);
    }
}

impl End {
    /// Windows.
    pub(crate) const SEND: u64 = 0;
    pub(crate) const RECV: u64 = 1;
    pub(crate) const SIGNAL: u64 = 2;

    pub(crate) fn new(bench: &Bench, spec: &EndSpec) -> Result<Self> {
        // It may be another process's number.
        ensure!(
            (8..=MAX_TOTAL).contains(&spec.size),
            "messages of {} bytes: from 8, a word, to {MAX_TOTAL}",
            spec.size
        );
        let layout = Layout::new(3, spec.size);
        let spec = SideSpec {
            layout,
            on_gpu: spec.on_gpu,
            shared: spec.shared,
            verbs: spec.verbs,
        };
        Ok(Self {
            side: Side::new(&bench.pd, &bench.device, &spec)?,
            layout,
        })
    }

    /// Can it play this?
    pub(crate) fn takes(&self, order: &PlayOrder) -> Result<()> {
        let PlayOrder { size, .. } = *order;
        let own = self.layout.window;
        ensure!(size == own, "messages of {size} bytes at an end for {own}");
        Ok(())
    }

    pub(crate) fn abroad(&self) -> Result<Reach> {
        self.side.abroad()
    }

    pub(crate) fn reach(&self) -> Reach {
        self.side.reach()
    }

    /// Where a window starts in the region.
    pub(crate) fn offset(&self, window: u64) -> u64 {
        self.layout.lead() + window * self.layout.step()
    }

    /// The address at which kernels load and store.
    pub(crate) fn pointer(&self, window: u64) -> u64 {
        self.side.mr().memory().device_addr() + self.offset(window)
    }

    /// What the region holds once `rounds` messages went each way (0: before the launch).
    fn image(&self, order: &PlayOrder, which: u64, rounds: u64) -> Vec<u8> {
        let (layout, size) = (&self.layout, order.size as usize);
        let picture = |end: u64| Picture::source(order.seed ^ (end + 1), order.number);
        let mut image = vec![0; layout.total() as usize];
        picture(which).render(layout, 0, &mut image);
        let at = |window: u64| self.offset(window) as usize;
        // The other end's window of what it sends lies at the same offset there.
        let mut arrives = vec![0; size];
        picture(1 - which).render(layout, layout.lead(), &mut arrives);
        if rounds == 0 {
            for byte in &mut arrives {
                *byte = !*byte;
            }
        }
        image[at(Self::RECV)..][..size].copy_from_slice(&arrives);
        // `signal_lat` stamps a message's first word, `put_lat` its last.
        let stamp = if order.signal { 0 } else { size - 8 };
        for window in [Self::SEND, Self::RECV] {
            image[at(window) + stamp..][..8].copy_from_slice(&rounds.to_ne_bytes());
        }
        let signalled = if order.signal { rounds } else { 0 };
        image[at(Self::SIGNAL)..][..8].copy_from_slice(&signalled.to_ne_bytes());
        image
    }

    /// Fills it for a launch; `which` is 0 for the end that begins.
    pub(crate) fn paint(&self, order: &PlayOrder, which: u64) -> Result<()> {
        Ok(self.side.mr().write(0, &self.image(order, which, 0))?)
    }

    /// Compares it after a launch, if the order says so.
    pub(crate) fn verify(&self, order: &PlayOrder, which: u64, tally: &mut Tally) -> Result<()> {
        if !order.check {
            return Ok(());
        }
        let expected = self.image(order, which, order.iters);
        let got = self.side.read_all()?;
        let mut verdict = Verdict::default();
        verdict.count(&self.layout, 0, &got, &expected, u64::MAX);
        tally.verdict(&format!("end {which}'s memory"), verdict);
        Ok(())
    }
}
