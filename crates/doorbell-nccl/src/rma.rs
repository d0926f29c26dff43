//! What NCCL's CPU proxy asks for: puts, signals and gets that the host posts, each with a request that is looked at until it is done.
//!
//! A context has a queue pair for each rank, posted to by whatever thread NCCL calls from, one at a time.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use doorbell::cpu::{self, Local, Post, Ticket};
use doorbell::{CpuQp, CqKind};

use crate::abi::PTR_CUDA;
use crate::abi::rma::RmaConfigV14;
use crate::comm::Comm;
use crate::entry::Held;
use crate::error::posted;
use crate::qps::{Qps, Shape};
use crate::shadow::Shadow;
use crate::window::{FLAG_NEVER_RESET, FLAG_STRICT, Region};
use crate::{Error, Result};

/// How long a post waits for room in its queue: engines empty it all the time, unless they are dead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// Slots of a queue: twice what NCCL has under way to one rank.
const DEPTH: u32 = 1024;
/// Contexts times ranks at most.
const MOST_QPS: usize = 1 << 16;
/// A request of more is split.
const CHUNK: u64 = 1 << 30;

/// What `regMrSym` makes for the host.
pub(crate) struct RmaWindow {
    region: Region,
    /// Where signals for this region go instead, and each rank's key of it.
    shadow: Option<(Arc<Shadow>, Vec<u32>)>,
}

impl RmaWindow {
    /// Registers memory on this rank, together with all others.
    ///
    /// # Safety
    /// As for [`Region::register`].
    pub(crate) unsafe fn register(
        comm: &Comm,
        given: Result<()>,
        addr: *mut u8,
        size: usize,
        kind: c_int,
        flags: u64,
    ) -> Result<Self> {
        let is_shadowed = kind == PTR_CUDA && flags & FLAG_NEVER_RESET != 0;
        let shadow = || match is_shadowed {
            true => {
                let shadow = Shadow::new(comm, size)?;
                let key = shadow.key();
                Ok((Some(Arc::new(shadow)), key))
            }
            false => Ok((None, 0)),
        };
        // SAFETY: passed on. Signals are ordered by their requests, so the region needs no order of its own.
        let (region, shadow, keys) = unsafe {
            Region::register(
                comm,
                given,
                addr,
                size,
                kind,
                if is_shadowed {
                    flags & !FLAG_STRICT
                } else {
                    flags
                },
                shadow,
            )?
        };
        if let Some(shadow) = &shadow {
            shadow.begin(region.mr.key());
            comm.shadows().push(Arc::clone(shadow));
        }
        let shadow = shadow.map(|shadow| (shadow, keys));
        Ok(Self { region, shadow })
    }

    /// Ends it.
    pub(crate) fn deregister(self, comm: &Comm) -> Result<()> {
        if let Some((shadow, _)) = &self.shadow {
            shadow.end();
            comm.shadows().retain(|other| !Arc::ptr_eq(other, shadow));
        }
        self.region.deregister(comm)
    }

    /// The word that stands for a signal of this region at `rank`.
    fn signal(&self, rank: usize, offset: u64) -> cpu::Remote {
        let keys = self.shadow.as_ref().map_or(&self.region.keys, |(_, k)| k);
        cpu::remote_at(keys[rank], offset)
    }

    fn remote(&self, rank: usize, offset: u64) -> cpu::Remote {
        cpu::remote_at(self.region.keys[rank], offset)
    }

    fn local(&self, offset: u64, len: u64) -> Local {
        cpu::local(&self.region.mr, offset, len)
    }
}

/// Of the next contexts.
static NUMBER: AtomicU64 = AtomicU64::new(1);

/// Queues by context, then rank.
type Lanes = Arc<[Mutex<CpuQp>]>;

/// What `createContext` makes.
pub(crate) struct RmaContexts {
    // Requests may outlive it; what they poll stays.
    lanes: Lanes,
    contexts: usize,
    /// Of all of this process.
    number: u64,
    /// There until the end.
    qps: Option<Qps>,
    comm: Arc<Comm>,
}

impl Drop for RmaContexts {
    fn drop(&mut self) {
        drop(self.qps.take());
        // Other contexts of this communicator go on with what these had begun to carry over.
        let shadows = self.comm.shadows();
        shadows.iter().for_each(|s| s.abandon(self.number));
    }
}

/// What a put or get gives, until it is done.
pub(crate) struct RmaRequest {
    lanes: Lanes,
    lane: usize,
    rank: usize,
    /// `None`: there was nothing to do.
    ticket: Option<Ticket>,
}

/// A part of a window: the window, an offset.
pub(crate) type Part<'a> = (&'a RmaWindow, u64);

impl RmaContexts {
    /// Makes them on this rank, together with all others.
    pub(crate) fn create(comm: &Arc<Comm>, config: Result<RmaConfigV14>) -> Result<Self> {
        let made = config.and_then(|config| {
            let contexts = usize::try_from(config.contexts).unwrap_or(0);
            if contexts == 0 || contexts > MOST_QPS / comm.ranks {
                return Err(Error::Argument {
                    call: "createContext",
                    object: "nContexts",
                    value: config.contexts.to_string(),
                    remedy: "ask for 1, and for fewer the more ranks there are",
                });
            }
            let shape = Shape {
                contexts,
                companions: false,
                depth: DEPTH,
                cq: CqKind::Collapsed,
            };
            let qps = Qps::build(comm, &shape)?;
            let endpoints = qps.endpoints()?;
            Ok((contexts, qps, endpoints))
        });
        let mine = made.as_ref().map(|(.., endpoints)| &endpoints[..]);
        let theirs = comm.swap("createContext (RMA)", mine)?;
        let (contexts, qps, _) = made?;
        let connected = qps.connect(&theirs).and_then(|()| {
            let lanes = qps.main.iter().map(|qp| Ok(Mutex::new(CpuQp::new(qp)?)));
            lanes.collect::<Result<Vec<_>>>()
        });
        // Nobody posts before everybody's queue pairs are connected.
        let done = connected.as_ref().map(|_| &[][..]);
        comm.gather("createContext (RMA): queue pairs", done)?;
        Ok(Self {
            lanes: connected?.into(),
            contexts,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            qps: Some(qps),
            comm: Arc::clone(comm),
        })
    }

    /// The queue pair of a context to a rank.
    fn lane(&self, call: &'static str, context: c_int, rank: u32) -> Result<usize> {
        let bad = |object, value: String, remedy| {
            Err(Error::Argument {
                call,
                object,
                value,
                remedy,
            })
        };
        let ranks = self.comm.ranks;
        let Some(context) = usize::try_from(context).ok().filter(|c| *c < self.contexts) else {
            let value = format!("{context} of {}", self.contexts);
            return bad("context", value, "contexts count from 0");
        };
        match rank as usize {
            rank if rank < ranks => Ok(context * ranks + rank),
            rank => bad("rank", format!("{rank} of {ranks}"), "ranks count from 0"),
        }
    }

    /// A put, a signal, or both: the signal behind the put.
    pub(crate) fn put(
        &self,
        call: &'static str,
        (context, rank): (c_int, u32),
        put: Option<(Part<'_>, Part<'_>, u64)>,
        signal: Option<(Part<'_>, u64)>,
    ) -> Result<RmaRequest> {
        let lane = self.lane(call, context, rank)?;
        let rank = rank as usize;
        self.post(call, lane, rank, |queue, how| {
            let mut ticket = None;
            if let Some(((src, from), (dst, to), len)) = put {
                for at in (0..len).step_by(CHUNK as usize) {
                    let some = (len - at).min(CHUNK);
                    let (remote, local) = (dst.remote(rank, to + at), src.local(from + at, some));
                    // The signal goes with the last of them.
                    ticket = Some(match signal {
                        Some(((words, offset), add)) if at + some == len => {
                            let word = words.signal(rank, offset);
                            queue.put_signal(remote, local, word, add, how)?
                        }
                        _ => queue.put(remote, local, how)?,
                    });
                }
            }
            match (ticket, signal) {
                (None, Some(((words, offset), add))) => {
                    let word = words.signal(rank, offset);
                    queue.signal_add(word, add, how).map(Some)
                }
                (ticket, _) => Ok(ticket),
            }
        })
    }

    /// A get.
    pub(crate) fn get(
        &self,
        call: &'static str,
        (context, rank): (c_int, u32),
        (src, from): Part<'_>,
        (dst, to): Part<'_>,
        len: u64,
    ) -> Result<RmaRequest> {
        let lane = self.lane(call, context, rank)?;
        let rank = rank as usize;
        self.post(call, lane, rank, |queue, how| {
            let mut ticket = None;
            for at in (0..len).step_by(CHUNK as usize) {
                let some = (len - at).min(CHUNK);
                let (remote, local) = (src.remote(rank, from + at), dst.local(to + at, some));
                ticket = Some(queue.get(remote, local, how)?);
            }
            Ok(ticket)
        })
    }

    fn post(
        &self,
        call: &'static str,
        lane: usize,
        rank: usize,
        what: impl FnOnce(
            &cpu::CpuQueue<'_>,
            Post,
        ) -> Result<Option<Ticket>, doorbell::device_api::Error>,
    ) -> Result<RmaRequest> {
        let mut qp = lock(&self.lanes[lane]);
        let how = Post::by(cpu::deadline(PATIENCE));
        let ticket = what(&qp.queue()?, how).map_err(|e| posted(call, rank, e))?;
        drop(qp);
        Ok(RmaRequest {
            lanes: Arc::clone(&self.lanes),
            lane,
            rank,
            ticket,
        })
    }

    /// Carries signals over to the GPU.
    pub(crate) fn progress(&self) -> Result<()> {
        let shadows = self.comm.shadows();
        if shadows.is_empty() {
            return Ok(());
        }
        let mut qp = lock(&self.lanes[self.comm.rank]);
        shadows
            .iter()
            .try_for_each(|shadow| shadow.carry(self.comm.rank, self.number, &mut qp))
    }

    /// Has anything of this communicator gone wrong?
    pub(crate) fn has_failed(&self) -> bool {
        self.comm.health.has_failed()
    }
}

impl RmaRequest {
    /// Is it done?
    pub(crate) fn test(&self) -> Result<bool> {
        let Some(ticket) = self.ticket else {
            return Ok(true);
        };
        let mut qp = lock(&self.lanes[self.lane]);
        let done = qp.queue()?.poll(ticket);
        done.map_err(|e| posted("test", self.rank, e))
    }
}

fn lock(lane: &Mutex<CpuQp>) -> std::sync::MutexGuard<'_, CpuQp> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Held for RmaWindow {
    const MARK: u64 = u64::from_le_bytes(*b"DB-rmawi");
    const NAME: &'static str = "the memory handle";
}

impl Held for RmaContexts {
    const MARK: u64 = u64::from_le_bytes(*b"DB-rmaco");
    const NAME: &'static str = "the RMA context";
}

impl Held for RmaRequest {
    const MARK: u64 = u64::from_le_bytes(*b"DB-rmare");
    const NAME: &'static str = "the request";
}
