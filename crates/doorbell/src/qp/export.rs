//! What kernels get: the 296-byte queue pair, Doorbell's extension beside it, and a table of handles.
//!
//! One [`Export`] holds any number of queue pairs in one piece of memory: first the [`GpuQp`]s, then the [`QpExt`]s, then
//! companions, then the table of [`QpHandle`]s. It keeps its queue pairs alive, and its memory is reused only after every
//! kernel that might hold a handle has ended.

use std::fmt;
use std::mem::{offset_of, size_of};
use std::sync::{Arc, Weak};

use doorbell_device::layout::{
    ErrorWord, GpuQp, MemType, POISON, QpExt, QpHandle, QpInit, RINGING, RqInit,
};

use super::{QpCore, QpInner};
use crate::arena::Slice;
use crate::{Error, QpFault, Result};

/// How far apart exported queue pairs lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExportLayout {
    /// 384 bytes: queue pairs share no cache line.
    #[default]
    Spread,
    /// 296 bytes: an array as DOCA's device code (NCCL's, NVSHMEM's) indexes it.
    Packed,
}

impl ExportLayout {
    const fn stride(self) -> usize {
        match self {
            Self::Spread => 384,
            Self::Packed => size_of::<GpuQp>(),
        }
    }
}

const EXT: usize = size_of::<QpExt>();
const HANDLE: usize = size_of::<QpHandle>();

type QpBytes = [u8; size_of::<GpuQp>()];
type ExtBytes = [u8; EXT];

/// Where a queue pair's structures are, if they are anywhere.
///
/// The memory is kept after the export was dropped: the indices in it are the device code's, and the next export goes on
/// from them, since the engine does.
#[derive(Default)]
pub(crate) struct Place {
    memory: Option<Arc<Slice>>,
    /// Alive as long as the export.
    held: Weak<()>,
    qp: usize,
    ext: usize,
    companion: Option<(u64, u64)>,
}

impl Place {
    /// Writes the structures anew, as they are before the first post.
    pub(super) fn refresh(&mut self, inner: &QpInner) -> Result<()> {
        match (&self.memory, self.held.strong_count()) {
            (Some(memory), 1..) => {
                let (qp, ext) = self.fresh(inner);
                memory.write(self.ext, &ext)?;
                memory.write(self.qp, &qp)
            }
            _ => {
                self.memory = None;
                Ok(())
            }
        }
    }

    fn fresh(&self, inner: &QpInner) -> (QpBytes, ExtBytes) {
        let queue = &inner.queue;
        let qp = GpuQp::new(&QpInit {
            qpn: inner.provider.qpn(),
            ring: queue.ring().device,
            depth: inner.depth(),
            ring_mem: MemType::Host,
            cq: queue.cq().device,
            cqn: inner.provider.cqn(),
            cq_mem: MemType::Host,
            cq_kind: inner.cq_kind,
            dbrec: queue.record().device,
            db: inner.provider.doorbell(),
            handler: inner.handler.nic_handler(),
        });
        let mut ext = QpExt {
            flags: inner.provider.ext_flags(),
            host_error: queue.error().device,
            wait_note: queue.note().device,
            sink_addr: inner.sink.0,
            sink_key: inner.sink.1,
            companion_qp: self.companion.map_or(0, |c| c.0),
            companion_ext: self.companion.map_or(0, |c| c.1),
            ..QpExt::new()
        };
        if let (Some(shape), Some(memory), Some(cqn)) =
            (inner.recv, &queue.recv, inner.provider.recv_cqn())
        {
            ext.set_rq(&RqInit {
                ring: memory.ring().device,
                depth: shape.depth,
                stride: shape.stride(),
                dbrec: queue.recv_record().device,
                cq: memory.cq().device,
                cqn,
                cq_mem: MemType::Host,
            });
        }
        (qp.to_bytes(), ext.to_bytes())
    }

    /// How far the poster is; `None` if nothing was exported, or not to memory that the CPU reads without a copy engine.
    pub(super) fn progress(&self) -> Option<Progress> {
        let memory = self.memory.as_ref()?;
        memory.host_ptr()?;
        progress(memory, self.qp, self.ext).ok()
    }

    /// What the device code left behind, for another place.
    fn left(&self, from: &Slice, companion: Option<(u64, u64)>) -> Result<(QpBytes, ExtBytes)> {
        let (mut qp, mut ext) = ([0; size_of::<GpuQp>()], [0; EXT]);
        from.read(self.qp, &mut qp)?;
        from.read(self.ext, &mut ext)?;
        let (companion_qp, companion_ext) = companion.unwrap_or_default();
        let at = offset_of!(QpExt, companion_qp);
        ext[at..at + 8].copy_from_slice(&companion_qp.to_ne_bytes());
        let at = offset_of!(QpExt, companion_ext);
        ext[at..at + 8].copy_from_slice(&companion_ext.to_ne_bytes());
        Ok((qp, ext))
    }

    /// Makes this the place of `inner`, and puts its structures into `image`.
    fn claim(self, inner: &QpInner, image: &mut [u8]) -> Result<()> {
        let mut place = inner.export();
        if place.held.strong_count() > 0 {
            return Err(Error::State {
                qpn: inner.qpn(),
                state: inner.provider.state(),
                remedy: "it is exported already: drop that export first, two would post over each other",
            });
        }
        let (qp, ext) = match &place.memory {
            Some(from) => place.left(from, self.companion)?,
            None => self.fresh(inner),
        };
        image[self.qp..self.qp + qp.len()].copy_from_slice(&qp);
        image[self.ext..self.ext + EXT].copy_from_slice(&ext);
        *place = self;
        Ok(())
    }
}

/// Queue pairs in a form that kernels use.
pub struct Export {
    memory: Arc<Slice>,
    qps: Vec<Arc<QpInner>>,
    layout: ExportLayout,
    /// While it lives, the queue pairs cannot be exported again.
    _held: Arc<()>,
}

impl Export {
    pub(super) fn gpu(qps: &[&Arc<QpInner>], layout: ExportLayout) -> Result<Self> {
        Self::new(qps, layout, false)
    }

    pub(super) fn host(qps: &[&Arc<QpInner>], layout: ExportLayout) -> Result<Self> {
        Self::new(qps, layout, true)
    }

    fn new(qps: &[&Arc<QpInner>], layout: ExportLayout, on_host: bool) -> Result<Self> {
        let Some(first) = qps.first() else {
            return Err(Error::Argument {
                object: "export",
                value: "no queue pair".into(),
                remedy: "give at least one",
            });
        };
        let device = first.device();
        if let Some(stranger) = qps.iter().find(|q| !Arc::ptr_eq(q.device(), device)) {
            return Err(Error::Argument {
                object: "export",
                value: format!("QP {:#08x} of another device", stranger.qpn()),
                remedy: "export the queue pairs of each device by themselves",
            });
        }
        let (n, stride) = (qps.len(), layout.stride());
        let exts = (n * stride).next_multiple_of(64);
        let companions = exts + n * EXT;
        let table = companions + n * (384 + EXT);
        let arena = if on_host {
            &device.queues
        } else {
            &device.exports
        };
        let held = Arc::new(());
        let memory = Arc::new(arena.alloc(table + n * HANDLE, 256)?);
        let place = |qp, ext, companion| Place {
            memory: Some(Arc::clone(&memory)),
            held: Arc::downgrade(&held),
            qp,
            ext,
            companion,
        };
        let base = memory.device_addr();
        let mut image = vec![0; table];
        for (i, inner) in qps.iter().enumerate() {
            let companion = match &inner.companion {
                Some(companion) => {
                    let qp = companions + i * (384 + EXT);
                    place(qp, qp + 384, None).claim(companion, &mut image)?;
                    Some((base + qp as u64, base + qp as u64 + 384))
                }
                None => None,
            };
            let (qp, ext) = (i * stride, exts + i * EXT);
            place(qp, ext, companion).claim(inner, &mut image)?;
            image.extend_from_slice(&(base + qp as u64).to_ne_bytes());
            image.extend_from_slice(&(base + ext as u64).to_ne_bytes());
        }
        memory.write(0, &image)?;
        if let Some(host) = memory.host_ptr() {
            let told = |inner: &QpInner, offset: usize| {
                // SAFETY: the structure was just written there, and the memory is kept.
                unsafe {
                    inner
                        .provider
                        .watch_poster(host.add(offset), Arc::clone(&memory) as doorbell_gpu::Keep);
                }
            };
            for (i, inner) in qps.iter().enumerate() {
                told(inner, i * stride);
                if let Some(companion) = &inner.companion {
                    told(companion, companions + i * (384 + EXT));
                }
            }
        }
        Ok(Self {
            memory,
            qps: qps.iter().map(|&q| Arc::clone(q)).collect(),
            layout,
            _held: held,
        })
    }

    /// Number of queue pairs.
    #[allow(clippy::len_without_is_empty, reason = "an export is never empty")]
    pub fn len(&self) -> usize {
        self.qps.len()
    }

    fn exts(&self) -> usize {
        (self.len() * self.layout.stride()).next_multiple_of(64)
    }

    fn table(&self) -> usize {
        self.exts() + self.len() * (EXT + 384 + EXT)
    }

    /// What a kernel takes to use the first (or only) queue pair.
    pub fn handle(&self) -> QpHandle {
        self.handle_of(0)
    }

    /// What a kernel takes to use queue pair `index`.
    ///
    /// # Panics
    /// If there is no such queue pair.
    pub fn handle_of(&self, index: usize) -> QpHandle {
        assert!(index < self.len(), "queue pair {index} of {}", self.len());
        let base = self.memory.device_addr();
        let at = |offset: usize| {
            std::ptr::with_exposed_provenance_mut::<u8>((base + offset as u64) as usize)
        };
        QpHandle {
            qp: at(index * self.layout.stride()).cast(),
            ext: at(self.exts() + index * EXT).cast(),
        }
    }

    /// Address of the array of [`QpHandle`]s, one a queue pair, in memory that kernels read.
    pub fn table_addr(&self) -> u64 {
        self.memory.device_addr() + self.table() as u64
    }

    /// Address of the array of [`GpuQp`]s; with [`ExportLayout::Packed`] it is DOCA's.
    pub fn qps_addr(&self) -> u64 {
        self.memory.device_addr()
    }

    /// The queue pairs' structures as they are now, for device code that has another form of them. Whoever posts by a copy posts instead of
    /// this export's users: indices are not shared.
    pub fn structures(&self) -> Result<Vec<GpuQp>> {
        (0..self.len())
            .map(|index| {
                let mut bytes: QpBytes = [0; size_of::<GpuQp>()];
                self.memory.read(index * self.layout.stride(), &mut bytes)?;
                // SAFETY: `GpuQp` is `repr(C)` and made of integers, so any bytes are one.
                Ok(unsafe { bytes.as_ptr().cast::<GpuQp>().read_unaligned() })
            })
            .collect()
    }

    /// The first error that device code saw on queue pair `index`; it can be there before the kernel has ended.
    pub fn device_error(&self, index: usize) -> Result<Option<QpFault>> {
        let at = self.exts() + index * EXT + offset_of!(QpExt, error);
        Ok(QpFault::from_word(ErrorWord(word(&self.memory, at)?)))
    }

    /// The first error of a receive that device code saw on queue pair `index`.
    pub fn receive_error(&self, index: usize) -> Result<Option<QpFault>> {
        let at = self.exts() + index * EXT + offset_of!(QpExt, rq_error);
        Ok(QpFault::from_word(ErrorWord(word(&self.memory, at)?)))
    }

    /// The first error that the engine recorded on queue pair `index`.
    pub fn error(&self, index: usize) -> Option<QpFault> {
        self.qps.get(index).and_then(|q| q.fault())
    }

    /// How far the device code of queue pair `index` has come.
    pub fn progress(&self, index: usize) -> Result<Progress> {
        progress(
            &self.memory,
            index * self.layout.stride(),
            self.exts() + index * EXT,
        )
    }
}

fn word(memory: &Slice, offset: usize) -> Result<u64> {
    let mut word = [0; 8];
    memory.read(offset, &mut word)?;
    Ok(u64::from_ne_bytes(word))
}

/// The indexes of the queue pair at `qp` whose extension is at `ext`.
fn progress(memory: &Slice, qp: usize, ext: usize) -> Result<Progress> {
    let at = |offset| word(memory, qp + offset);
    Ok(Progress {
        reserved: at(offset_of!(GpuQp, sq_rsvd_index))? & !POISON,
        ready: at(offset_of!(GpuQp, sq_ready_index))? & !RINGING,
        rung: at(offset_of!(GpuQp, sq_wqe_pi))?,
        completed: at(
            offset_of!(GpuQp, cq_sq) + offset_of!(doorbell_device::layout::GpuCq, cqe_ci)
        )?,
        receives_posted: word(memory, ext + offset_of!(QpExt, rq_ready))?,
        receives_completed: word(memory, ext + offset_of!(QpExt, rq_ci))?,
    })
}

/// Exports many queue pairs side by side: [`Export::table_addr`] is then what kernels take.
pub fn export_array<Q: AsRef<QpCore>>(qps: &[Q], layout: ExportLayout) -> Result<Export> {
    let inners: Vec<_> = qps.iter().map(|q| &q.as_ref().inner).collect();
    Export::gpu(&inners, layout)
}

/// As [`export_array`], into host memory, for CPUs that post.
pub fn export_array_host<Q: AsRef<QpCore>>(qps: &[Q], layout: ExportLayout) -> Result<Export> {
    let inners: Vec<_> = qps.iter().map(|q| &q.as_ref().inner).collect();
    Export::host(&inners, layout)
}

/// Indices of a queue pair in slots, as its device code keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Slots handed out.
    pub reserved: u64,
    /// Slots whose WQEs are written.
    pub ready: u64,
    /// Slots rung.
    pub rung: u64,
    /// Slots known to be complete.
    pub completed: u64,
    /// Receives posted.
    pub receives_posted: u64,
    /// Receives known to be complete.
    pub receives_completed: u64,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("queue_pairs", &self.len())
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
