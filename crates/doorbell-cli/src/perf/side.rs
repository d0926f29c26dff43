//! One side's payload memory: windows for threads, canaries around them, registered.
//!
//! The same object serves the initiator, a target in the same process, and the target in a peer
//! process; what it must hold is a [`Picture`], written and compared in pieces.

use anyhow::{Context as _, Result, ensure};
use doorbell::{Access, LinkKind, Mr, Pd, Place};
use doorbell_kernels::params::Area;
use serde::{Deserialize, Serialize};

use super::check::{Layout, Picture, Verdict};

/// Bytes that are rendered, written or read at a time.
const PIECE: usize = 1 << 20;
/// Bytes of a side with its canaries, whoever asks for them.
pub(super) const MAX_TOTAL: u64 = 16 << 30;

/// What a side is made of; travels to a peer process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SideSpec {
    pub(crate) layout: Layout,
    /// In GPU memory.
    pub(crate) on_gpu: bool,
    /// In memory that other processes map.
    pub(crate) shared: bool,
    /// Reached by RDMA devices.
    #[serde(default)]
    pub(crate) verbs: bool,
}

impl SideSpec {
    fn place(&self) -> Place {
        match (self.on_gpu, self.shared) {
            (true, _) => Place::Gpu,
            (false, true) => Place::Shared,
            (false, false) => Place::Host,
        }
    }
}

/// Where a side is reached.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Reach {
    pub(crate) addr: u64,
    pub(crate) key: u32,
}

/// Registered windows.
pub(crate) struct Side {
    mr: Mr,
    layout: Layout,
    verbs: bool,
}

impl Side {
    pub(crate) fn new(pd: &Pd, device: &doorbell::Device, spec: &SideSpec) -> Result<Self> {
        // The numbers may be another process's.
        let Layout {
            windows, window, ..
        } = spec.layout;
        let total = spec.layout.possible_total();
        let total = total.filter(|total| *total <= MAX_TOTAL).with_context(|| {
            format!("{windows} windows of {window} bytes: at least one of one, at most {MAX_TOTAL} bytes with what is between them")
        })?;
        let memory = device.alloc(spec.place(), total as usize)?;
        let mr = pd.register(&memory, Access::ALL)?;
        Ok(Self {
            mr,
            layout: spec.layout,
            verbs: spec.verbs,
        })
    }

    pub(crate) fn mr(&self) -> &Mr {
        &self.mr
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the peer process finds it: an RDMA device has keys of its own.
    pub(crate) fn abroad(&self) -> Result<Reach> {
        let link = match self.verbs {
            true => LinkKind::Verbs,
            false => LinkKind::Roce,
        };
        let remote = self.mr.remote_over(link)?;
        Ok(Reach {
            addr: remote.addr,
            key: remote.key,
        })
    }

    /// Where this process finds it.
    pub(crate) fn reach(&self) -> Reach {
        Reach {
            addr: self.mr.addr(),
            key: self.mr.key(),
        }
    }

    /// Writes what the region must hold before a round.
    pub(crate) fn paint(&self, picture: &Picture) -> Result<()> {
        let mut bytes = vec![0; PIECE.min(self.layout.total() as usize)];
        let mut at = 0;
        while at < self.layout.total() {
            let take = (self.layout.total() - at).min(PIECE as u64) as usize;
            picture.render(&self.layout, at, &mut bytes[..take]);
            self.mr.write(at as usize, &bytes[..take])?;
            at += take as u64;
        }
        Ok(())
    }

    /// Flips the first window's first byte.
    pub(crate) fn sabotage(&self) -> Result<()> {
        let at = self.layout.lead();
        let byte = !self.read(at, 1)?[0];
        Ok(self.mr.write(at as usize, &[byte])?)
    }

    /// Bytes of the region.
    pub(crate) fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        ensure!(
            len <= self.layout.total(),
            "{len} bytes of a side of {}",
            self.layout.total()
        );
        let mut bytes = vec![0; len as usize];
        self.mr.read(offset as usize, &mut bytes)?;
        Ok(bytes)
    }

    /// All of them.
    pub(crate) fn read_all(&self) -> Result<Vec<u8>> {
        self.read(0, self.layout.total())
    }

    /// Compares what it holds after a round.
    pub(crate) fn verify(&self, picture: &Picture) -> Result<Verdict> {
        let total = self.layout.total();
        let piece = PIECE.min(total as usize);
        let (mut got, mut scratch) = (vec![0; piece], vec![0; piece]);
        let mut verdict = Verdict::default();
        let mut at = 0;
        while at < total {
            let take = (total - at).min(PIECE as u64) as usize;
            self.mr.read(at as usize, &mut got[..take])?;
            picture.compare(&self.layout, at, &got[..take], &mut scratch, &mut verdict);
            at += take as u64;
        }
        Ok(verdict)
    }
}

/// The windows at `reach` as kernels address them, `places` messages each.
pub(crate) fn area(reach: &Reach, layout: &Layout, places: u64) -> Area {
    Area {
        addr: reach.addr + layout.lead(),
        stride: layout.step(),
        key: reach.key,
        mask: (places - 1) as u32,
    }
}
