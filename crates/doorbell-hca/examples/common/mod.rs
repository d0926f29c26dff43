//! Memory for the rings and regions of the examples that measure.
#![allow(
    dead_code,
    reason = "a module of several examples, each of which uses a part of it"
)]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use doorbell_hca::Shared;

#[repr(align(64))]
struct Line([AtomicU64; 8]);

/// Zeroed memory in whole cache lines, all atomics, so that an engine may share it.
#[derive(Clone)]
pub(crate) struct Block(Arc<[Line]>);

impl Block {
    pub(crate) fn new(bytes: usize) -> Self {
        let lines = bytes.div_ceil(64);
        Self((0..lines).map(|_| Line(Default::default())).collect())
    }

    pub(crate) fn ptr(&self) -> Shared<u8> {
        Shared::from_ptr(self.0.as_ptr().cast_mut().cast()).expect("not null")
    }

    pub(crate) fn word(&self, i: usize) -> &AtomicU64 {
        &self.0[i / 8].0[i % 8]
    }
}
