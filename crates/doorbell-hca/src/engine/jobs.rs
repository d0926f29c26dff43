//! WQEs whose bytes a copy engine moves: issued in order, completed in order, several under way at a time.
//! The queue remembers what each needs for its CQE; results may arrive out of order and wait for their turn.

use std::collections::VecDeque;

use doorbell_wire::Ctrl;

use crate::fault::Fault;

/// A WQE under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Issued {
    /// Its first slot.
    pub(super) at: u64,
    pub(super) ctrl: Ctrl,
    pub(super) byte_cnt: u32,
    result: Option<Result<(), Fault>>,
}

/// WQEs under way, oldest first.
#[derive(Debug, Default)]
pub(super) struct CopyQueue {
    issued: VecDeque<Issued>,
}

impl CopyQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.issued.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.issued.len()
    }

    /// First slot of the oldest.
    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        self.issued.front().map(|i| i.at)
    }

    pub(super) fn push(&mut self, at: u64, ctrl: Ctrl, byte_cnt: u32) {
        self.issued.push_back(Issued {
            at,
            ctrl,
            byte_cnt,
            result: None,
        });
    }

    /// The copy of the WQE at `at` ended.
    pub(super) fn finished(&mut self, at: u64, result: Result<(), Fault>) {
        if let Some(issued) = self.issued.iter_mut().find(|i| i.at == at) {
            issued.result = Some(result);
        }
    }

    /// The oldest, if its result is known.
    pub(super) fn pop_finished(&mut self) -> Option<(Issued, Result<(), Fault>)> {
        let result = self.issued.front()?.result?;
        self.issued.pop_front().map(|i| (i, result))
    }

    pub(super) fn clear(&mut self) {
        self.issued.clear();
    }
}
