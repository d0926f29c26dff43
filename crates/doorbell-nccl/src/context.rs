//! Contexts: what device code posts to. Queue pairs to every rank, their companions, and the tables of signals and counters.
//!
//! Everything that device code dereferences is laid out in one piece of GPU memory; queues, signals and counters lie in host memory
//! that GPU and engine both reach (`DOORBELL_NCCL_SIGNALS=gpu` moves the last two).

use std::ffi::c_void;
use std::fmt;
use std::mem::size_of;
use std::sync::Arc;

use doorbell::{Access, AnyQp, CqKind, Export, ExportLayout, Memory, Mr, Place, export_array};

use crate::abi::device::{CONTEXT1, Context0, Context2, OldQp, Table};
use crate::abi::net::{DeviceHandle, GDAKI_VERSION, GDAKI_VERSION_OLD, TYPE_GDAKI};
use crate::comm::Comm;
use crate::node::WatchedWords;
use crate::qps::{Qps, Shape};
use crate::window::{key_bytes, keys};
use crate::{Error, Result, log};

/// Slots of a queue at least: a call takes several at once, and must never wait for itself.
const LEAST_DEPTH: u32 = 64;
/// Slots of all queues of one `createContext` together where nobody says how many: 8 MiB of pinned memory.
const SLOTS: usize = 1 << 16;
/// Slots of a queue where nobody says how many. The copier takes 256 copies at a time, and a put with its signal takes two slots: so two such batches of one
/// queue are under way, and while kernels fill the queue again the engine has the other.
const DEPTH: std::ops::RangeInclusive<usize> = 256..=1024;
/// Slots of a queue at most.
const MOST_DEPTH: u32 = 32_768;
/// Signals, counters and contexts at most, each; far above what NCCL asks for.
const MOST: i32 = 1 << 20;
/// Signals, and counters, of all contexts of one `createContext` together at most: 128 MiB of them, which the engine and the GPU pin.
const MOST_WORDS: usize = 1 << 24;
/// Queue pairs of one `createContext` at most.
const MOST_QPS: usize = 1 << 16;
/// Slots of all queues of one `createContext` together at most, 64 bytes each and as much for the completions: whoever says the depth says it for all.
const MOST_SLOTS: usize = 1 << 25;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) signals: usize,
    pub(crate) counters: usize,
    pub(crate) contexts: usize,
    pub(crate) depth: u32,
    pub(crate) form: Form,
}

/// Which structures the application's device code reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Headers up to 2.29.7: one context a connection, and another queue pair.
    Version0,
    /// Headers of 2.30.3 and 2.30.4.
    Version1,
    /// Headers since 2.30.5.
    Version2,
}

impl Form {
    fn stride(self) -> usize {
        match self {
            Self::Version0 => size_of::<Context0>(),
            Self::Version1 => CONTEXT1,
            Self::Version2 => size_of::<Context2>(),
        }
    }

    /// What NCCL calls `backendVersion`; later ones are taken for the latest known, as NCCL 2.32 does.
    pub(crate) fn of(version: i32) -> Result<Self> {
        match version {
            1 => Ok(Self::Version1),
            2.. => Ok(Self::Version2),
            _ => Err(Error::Argument {
                call: "createContext",
                object: "backendVersion",
                value: version.to_string(),
                remedy: "build the application with NCCL's headers of 2.30.3 or later",
            }),
        }
    }
}

/// The slots of each of so many queues.
fn suitable_depth(queues: usize) -> u32 {
    let each = (SLOTS / queues.max(1)).max(1);
    let each = (1 << each.ilog2()).clamp(*DEPTH.start(), *DEPTH.end());
    each as u32
}

impl Request {
    /// Checks what NCCL passed.
    pub(crate) fn new(
        comm: &Comm,
        signals: i32,
        counters: i32,
        contexts: i32,
        depth: i32,
        form: Form,
    ) -> Result<Self> {
        let bad = |object, value: &dyn fmt::Display, remedy| {
            Err(Error::Argument {
                call: "createContext",
                object,
                value: value.to_string(),
                remedy,
            })
        };
        if !(0..=MOST).contains(&signals) {
            return bad("nSignals", &signals, "ask for 0 to 1048576");
        }
        if !(0..=MOST).contains(&counters) {
            return bad("nCounters", &counters, "ask for 0 to 1048576");
        }
        let each = comm.ranks * if counters > 0 { 2 } else { 1 };
        if contexts < 1 || contexts as usize > MOST_QPS / each {
            return bad(
                "nContexts",
                &contexts,
                "ask for 1, and for fewer the more ranks there are",
            );
        }
        let queues = contexts as usize * each;
        let depth = match u32::try_from(depth) {
            Ok(0) => {
                let said = comm.settings.depth;
                said.unwrap_or_else(|| suitable_depth(queues))
            }
            Ok(n) if n <= MOST_DEPTH => n.next_power_of_two(),
            _ => return bad("queueDepth", &depth, "ask for 0 (a default) to 32768"),
        };
        let depth = depth.max(LEAST_DEPTH);
        if queues * depth as usize > MOST_SLOTS {
            return bad(
                "queueDepth",
                &format_args!("{depth} for each of {queues} queues"),
                "ask for shorter queues, or for fewer contexts (DOORBELL_NCCL_DEPTH, where the application does not say)",
            );
        }
        for (object, count) in [("nSignals", signals), ("nCounters", counters)] {
            if count as usize * contexts as usize > MOST_WORDS {
                return bad(
                    object,
                    &format_args!("{count} for each of {contexts} contexts"),
                    "ask for 16777216 altogether at most",
                );
            }
        }
        Ok(Self {
            signals: signals as usize,
            counters: counters as usize,
            contexts: contexts as usize,
            depth,
            form,
        })
    }
}

/// What `createContext` makes. The handle is at its beginning and stays where it is.
pub(crate) struct Contexts {
    handle: Box<DeviceHandle>,
    /// Kernels that wait for these words are let go if the communicator fails.
    _waits: WatchedWords,
    _qps: Qps,
    // In the order in which they may go: structures, then what they name.
    _arrays: Vec<Array>,
    _structures: Memory,
    _signals: Words,
    _counters: Words,
    _sink: Words,
    comm: Arc<Comm>,
}

// SAFETY: the address in `handle` is the GPU's; nobody dereferences it here.
unsafe impl Send for Contexts {}
// SAFETY: as above.
unsafe impl Sync for Contexts {}

/// Registered words that start as zero.
struct Words {
    mr: Mr,
    addr: u64,
}

impl Words {
    fn new(comm: &Comm, place: Place, count: usize) -> Result<Self> {
        let (device, bytes) = (&comm.node.device, 8 * count.max(1));
        let memory = match place {
            Place::Gpu => device.alloc_exportable(bytes)?,
            _ => device.alloc(place, bytes)?,
        };
        let addr = memory.device_addr();
        let mr = comm.register(&memory, Access::ALL)?;
        Ok(Self { mr, addr })
    }

    fn table(&self, context: usize, count: usize, rkeys: u64) -> Table {
        let first = context * count;
        Table {
            buffer: self.addr + 8 * first as u64,
            rkeys,
            lkey: self.mr.key_be(),
            offset: first as u32,
        }
    }
}

/// The queue pairs of a context as device code indexes them.
struct Array {
    addr: u64,
    /// What it is a copy of, or lies in.
    _export: Export,
    _copy: Option<Memory>,
}

impl Array {
    fn new(comm: &Comm, qps: &[AnyQp], form: Form) -> Result<Self> {
        let export = export_array(qps, ExportLayout::Packed)?;
        if form != Form::Version0 {
            let addr = export.qps_addr();
            return Ok(Self {
                addr,
                _export: export,
                _copy: None,
            });
        }
        let structures = export.structures()?;
        let bytes: Vec<u8> = structures
            .iter()
            .flat_map(|qp| OldQp::from(qp).to_bytes())
            .collect();
        let copy = comm.node.device.alloc(Place::Gpu, bytes.len())?;
        copy.write(0, &bytes)?;
        Ok(Self {
            addr: copy.device_addr(),
            _export: export,
            _copy: Some(copy),
        })
    }
}

/// Where things are in the structures' memory.
struct Plan {
    /// Contexts, at 0.
    stride: usize,
    signal_keys: usize,
    counter_keys: usize,
    issued: usize,
    visible: usize,
    len: usize,
}

impl Plan {
    fn new(request: &Request, ranks: usize) -> Self {
        let stride = request.form.stride();
        let signal_keys = (request.contexts * stride).next_multiple_of(64);
        let counter_keys = (signal_keys + 4 * ranks).next_multiple_of(64);
        let issued = (counter_keys + 4 * ranks).next_multiple_of(64);
        let words = 8 * ranks * request.contexts;
        let visible = (issued + words).next_multiple_of(64);
        Self {
            stride,
            signal_keys,
            counter_keys,
            issued,
            visible,
            len: visible + words,
        }
    }
}

/// What is made before the ranks tell each other of it.
struct Parts {
    qps: Qps,
    signals: Words,
    counters: Words,
    sink: Words,
    arrays: Vec<Array>,
    companions: Vec<Array>,
    structures: Memory,
    endpoints: Vec<Vec<u8>>,
}

impl Contexts {
    /// Makes them on this rank, together with all others.
    pub(crate) fn create(comm: &Arc<Comm>, request: Result<Request>) -> Result<Self> {
        let parts = request.and_then(|request| Ok((request, Self::parts(comm, &request)?)));
        // The keys of signals and counters go with each rank's endpoints.
        let mine = parts.as_ref().map(|(_, parts)| {
            let keys = [parts.signals.mr.key(), parts.counters.mr.key()];
            let head: Vec<u8> = keys.iter().flat_map(|k| k.to_le_bytes()).collect();
            parts
                .endpoints
                .iter()
                .map(|tail| [&head[..], tail].concat())
                .collect::<Vec<_>>()
        });
        let theirs = comm.swap(
            "createContext",
            mine.as_ref().map(|v| &v[..]).map_err(|e| *e),
        )?;
        let (request, parts) = parts?;
        let connected = Self::finish(comm, &request, parts, &theirs);
        // Nobody posts before everybody's queue pairs are connected.
        let done = connected.as_ref().map(|_| &[][..]);
        comm.gather("createContext: queue pairs", done)?;
        connected
    }

    fn parts(comm: &Arc<Comm>, request: &Request) -> Result<Parts> {
        let place = comm.settings.signals;
        let (contexts, ranks) = (request.contexts, comm.ranks);
        let signals = Words::new(comm, place, request.signals * contexts)?;
        let counters = Words::new(comm, place, request.counters * contexts)?;
        let sink = Words::new(comm, Place::Host, 1)?;
        let shape = Shape {
            contexts: request.contexts,
            companions: request.counters > 0,
            depth: request.depth,
            cq: CqKind::PerSlot,
        };
        let qps = Qps::build(comm, &shape)?;
        let arrays = |qps: &[AnyQp]| -> Result<Vec<Array>> {
            qps.chunks(ranks)
                .map(|qps| Array::new(comm, qps, request.form))
                .collect()
        };
        Ok(Parts {
            arrays: arrays(&qps.main)?,
            companions: arrays(&qps.companions)?,
            structures: comm
                .node
                .device
                .alloc(Place::Gpu, Plan::new(request, ranks).len)?,
            endpoints: qps.endpoints()?,
            qps,
            signals,
            counters,
            sink,
        })
    }

    fn finish(
        comm: &Arc<Comm>,
        request: &Request,
        parts: Parts,
        theirs: &[Vec<u8>],
    ) -> Result<Self> {
        let tails: Vec<Vec<u8>> = theirs
            .iter()
            .map(|t| t[t.len().min(8)..].to_vec())
            .collect();
        parts.qps.connect(&tails)?;
        let (signal_keys, counter_keys) = (keys(theirs, 0), keys(theirs, 1));

        let plan = Plan::new(request, comm.ranks);
        let base = parts.structures.device_addr();
        let at = |offset: usize| base + offset as u64;
        let mut image = vec![0; plan.len];
        let mut put = |offset: usize, bytes: &[u8]| {
            image[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        for context in 0..request.contexts {
            let words = 8 * context * comm.ranks;
            let structure = Context2 {
                qps: parts.arrays[context].addr,
                companions: parts.companions.get(context).map_or(0, |array| array.addr),
                counters: parts
                    .counters
                    .table(context, request.counters, at(plan.counter_keys)),
                signals: parts
                    .signals
                    .table(context, request.signals, at(plan.signal_keys)),
                sink_lkey: parts.sink.mr.key_be(),
                use_dump: u8::from(request.form != Form::Version0),
                reserved: [0; 3],
                last_issued_get: at(plan.issued + words),
                last_visible_get: at(plan.visible + words),
            };
            put(context * plan.stride, &structure.to_bytes()[..plan.stride]);
        }
        put(plan.signal_keys, &key_bytes(&signal_keys));
        put(plan.counter_keys, &key_bytes(&counter_keys));
        parts.structures.write(0, &image)?;

        let Parts {
            qps,
            signals,
            counters,
            sink,
            mut arrays,
            companions,
            structures,
            ..
        } = parts;
        arrays.extend(companions);
        log::info(format_args!(
            "rank {}: {} context(s) of {} queue pairs, depth {}, rung by {}, {} signals, {} counters",
            comm.rank,
            request.contexts,
            comm.ranks,
            request.depth,
            comm.settings.handler,
            request.signals,
            request.counters,
        ));
        Ok(Self {
            handle: Box::new(DeviceHandle {
                device_type: TYPE_GDAKI,
                device_version: match request.form {
                    Form::Version0 => GDAKI_VERSION_OLD,
                    _ => GDAKI_VERSION,
                },
                handle: std::ptr::with_exposed_provenance_mut::<c_void>(base as usize),
                size: 0,
                needs_progress: 0,
            }),
            _waits: comm.node.watch.add_words(
                &comm.health,
                [&signals, &counters].map(|words| words.mr.memory().clone()),
            ),
            _qps: qps,
            _arrays: arrays,
            _structures: structures,
            _signals: signals,
            _counters: counters,
            _sink: sink,
            comm: Arc::clone(comm),
        })
    }

    /// What NCCL copies into the device communicator; valid until these contexts end.
    pub(crate) fn device_handle(&mut self) -> *mut DeviceHandle {
        &raw mut *self.handle
    }

    /// Has anything of this communicator gone wrong?
    pub(crate) fn has_failed(&self) -> bool {
        self.comm.health.has_failed()
    }

    /// Ends them. No kernel may use them any more.
    pub(crate) fn destroy(self) {
        if let Some(copier) = self.comm.node.device.gpu().copier() {
            // Copies a batch is what speed comes from.
            let stats = copier.stats();
            log::info(format_args!(
                "rank {}: this GPU's copies: {} by the copy engine in {} batches, {} within the GPU by way of host memory; {} by a kernel in {} launches and {} jobs for one that was still there, {} of which were taken back",
                self.comm.rank,
                stats.copies.saturating_sub(stats.kernel_copies),
                stats.batches,
                stats.via_host,
                stats.kernel_copies,
                stats.kernel_batches.saturating_sub(stats.posted),
                stats.posted,
                stats.taken_back
            ));
        }
        drop(self);
    }
}

impl OldQp {
    /// The bytes to copy to the GPU.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: as for `Context2`.
        unsafe { std::mem::transmute(*self) }
    }
}

impl Context2 {
    /// The bytes to copy to the GPU.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        // SAFETY: repr(C) with every gap named (sizes and offsets are asserted), so no byte is uninitialised.
        unsafe { std::mem::transmute(*self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_queues_are_short_and_few_are_long() {
        for (queues, depth) in [
            (1, 1024),
            (64, 1024),
            (65, 512),
            (128, 512),
            (256, 256),
            (60_000, 256),
        ] {
            assert_eq!(suitable_depth(queues), depth, "{queues}");
        }
    }
}
