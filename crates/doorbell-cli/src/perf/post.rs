//! `post`: what posting alone costs a GPU thread. No engine executes, no space is checked for.
//!
//! The queue pairs are made here, of the exported structures and plain memory: the same layout that
//! a kernel gets from the host library, with rings in host or GPU memory and doorbells in host
//! memory. Afterwards the rings are read: every slot must hold the WQE that was posted there last.

use std::time::Duration;

use anyhow::{Context as _, Result};
use doorbell::{Memory, Place};
use doorbell_device::layout::{
    CqKind, EXT_SOFT_ENGINE, GpuQp, MemType, NicHandler, POISON, QpExt, QpInit, RINGING,
};
use doorbell_gpu::Dims;
use doorbell_kernels::params;
use doorbell_wire::{Chunk, Ctrl, Opcode, Qpn, db};

use super::Context;
use super::bench::Bench;
use super::plan::{Case, Limit};
use super::rate::sharing;
use super::running::{Statuses, Watch, first_failure};
use super::tally::{Measured, Tally};
use crate::args::{self, CqMode, Handler, Sharing};
use crate::cputime::CpuClock;

/// Distances in the memory of exported structures: no two queue pairs share a cache line.
const QP: usize = 384;
const EXT: usize = size_of::<QpExt>();
/// Doorbell word and record of a queue pair: a line each.
const WORDS: usize = 128;
const RECORD: usize = 64;
/// Messages a thread of the launch that finds out how many fit the time.
const PROBE: u64 = 2048;
/// Addresses and keys that the WQEs name; nobody looks them up.
const LOCAL: (u64, u32) = (0x1000_0000, 0x0101_0101);
const REMOTE: (u64, u32) = (0x2000_0000, 0x0202_0202);
/// Queue pair numbers from here up.
const FIRST_QPN: u32 = 0x100;

/// Queue pairs that nobody executes.
struct Rings {
    ring: Memory,
    cq: Memory,
    words: Memory,
    structs: Memory,
    count: usize,
    depth: usize,
    handler: NicHandler,
}

impl Rings {
    fn new(bench: &Bench, case: &Case) -> Result<Self> {
        let (count, depth) = (case.posters(), case.depth as usize);
        let (place, mem) = match case.queue_mem {
            args::Place::Host => (Place::Host, MemType::Host),
            args::Place::Gpu => (Place::Gpu, MemType::Gpu),
        };
        let handler = match case.handler {
            Handler::Record => NicHandler::DoorbellRecord,
            Handler::Doorbell => NicHandler::DoorbellOnly,
            Handler::Producer => NicHandler::ProducerWord,
        };
        let alloc = |place, len| bench.device.alloc(place, len);
        let rings = Self {
            ring: alloc(place, count * depth * 64)?,
            cq: alloc(place, count * depth * 64)?,
            words: alloc(Place::Host, count * WORDS + 8)?,
            structs: alloc(Place::Gpu, count * (QP + EXT + 16))?,
            count,
            depth,
            handler,
        };
        let mut structs = vec![0; rings.structs.len()];
        for i in 0..count {
            let qp = GpuQp::new(&QpInit {
                qpn: FIRST_QPN + i as u32,
                ring: rings.ring.device_addr() + (i * depth * 64) as u64,
                depth: case.depth,
                ring_mem: mem,
                cq: rings.cq.device_addr() + (i * depth * 64) as u64,
                cqn: FIRST_QPN + i as u32,
                cq_mem: mem,
                cq_kind: match case.cq {
                    CqMode::PerSlot => CqKind::PerSlot,
                    CqMode::Collapsed => CqKind::Collapsed,
                },
                dbrec: rings.words.device_addr() + (i * WORDS + RECORD) as u64,
                db: rings.words.device_addr() + (i * WORDS) as u64,
                handler,
            });
            let ext = QpExt {
                flags: EXT_SOFT_ENGINE,
                // The last word is nobody's: no error is ever there.
                host_error: rings.words.device_addr() + (count * WORDS) as u64,
                ..QpExt::new()
            };
            let base = rings.structs.device_addr();
            let (at, ext_at) = (rings.qp(i), rings.ext(i));
            structs[at..at + size_of::<GpuQp>()].copy_from_slice(&qp.to_bytes());
            structs[ext_at..ext_at + EXT].copy_from_slice(&ext.to_bytes());
            let handle = rings.table() + 16 * i;
            structs[handle..handle + 8].copy_from_slice(&(base + at as u64).to_ne_bytes());
            structs[handle + 8..handle + 16].copy_from_slice(&(base + ext_at as u64).to_ne_bytes());
        }
        rings.structs.write(0, &structs)?;
        Ok(rings)
    }

    fn qp(&self, i: usize) -> usize {
        i * QP
    }

    fn ext(&self, i: usize) -> usize {
        self.count * QP + i * EXT
    }

    fn table(&self) -> usize {
        self.count * (QP + EXT)
    }

    /// Compares indexes, doorbells and rings with `posted` messages on each queue pair.
    fn verify(&self, posted: &[u64], tally: &mut Tally) -> Result<()> {
        let mut ring = vec![0; self.depth * 64];
        for (i, &posted) in posted.iter().enumerate() {
            let mut fault = |text: String| tally.fault(format!("queue pair {i}: {text}"));
            let word = |memory: &Memory, at: usize| -> Result<u64> {
                let mut bytes = [0; 8];
                memory.read(at, &mut bytes)?;
                Ok(u64::from_ne_bytes(bytes))
            };
            let reserved = word(&self.structs, self.qp(i))? & !POISON;
            let ready = word(&self.structs, self.qp(i) + 8)? & !RINGING;
            if (reserved, ready) != (posted, posted) {
                fault(format!(
                    "{posted} posted, but {reserved} reserved and {ready} ready"
                ));
            }
            let bell = word(&self.words, i * WORDS)?;
            let record = word(&self.words, i * WORDS + RECORD)? as u32;
            let Some(qpn) = Qpn::new(FIRST_QPN + i as u32) else {
                continue;
            };
            let (bell_wanted, record_wanted) = match self.handler {
                NicHandler::ProducerWord => (posted, 0),
                NicHandler::DoorbellOnly => (db::doorbell_word(posted, qpn), 0),
                NicHandler::DoorbellRecord => (db::doorbell_word(posted, qpn), db::record(posted)),
            };
            if bell != bell_wanted {
                fault(format!(
                    "the last doorbell is {bell:#x}, not {bell_wanted:#x}"
                ));
            }
            if record != record_wanted {
                fault(format!(
                    "the doorbell record is {record:#x}, not {record_wanted:#x}"
                ));
            }
            self.ring.read(i * self.depth * 64, &mut ring)?;
            for index in posted.saturating_sub(self.depth as u64)..posted {
                let at = (index as usize & (self.depth - 1)) * 64;
                let mut head = [0; 16];
                head.copy_from_slice(&ring[at..at + 16]);
                let ctrl = Ctrl::parse(Chunk::from_bytes(&head));
                if ctrl.idx != index as u16
                    || ctrl.opcode != Opcode::RdmaWrite as u8
                    || ctrl.ds != 3
                {
                    fault(format!("slot of WQE {index} holds {ctrl:?}"));
                }
            }
            tally.compared += (self.depth as u64).min(posted) * 64;
        }
        Ok(())
    }
}

/// Measures; reads the rings afterwards if it is our poster or was asked for.
pub(crate) fn run(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    let mut tally = Tally::default();
    let (iters, probe) = match case.limit {
        Limit::Iters(n) => (n, false),
        Limit::Time(_) => (PROBE, true),
    };
    let mut took = launch(&bench, case, iters, &mut tally)?;
    if let (true, Limit::Time(run)) = (probe, case.limit) {
        let per_s = PROBE as f64 / took.as_secs_f64().max(1e-6);
        // A whole number of rings, so that every thread ends on a batch.
        let batch = u64::from(case.batch);
        let iters = ((per_s * run.as_secs_f64()) as u64).clamp(PROBE, 1 << 40) / batch * batch;
        context.progress.at(0.1, &case.label());
        tally = Tally::default();
        took = launch(&bench, case, iters.max(batch), &mut tally)?;
    }
    tally.seconds = took.as_secs_f64();
    Ok(tally.measured(case, &bench, None))
}

fn launch(bench: &Bench, case: &Case, iters: u64, tally: &mut Tally) -> Result<Duration> {
    let rings = Rings::new(bench, case)?;
    let statuses = Statuses::new(bench, case.grid())?;
    let area = |(addr, key)| params::Area {
        addr,
        stride: 4096,
        key,
        mask: 0,
    };
    let rate = params::Rate {
        qps: rings.structs.device_addr() + rings.table() as u64,
        qp_count: rings.count as u32,
        sharing: sharing(case.sharing),
        op: params::op::PUT,
        flags: params::flags::NO_SPACE_CHECK
            | params::flags::NO_WAIT
            | match case.sharing {
                Sharing::Exclusive => params::flags::QP_BY_THREAD,
                Sharing::Block | Sharing::Gpu => 0,
            },
        batch: case.batch,
        reserved: 0,
        size: case.size,
        iters,
        run_ns: 0,
        deadline_ns: 3_600_000_000_000,
        local: area(LOCAL),
        remote: area(REMOTE),
        signal: 0,
        signal_key: 0,
        reserved2: 0,
        status: statuses.addr(),
    };
    let clock = CpuClock::start();
    let dims = Dims::new(case.blocks, case.threads);
    // SAFETY: the structure is this kernel's; rings, structures and status are of this bench and outlive the launch, which
    // is waited for here. Nobody dereferences the WQEs' addresses.
    let running = unsafe { bench.start("post", case.foreign.is_some(), dims, &rate)? };
    let patience = match case.limit {
        Limit::Time(run) => 4 * run + case.timeout,
        Limit::Iters(_) => Duration::from_secs(3600),
    };
    let took = running
        .finish(&mut Watch {
            qps: &[],
            timeout: patience,
            tick: &mut |_| Ok(()),
        })
        .context("posting did not end")?;
    tally.cpu.add(clock.elapsed());
    let statuses = statuses.read()?;
    first_failure(&statuses, |_| None)?;
    tally.messages = statuses.iter().map(|s| s.posted).sum();
    if case.check || case.foreign.is_none() {
        let mut posted = vec![0; rings.count];
        for (thread, status) in statuses.iter().enumerate() {
            let qp = match case.sharing {
                Sharing::Exclusive => thread,
                Sharing::Block => thread / case.threads as usize,
                Sharing::Gpu => 0,
            };
            posted[qp] += status.posted;
        }
        rings.verify(&posted, tally)?;
    }
    Ok(took)
}
