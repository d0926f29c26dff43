//! The set-up that cases run on: a device with its protection domain, opened once and kept.
//!
//! A run may need several: `--initiator cpu` posts from host threads although the GPU is a CUDA
//! one, the proxy and `forward` drive the engine themselves. Each is opened when first needed.

use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};
use doorbell::{Backend, Config, Device, GpuSelect, HcaCores, Pd, Source};
use doorbell_gpu::LoadedImage;

use super::plan::Case;
use crate::args::{Initiator, Test};

/// An opened device.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) pd: Pd,
    pub(crate) foreign: Option<LoadedImage>,
    /// What it was opened as.
    key: Key,
    /// Processes of the run: rules of a fault script for others are played by nobody.
    ranks: u32,
}

type Key = (GpuSelect, HcaCores);

impl Bench {
    /// `host`, or the CUDA device's name.
    pub(crate) fn gpu_label(&self) -> String {
        let info = self.device.gpu_info();
        match info.backend {
            Backend::Host => "host".to_owned(),
            Backend::Cuda => info.name.clone(),
        }
    }

    /// Engine threads; 0: caller-driven.
    pub(crate) fn cores(&self) -> u32 {
        match self.key.1 {
            HcaCores::Threads(n) => n,
            HcaCores::Caller => 0,
        }
    }
}

/// What a fault script did is part of the result, however the run ends.
impl Drop for Bench {
    fn drop(&mut self) {
        for rule in self.device.faults() {
            match rule.elsewhere {
                // That process tells it.
                Some((theirs, _)) if theirs < self.ranks => {}
                Some(_) => crate::complain(&format!(
                    "doorbell: {rule}: it was not played, since this run has {}",
                    match self.ranks {
                        1 => "rank 0 alone".to_owned(),
                        n => format!("ranks 0 to {}", n - 1),
                    }
                )),
                None => crate::complain(&format!("doorbell: {rule}")),
            }
        }
    }
}

/// Opened devices of a run.
pub(crate) struct Benches {
    config: Config,
    gpu: GpuSelect,
    cores: HcaCores,
    /// Nobody said how many cores there should be.
    cores_free: bool,
    module: Option<Vec<u8>>,
    /// Processes of the run.
    ranks: u32,
    open: Vec<Rc<Bench>>,
}

/// A whole file, if it is one: a device or a pipe may never end.
fn read_module(path: &Path) -> std::io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    std::fs::read(path)
}

impl Benches {
    pub(crate) fn new(config: Config, module: Option<&Path>) -> Result<Self> {
        let settings = config.resolve()?;
        let cores_free = settings
            .explain()
            .iter()
            .any(|s| s.name == "hca-cores" && s.source == Source::Default);
        let module = match module {
            Some(path) => Some(read_module(path).with_context(|| {
                format!(
                    "reading the GPU module {}: give a cubin, fatbin or PTX file",
                    path.display()
                )
            })?),
            None => None,
        };
        Ok(Self {
            gpu: settings.gpu,
            cores: settings.hca_cores,
            config,
            cores_free,
            module,
            ranks: 2,
            open: Vec::new(),
        })
    }

    /// This process measures with itself.
    pub(crate) fn alone(mut self, yes: bool) -> Self {
        self.ranks = if yes { 1 } else { 2 };
        self
    }

    /// The bench that `case` runs on.
    pub(crate) fn of(&mut self, case: &Case) -> Result<Rc<Bench>> {
        let gpu = match case.initiator {
            Initiator::Cpu => GpuSelect::Host,
            _ => self.gpu,
        };
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = match (case.initiator, case.test) {
            // The proxy threads of one core run the engine too: equal cores for both initiators.
            (Initiator::Proxy, _) => match self.cores {
                HcaCores::Threads(n @ 2..) => HcaCores::Threads(n / 2),
                _ => HcaCores::Caller,
            },
            // The thread that measures is the HCA.
            (_, Test::Forward) if self.cores_free => HcaCores::Caller,
            // Two ends and an engine on two processors would wait for the scheduler.
            (_, test) if test.plays_two() && self.cores_free && cpus < 3 => HcaCores::Caller,
            _ => self.cores,
        };
        self.get((gpu, cores))
    }

    /// The bench of the second process of a run of `test`, by its name: it plays an end of ping-pongs, and moves no more than that
    /// otherwise.
    pub(crate) fn of_peer(&mut self, test: &str) -> Result<Rc<Bench>> {
        let plays = [Test::PutLat, Test::SignalLat, Test::SendLat, Test::SendBw]
            .iter()
            .any(|t| test.contains(t.name()));
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = match plays && self.cores_free && cpus < 3 {
            true => HcaCores::Caller,
            false => self.cores,
        };
        self.get((self.gpu, cores))
    }

    /// The bench of the run's own settings.
    pub(crate) fn main(&mut self) -> Result<Rc<Bench>> {
        self.get((self.gpu, self.cores))
    }

    fn get(&mut self, key: Key) -> Result<Rc<Bench>> {
        if let Some(found) = self.open.iter().find(|b| b.key == key) {
            return Ok(Rc::clone(found));
        }
        let config = Config {
            gpu: Some(key.0),
            hca_cores: Some(key.1),
            ..self.config.clone()
        };
        let device = Device::builder().config(config).open()?;
        let pd = device.pd()?;
        let foreign = match &self.module {
            Some(image) if device.gpu().is_cuda() => Some(device.gpu().load(image)?),
            // Where a list of initiators adds host threads to a GPU, theirs is no bench for the module.
            Some(_) if key.0 == self.gpu => {
                anyhow::bail!(
                    "--module needs a CUDA GPU, and this is {}: add --gpu cuda on a machine that has one",
                    device.gpu_info().name
                )
            }
            _ => None,
        };
        let bench = Rc::new(Bench {
            device,
            pd,
            foreign,
            key,
            ranks: self.ranks,
        });
        self.open.push(Rc::clone(&bench));
        Ok(bench)
    }
}
