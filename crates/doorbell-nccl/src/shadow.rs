//! Signals of NCCL's own proxy, which lie in GPU memory that only this process reaches.
//!
//! NCCL allocates them so that nobody can import them, and polls them on the GPU. Other ranks add to a shadow in shared host memory
//! instead, and this rank carries what changed over to the GPU, in NCCL's progress loop: one small copy for all signals that came meanwhile. That is right
//! because such signals only grow (NCCL says so when it registers them) and have no other writer. A shadow grows only after the data before it are visible,
//! and the GPU's word after the shadow.

use std::sync::{Mutex, PoisonError};

use doorbell::cpu::{self, Post, Ticket};
use doorbell::{Access, CpuQp, Memory, Mr, Place};

use crate::comm::Comm;
use crate::error::posted;
use crate::rma::PATIENCE;
use crate::{Error, Result};

/// The shadow of one region of signals.
pub(crate) struct Shadow {
    mr: Mr,
    memory: Memory,
    state: Mutex<State>,
}

struct State {
    /// The key of the GPU's words; 0: not known yet.
    target: u32,
    /// What was handed on.
    seen: Vec<u64>,
    /// The copy under way.
    copy: Option<Copy>,
    /// Words that must be carried over once more: their copy ended with its queue pair.
    again: Option<Span>,
}

/// The first and the last word.
type Span = (usize, usize);

struct Copy {
    /// Of the contexts whose queue pair makes it: tickets of others mean nothing there.
    owner: u64,
    ticket: Ticket,
    span: Span,
}

fn hull(a: Option<Span>, b: Option<Span>) -> Option<Span> {
    match (a, b) {
        (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
        (a, b) => a.or(b),
    }
}

impl Shadow {
    /// For a region of `size` bytes.
    pub(crate) fn new(comm: &Comm, size: usize) -> Result<Self> {
        let words = size / 8;
        let memory = comm.node.device.alloc(Place::Shared, 8 * words.max(1))?;
        let mr = comm.register(&memory, Access::ALL)?;
        Ok(Self {
            mr,
            memory,
            state: Mutex::new(State {
                target: 0,
                seen: vec![0; words],
                copy: None,
                again: None,
            }),
        })
    }

    /// The key under which this rank's shadow is reached.
    pub(crate) fn key(&self) -> u32 {
        self.mr.key()
    }

    /// From now on changes go to the region of this key.
    pub(crate) fn begin(&self, target: u32) {
        self.state().target = target;
    }

    /// No more of that.
    pub(crate) fn end(&self) {
        self.state().target = 0;
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue pairs of these contexts have ended, whatever became of the copy that one of them made.
    pub(crate) fn abandon(&self, owner: u64) {
        let mut state = self.state();
        if let Some(copy) = state.copy.take_if(|copy| copy.owner == owner) {
            state.again = hull(state.again, Some(copy.span));
        }
    }

    /// Carries over what changed, by a queue pair of these contexts from this rank to itself. Waits for nothing.
    pub(crate) fn carry(&self, rank: usize, owner: u64, qp: &mut CpuQp) -> Result<()> {
        let mut state = self.state();
        if state.target == 0 {
            return Ok(());
        }
        let failed = |e| -> Error { posted("rmaProgress", rank, e) };
        if let Some(copy) = &state.copy {
            // One at a time, so that no word goes back; whoever began it ends it.
            if copy.owner != owner || !qp.queue()?.poll(copy.ticket).map_err(failed)? {
                return Ok(());
            }
            state.copy = None;
        }
        let mut span = state.again.take();
        for i in 0..state.seen.len() {
            let now = self.memory.load(8 * i)?;
            if now != std::mem::replace(&mut state.seen[i], now) {
                span = hull(span, Some((i, i)));
            }
        }
        let Some((first, last)) = span else {
            return Ok(());
        };
        let (offset, len) = (8 * first as u64, 8 * (last - first + 1) as u64);
        let target = cpu::remote_at(state.target, offset);
        let by = Post::by(cpu::deadline(PATIENCE));
        let source = cpu::local(&self.mr, offset, len);
        state.copy = Some(Copy {
            owner,
            ticket: qp.queue()?.put(target, source, by).map_err(failed)?,
            span: (first, last),
        });
        Ok(())
    }
}
