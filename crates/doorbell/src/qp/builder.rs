//! Making a queue pair: what can be chosen, and what is refused.

use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

use doorbell_device::layout::{CqKind, MAX_DEPTH};

use super::queue::RecvShape;
use super::{Handler, Qp, QpInner, QueueMemory, Reset, export};
use crate::config::OnError;
use crate::memory::Memory;
use crate::mr::Pd;
use crate::provider::{QpRequest, RecvRequest};
use crate::{Access, Error, Result};

/// Most pieces of memory of a receive.
const MAX_PIECES: u32 = 32;

/// A queue pair to be; see [`Pd::qp`].
#[derive(Clone, Debug)]
pub struct QpBuilder {
    pd: Pd,
    depth: u32,
    cq: CqKind,
    handler: Handler,
    core: Option<usize>,
    companion: Option<u32>,
    on_error: OnError,
    signals: Vec<(Memory, Range<usize>)>,
    unreliable: bool,
    access: Access,
    receives: u32,
    pieces: u32,
}

impl QpBuilder {
    pub(crate) fn new(pd: &Pd) -> Self {
        let settings = &pd.inner.device.settings;
        Self {
            pd: pd.clone(),
            depth: settings.depth,
            cq: CqKind::Collapsed,
            handler: settings.handler,
            core: None,
            companion: None,
            on_error: settings.on_error,
            signals: Vec::new(),
            unreliable: false,
            access: Access::ALL,
            receives: 0,
            pieces: 1,
        }
    }

    /// Slots of the send queue, 64 bytes each: a power of two, 1 to 32768.
    #[must_use]
    pub fn depth(mut self, slots: u32) -> Self {
        self.depth = slots;
        self
    }

    /// How completions are written. Collapsed unless said otherwise: it takes every work request.
    #[must_use]
    pub fn cq(mut self, kind: CqKind) -> Self {
        self.cq = kind;
        self
    }

    /// How it is rung.
    #[must_use]
    pub fn handler(mut self, handler: Handler) -> Self {
        self.handler = handler;
        self
    }

    /// On which engine core, from 0; otherwise the least loaded one.
    #[must_use]
    pub fn core(mut self, core: usize) -> Self {
        self.core = Some(core);
        self
    }

    /// With a companion queue of so many slots, on which `put_counter` waits and counts (two slots a call).
    #[must_use]
    pub fn companion(mut self, slots: u32) -> Self {
        self.companion = Some(slots);
        self
    }

    /// What foreign kernels meet when it fails.
    #[must_use]
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = on_error;
        self
    }

    /// Signals (64-bit words, these bytes of `memory`) that kernels wait for and that this queue pair, or its peer through it, is to raise.
    /// With [`OnError::Release`] bit 62 of each is set when the queue pair fails, which satisfies every "at least"; what the kernel
    /// finds then is not data. May be called for several ranges, and for the same of several queue pairs.
    #[must_use]
    pub fn release_signals(mut self, memory: &Memory, bytes: Range<usize>) -> Self {
        self.signals.push((memory.clone(), bytes));
        self
    }

    /// Over RoCE, as an Unreliable Connection: WRITE and SEND without acknowledgements, messages with a lost packet are
    /// dropped whole. Over other links it makes no difference.
    #[must_use]
    pub fn unreliable(mut self, yes: bool) -> Self {
        self.unreliable = yes;
        self
    }

    /// What a peer may do over RoCE, whatever its keys grant: WRITE, READ, atomics. All of them unless said otherwise. What is not
    /// allowed fails at the peer ([`Syndrome::REMOTE_ACCESS`](crate::Syndrome::REMOTE_ACCESS)) and stops this queue pair, as a wrong key does.
    #[must_use]
    pub fn remote_access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// With a receive queue of so many receives, and a receive CQ with an entry for each: a power of two from 1 to 32768. It takes
    /// what peers SEND, and the immediates of their WRITEs. Without one such requests fail at the peer
    /// ([`Syndrome::RNR_RETRY`](crate::Syndrome::RNR_RETRY)).
    #[must_use]
    pub fn receive_queue(mut self, receives: u32) -> Self {
        self.receives = receives;
        self
    }

    /// Most pieces of memory that a receive can have: a power of two from 1 (unless said otherwise) to 32.
    #[must_use]
    pub fn receive_pieces(mut self, pieces: u32) -> Self {
        self.pieces = pieces;
        self
    }

    /// Makes it.
    pub fn build(self) -> Result<Qp<Reset>> {
        let companion = match self.companion {
            Some(depth) => {
                let companion = Self {
                    depth,
                    companion: None,
                    receives: 0,
                    cq: CqKind::Collapsed,
                    ..self.clone()
                };
                Some(Arc::new(companion.inner(None)?))
            }
            None => None,
        };
        Ok(Qp::new(self.inner(companion)?))
    }

    fn inner(&self, companion: Option<Arc<QpInner>>) -> Result<QpInner> {
        if !self.depth.is_power_of_two() || self.depth > MAX_DEPTH {
            return Err(Error::Argument {
                object: "send queue depth",
                value: self.depth.to_string(),
                remedy: "use a power of two from 1 to 32768",
            });
        }
        let log_depth = self.depth.trailing_zeros() as u8;
        let recv = self.recv()?;
        let device = &self.pd.inner.device;
        let queue = Arc::new(QueueMemory::new(&device.queues, self.depth, self.cq, recv)?);
        let provider = device.provider.create_qp(QpRequest {
            pd: self.pd.inner.number,
            ring: queue.ring(),
            log_depth,
            cq: queue.cq(),
            cq_kind: self.cq,
            record: queue.record(),
            error: queue.error(),
            note: queue.note(),
            recv: queue
                .recv
                .as_ref()
                .zip(recv)
                .map(|(memory, shape)| RecvRequest {
                    ring: memory.ring(),
                    log_depth: shape.depth.trailing_zeros() as u8,
                    stride: shape.stride(),
                    record: queue.recv_record(),
                    cq: memory.cq(),
                }),
            handler: self.handler.nic_handler(),
            // A companion waits for its main queue's CQ, which is cheapest on the same core.
            core: companion
                .as_ref()
                .and_then(|c| c.provider.core())
                .or(self.core),
            on_error: self.on_error,
            signals: self.signals.clone(),
            remote_access: self.access,
            keep: Arc::clone(&queue) as doorbell_gpu::Keep,
        })?;
        Ok(QpInner {
            provider,
            queue,
            companion,
            log_depth,
            cq_kind: self.cq,
            handler: self.handler,
            psn: AtomicU32::new(super::draw_psn()),
            unreliable: self.unreliable,
            recv,
            sink: self.pd.inner.sink.line(),
            export: Mutex::new(export::Place::default()),
            pd: self.pd.clone(),
        })
    }

    fn recv(&self) -> Result<Option<RecvShape>> {
        let bad = |object, value: u32, remedy| {
            Err(Error::Argument {
                object,
                value: value.to_string(),
                remedy,
            })
        };
        let (depth, pieces) = (self.receives, self.pieces);
        if depth == 0 {
            return Ok(None);
        }
        if !depth.is_power_of_two() || depth > MAX_DEPTH {
            return bad(
                "receive queue depth",
                depth,
                "use a power of two from 1 to 32768, or 0 for no receive queue",
            );
        }
        if !pieces.is_power_of_two() || pieces > MAX_PIECES {
            return bad(
                "pieces of a receive",
                pieces,
                "use a power of two from 1 to 32",
            );
        }
        Ok(Some(RecvShape { depth, pieces }))
    }
}
