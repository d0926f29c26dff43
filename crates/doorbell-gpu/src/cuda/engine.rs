//! The driver's copies, on one stream: in batches where it has them, else one by one.

use std::ops::Range;

use super::context::Current;
use super::segment::Segment;
use super::types::*;
use crate::Result;

/// How batches are given to the driver.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Batching {
    /// One `cuMemcpyAsync` a copy.
    Loop,
    /// CUDA 12.8's call.
    V1,
    /// CUDA 13.0's.
    V2,
}

/// The copy engine, as one stream has it.
pub(super) struct Engine {
    pub(super) stream: CuStream,
    batching: Batching,
}

impl Engine {
    pub(super) fn new(current: &Current<'_>) -> Result<Self> {
        Ok(Self {
            stream: current.new_stream(current.best_priority())?,
            batching: match (current.cuMemcpyBatchAsync_v2, current.cuMemcpyBatchAsync) {
                (Some(_), _) => Batching::V2,
                (None, Some(_)) => Batching::V1,
                (None, None) => Batching::Loop,
            },
        })
    }

    /// Does the driver take batches?
    pub(super) fn is_batched(&self) -> bool {
        self.batching != Batching::Loop
    }

    /// Gives the driver a piece, step by step.
    pub(super) fn issue(&mut self, current: &Current<'_>, segment: &Segment) -> Result<()> {
        segment
            .steps()
            .try_for_each(|step| self.issue_step(current, segment, step))
    }

    fn issue_step(
        &mut self,
        current: &Current<'_>,
        segment: &Segment,
        step: Range<usize>,
    ) -> Result<()> {
        // A lone copy is cheaper as itself.
        if step.len() > 1 && self.batching != Batching::Loop {
            // CUDA_ERROR_NOT_SUPPORTED: the function is there, the device or its driver model lacks it.
            const NOT_SUPPORTED: CuResult = 801;
            match self.batch(current, segment, step.clone()) {
                NOT_SUPPORTED => self.batching = Batching::Loop,
                code => {
                    return current.check("cuMemcpyBatchAsync", code, || {
                        format!("{} copies of batch {}", step.len(), segment.ticket)
                    });
                }
            }
        }
        for i in step {
            let (dst, src, len) = (segment.dst[i], segment.src[i], segment.size[i]);
            // SAFETY: the submitter promised both ranges until the ticket has ended.
            unsafe { current.copy(dst, src, len, self.stream) }?;
        }
        Ok(())
    }

    fn batch(&self, current: &Current<'_>, segment: &Segment, step: Range<usize>) -> CuResult {
        let mut attributes = CuMemcpyAttributes {
            src_access_order: SRC_ORDER_STREAM,
            flags: COPY_OVERLAP_COMPUTE,
            ..CuMemcpyAttributes::default()
        };
        // One set of attributes, from the first copy on.
        let mut first = 0usize;
        let n = step.len();
        let (dst, src, size) = (
            segment.dst[step.clone()].as_ptr(),
            segment.src[step.clone()].as_ptr(),
            segment.size[step].as_ptr(),
        );
        match (
            self.batching,
            current.cuMemcpyBatchAsync_v2,
            current.cuMemcpyBatchAsync,
        ) {
            (Batching::V2, Some(call), _) => {
                // SAFETY: three arrays of `n`, read before the call returns; the ranges are the submitter's promise.
                unsafe {
                    call(
                        dst,
                        src,
                        size,
                        n,
                        &mut attributes,
                        &mut first,
                        1,
                        self.stream,
                    )
                }
            }
            (_, _, Some(call)) => {
                let mut failed = usize::MAX;
                let (dst, src, size) = (dst.cast_mut(), src.cast_mut(), size.cast_mut());
                // SAFETY: as above; this form takes them as mutable and only reads them.
                unsafe {
                    call(
                        dst,
                        src,
                        size,
                        n,
                        &mut attributes,
                        &mut first,
                        1,
                        &mut failed,
                        self.stream,
                    )
                }
            }
            _ => ERROR_NOT_FOUND,
        }
    }
}
