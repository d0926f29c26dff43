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
pub(crate) const PIECE: usize = 1 << 20;
/// Called before each piece; an error ends the work. Gibibytes take seconds, in which whoever ordered it may have gone, or this process be told to end.
pub(crate) type Step<'a> = &'a mut dyn FnMut() -> Result<()>;

/// A step of work that nobody ends before it is done.
pub(crate) fn on() -> Result<()> {
    Ok(())
}

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
    /// Bytes of it, if there can be one: the numbers may be another process's.
    pub(crate) fn total(&self) -> Result<u64> {
        let Layout {
            windows, window, ..
        } = self.layout;
        let total = self.layout.possible_total();
        total.filter(|total| *total <= MAX_TOTAL).with_context(|| {
            format!("{windows} windows of {window} bytes: at least one of one, at most {MAX_TOTAL} bytes with what is between them")
        })
    }

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

impl Reach {
    /// Of so many bytes: the numbers are another process's, and no memory goes beyond the last address.
    pub(crate) fn of(self, total: u64) -> Result<Self> {
        ensure!(
            self.addr.checked_add(total).is_some(),
            "the peer process has {total} bytes at {:#x}, which is beyond every address",
            self.addr
        );
        Ok(self)
    }
}

/// Registered windows.
pub(crate) struct Side {
    mr: Mr,
    layout: Layout,
    verbs: bool,
}

impl Side {
    pub(crate) fn new(pd: &Pd, device: &doorbell::Device, spec: &SideSpec) -> Result<Self> {
        let total = spec.total()?;
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
        self.paint_by(picture, &mut on)
    }

    /// The same for somebody else, who may go.
    pub(crate) fn paint_by(&self, picture: &Picture, step: Step<'_>) -> Result<()> {
        self.paint_with(step, |at, piece| picture.render(&self.layout, at, piece))
    }

    /// The same of what `render` says that the bytes from an offset on are.
    pub(crate) fn paint_with(
        &self,
        step: Step<'_>,
        mut render: impl FnMut(u64, &mut [u8]),
    ) -> Result<()> {
        let mut bytes = vec![0; PIECE.min(self.layout.total() as usize)];
        for (at, take) in pieces(self.layout.total()) {
            step()?;
            render(at, &mut bytes[..take]);
            self.mr.write(at as usize, &bytes[..take])?;
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
        self.verify_by(picture, &mut on)
    }

    /// The same for somebody else, who may go.
    pub(crate) fn verify_by(&self, picture: &Picture, step: Step<'_>) -> Result<Verdict> {
        self.verify_with(step, picture.done, |at, piece| {
            picture.render(&self.layout, at, piece);
        })
    }

    /// The same of what `render` says that the bytes from an offset on are; the first `done` of each window were their complement.
    pub(crate) fn verify_with(
        &self,
        step: Step<'_>,
        done: u64,
        mut render: impl FnMut(u64, &mut [u8]),
    ) -> Result<Verdict> {
        let piece = PIECE.min(self.layout.total() as usize);
        let (mut got, mut expected) = (vec![0; piece], vec![0; piece]);
        let mut verdict = Verdict::default();
        for (at, take) in pieces(self.layout.total()) {
            step()?;
            let (got, expected) = (&mut got[..take], &mut expected[..take]);
            self.mr.read(at as usize, got)?;
            render(at, expected);
            verdict.count(&self.layout, at, got, expected, done);
        }
        Ok(verdict)
    }
}

/// Where each piece of a region begins, and its length.
fn pieces(total: u64) -> impl Iterator<Item = (u64, usize)> {
    let take = move |at: u64| (at, (total - at).min(PIECE as u64) as usize);
    (0..total).step_by(PIECE).map(take)
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
