//! What a series of cases runs on, opened once: devices, the second process where the link has one, baselines.
//!
//! `doorbell sweep` measures the same cases several times and in an order of its own; each measurement has queues of its own, as
//! in `doorbell perf`, whose command lines and cases these are.

use anyhow::{Context as _, Result};
use rand::RngCore;

use super::baselines::Baselines;
use super::bench::Benches;
use super::plan::{self, Case, Defaults};
use super::remote::Second;
use super::tally::Measured;
use super::{Context, explain, fits, measure};
use crate::args::PerfArgs;
use crate::environment::Machine;
use crate::progress::Progress;
use crate::schema::Environment;

/// Open devices, and a second process.
pub(crate) struct Lab {
    context: Context,
    defaults: Defaults,
    seed: u64,
}

impl Lab {
    /// Opens what the cases of `args`, and of others with the same GPU, link and kind of test, run on.
    pub(crate) fn open(args: &PerfArgs) -> Result<Self> {
        let second = Second::find(args)?;
        let config = crate::config::of_perf(args, second.port(args.link.kind).as_deref());
        let settings = config.resolve()?;
        let mut lab = Self {
            defaults: super::defaults(&settings),
            context: Context {
                benches: Benches::new(config, None)?
                    .alone(args.link.kind == crate::args::Link::Loopback),
                partner: None,
                baselines: Baselines::new(None),
                progress: Progress::silent(),
                one_gpu: false,
            },
            seed: args.seed.unwrap_or_else(|| rand::rng().next_u64()),
        };
        let case = lab.plan(args)?.into_iter().next().context("no case")?;
        let bench = lab.context.benches.of(&case)?;
        lab.context.meet(second, args, &bench, None)?;
        Ok(lab)
    }

    /// The cases that `args` ask for.
    fn plan(&self, args: &PerfArgs) -> Result<Vec<Case>> {
        plan::cases(args, &self.defaults, self.seed)
    }

    /// The same, if they can run here.
    pub(crate) fn cases(&mut self, args: &PerfArgs) -> Result<Vec<Case>> {
        let cases = self.plan(args)?;
        if let Some(first) = cases.first() {
            let bench = self.context.benches.of(first)?;
            fits(&cases, &bench)?;
        }
        Ok(cases)
    }

    /// Runs one.
    pub(crate) fn measure(&mut self, case: &Case) -> Result<Measured> {
        measure(&mut self.context, case).map_err(|e| explain(&mut self.context, case, e))
    }

    /// The machine, and what a case runs on.
    pub(crate) fn environment(&mut self, case: &Case, machine: &Machine) -> Result<Environment> {
        let bench = self.context.benches.of(case)?;
        let started = crate::environment::utc_now();
        Ok(super::environment(
            case, &bench, machine, started, self.seed,
        ))
    }

    /// Do kernels of a case run on a GPU?
    pub(crate) fn gpu_is_cuda(&mut self, case: &Case) -> Result<bool> {
        Ok(self.context.benches.of(case)?.device.gpu().is_cuda())
    }

    /// Parts from the second process in peace.
    pub(crate) fn close(mut self) -> Result<()> {
        match &mut self.context.partner {
            Some(partner) => partner.part(true),
            None => Ok(()),
        }
    }
}
