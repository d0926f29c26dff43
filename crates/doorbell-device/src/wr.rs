//! An operation as data, and the slots it becomes: the one place where WQEs are built.
//!
//! The named calls of `ops.rs` are these with known operations, so their branches are gone after inlining; code that chooses at run
//! time, or cares for size more than for speed, passes a [`Wr`] to [`crate::Qp::submit`] or [`crate::Qp::submit_at`]. Only the control
//! segment depends on where a WQE will lie, so slots are made first and get their index when it is known.

use doorbell_wire::{Chunk, Cqn, Key, Opcode, Qpn, Remote, Width, flags, seg};

use crate::error::Error;
use crate::layout::CqKind;

/// Longest transfer of one WQE here: 1 GiB (the format's limit is one byte less than 2 GiB).
pub(crate) const PIECE: u64 = 1 << 30;
/// Longest payload inside a one-slot WQE, in bytes.
pub const MAX_INLINE: u32 = 28;

/// Longest payload inside a one-slot SEND, in bytes: no remote address takes room.
pub const MAX_SEND_INLINE: u32 = 44;

/// Local memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Address in its region.
    pub addr: u64,
    /// Key of the region.
    pub key: Key,
    /// Bytes.
    pub len: u64,
}

/// A 64-bit or 32-bit word that an atomic's old value goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Address in its region, aligned to the operand.
    pub addr: u64,
    /// Key of the region.
    pub key: Key,
}

/// Operands of a masked compare and swap: where `compare_mask` is set the old value must equal `compare`; then the bits of
/// `swap_mask` take those of `swap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked<T> {
    /// What to compare with.
    pub compare: T,
    /// Which bits to compare.
    pub compare_mask: T,
    /// What to store.
    pub swap: T,
    /// Which bits to store.
    pub swap_mask: T,
}

/// An operation. Each variant is the call of the same name ([`crate::Qp::put`] and so on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields are the calls' arguments, documented there"
)]
pub enum Wr {
    Nop,
    Put {
        remote: Remote,
        local: Local,
    },
    PutValue {
        remote: Remote,
        value: u64,
        len: u32,
    },
    Get {
        remote: Remote,
        local: Local,
    },
    GetVisible {
        remote: Remote,
        local: Local,
    },
    Dump,
    PutImm {
        remote: Remote,
        local: Local,
        imm: u32,
    },
    Send {
        local: Local,
    },
    SendImm {
        local: Local,
        imm: u32,
    },
    SignalAdd {
        remote: Remote,
        add: u64,
    },
    PutSignal {
        remote: Remote,
        local: Local,
        signal: Remote,
        add: u64,
    },
    FetchAdd {
        remote: Remote,
        add: u64,
        to: Fetch,
    },
    CompareSwap {
        remote: Remote,
        compare: u64,
        swap: u64,
        to: Fetch,
    },
    MaskedFetchAdd {
        remote: Remote,
        add: u64,
        boundary: u64,
        to: Fetch,
    },
    MaskedFetchAdd32 {
        remote: Remote,
        add: u32,
        boundary: u32,
        to: Fetch,
    },
    MaskedCompareSwap {
        remote: Remote,
        swap: Masked<u64>,
        to: Fetch,
    },
    MaskedCompareSwap32 {
        remote: Remote,
        swap: Masked<u32>,
        to: Fetch,
    },
    /// On a companion: when CQ `cqn` has completion number `completion`, add to `counter` ([`crate::Qp::put_counter`]).
    CountAfter {
        cqn: Cqn,
        completion: u32,
        counter: Remote,
        add: u64,
    },
}

/// One slot's contents.
pub(crate) type Slot = [Chunk; 4];

impl Wr {
    /// Refuses what a CQ of that kind, or any, cannot take.
    #[inline(always)]
    pub(crate) const fn check(&self, cq: CqKind) -> Result<(), Error> {
        match *self {
            Self::PutValue { len, .. } if !matches!(len, 1 | 2 | 4 | 8) => Err(Error::INVALID),
            Self::MaskedCompareSwap { .. } if matches!(cq, CqKind::PerSlot) => Err(Error::INVALID),
            // One message, so it cannot become several.
            Self::PutImm { local, .. } | Self::Send { local } | Self::SendImm { local, .. }
                if local.len > PIECE =>
            {
                Err(Error::INVALID)
            }
            _ => Ok(()),
        }
    }

    /// Slots it takes, if its transfer is one piece.
    #[inline(always)]
    pub(crate) const fn slots(&self) -> u32 {
        match self {
            Self::GetVisible { .. } | Self::PutSignal { .. } | Self::CountAfter { .. } => 2,
            // The one WQE of two slots; a NOP follows it, whose completion stands for both.
            Self::MaskedCompareSwap { .. } => 3,
            _ => 1,
        }
    }

    /// Chunks of its slots that matter.
    #[inline(always)]
    pub(crate) const fn used(&self) -> u32 {
        match self {
            Self::Nop => 1,
            Self::Dump | Self::Send { .. } | Self::SendImm { .. } => 2,
            Self::Put { .. }
            | Self::PutImm { .. }
            | Self::PutValue { .. }
            | Self::Get { .. }
            | Self::GetVisible { .. } => 3,
            _ => 4,
        }
    }

    /// Whether its transfer needs more than one WQE.
    #[inline(always)]
    pub(crate) const fn is_long(&self) -> bool {
        match self {
            Self::Put { local, .. }
            | Self::Get { local, .. }
            | Self::GetVisible { local, .. }
            | Self::PutSignal { local, .. } => local.len > PIECE,
            _ => false,
        }
    }

    /// The first piece of a long transfer, and the rest.
    #[inline(always)]
    pub(crate) const fn split(self) -> (Self, Self) {
        let (mut first, mut rest) = (self, self);
        match &mut rest {
            Self::Put { remote, local }
            | Self::Get { remote, local }
            | Self::GetVisible { remote, local }
            | Self::PutSignal { remote, local, .. } => {
                let piece = Local {
                    len: PIECE,
                    ..*local
                };
                let whole = *remote;
                first = match self {
                    Self::Put { .. } | Self::PutSignal { .. } => Self::Put {
                        remote: whole,
                        local: piece,
                    },
                    _ => Self::Get {
                        remote: whole,
                        local: piece,
                    },
                };
                remote.addr = remote.addr.wrapping_add(PIECE);
                local.addr = local.addr.wrapping_add(PIECE);
                local.len -= PIECE;
            }
            _ => {}
        }
        (first, rest)
    }
}

/// What a queue adds to the slots of an operation.
#[derive(Clone, Copy)]
pub(crate) struct Maker {
    pub(crate) qpn: Qpn,
    /// Where results go that nobody asks for.
    pub(crate) sink: Fetch,
}

/// A slot for index `index`. `signal`: with a completion, unless it is one that never has its own.
#[inline(always)]
pub(crate) const fn place([c0, c1, c2, c3]: Slot, index: u64, signal: bool) -> Slot {
    let [first, second] = c0.0;
    let flag = (flags::CQ_UPDATE as u64) << 24;
    let second = if signal { second } else { second & !flag };
    [
        Chunk([
            first | ((index as u32 & 0xffff) << 8).swap_bytes() as u64,
            second,
        ]),
        c1,
        c2,
        c3,
    ]
}

/// Whether slot `k` of `wr` begins a WQE, so has a control segment.
#[inline(always)]
pub(crate) const fn begins(wr: &Wr, k: u32) -> bool {
    k != 1 || !matches!(wr, Wr::MaskedCompareSwap { .. })
}

impl Maker {
    /// [`Maker::slot`] as a function that is not inlined.
    #[inline(never)]
    pub(crate) fn fill(self, wr: &Wr, k: u32, slot: &mut Slot) {
        *slot = self.slot(wr, k);
    }

    /// The `k`-th slot of `wr`, for index 0 ([`place`] puts in the right one), with a completion.
    #[inline(always)]
    pub(crate) fn slot(self, wr: &Wr, k: u32) -> Slot {
        let wide = Some(Width::Eight);
        let narrow = Some(Width::Four);
        match *wr {
            Wr::Nop => self.nop(),
            Wr::Put { remote, local } => self.transfer(Opcode::RdmaWrite, remote, local),
            Wr::Get { remote, local } => self.transfer(Opcode::RdmaRead, remote, local),
            Wr::GetVisible { remote, local } if k == 0 => {
                self.transfer(Opcode::RdmaRead, remote, local)
            }
            Wr::GetVisible { .. } | Wr::Dump => self.dump(),
            Wr::PutSignal { remote, local, .. } if k == 0 => {
                self.transfer(Opcode::RdmaWrite, remote, local)
            }
            Wr::PutSignal { signal, add, .. } => self.add(signal, add),
            Wr::SignalAdd { remote, add } => self.add(remote, add),
            Wr::PutImm { remote, local, imm } => {
                let ds = if local.len == 0 { 2 } else { 3 };
                [
                    self.ctrl_imm(Opcode::RdmaWriteImm, ds, imm),
                    seg::raddr(remote.addr, remote.key),
                    seg::data(local.len as u32, local.key, local.addr),
                    Chunk::ZERO,
                ]
            }
            Wr::Send { local } => self.send(Opcode::Send, local, 0),
            Wr::SendImm { local, imm } => self.send(Opcode::SendImm, local, imm),
            Wr::PutValue { remote, value, len } => [
                self.ctrl(Opcode::RdmaWrite, 0, 3, flags::CQ_UPDATE),
                seg::raddr(remote.addr, remote.key),
                seg::inline8(value, len),
                Chunk::ZERO,
            ],
            Wr::FetchAdd { remote, add, to } => {
                self.atomic((Opcode::FetchAdd, None), remote, seg::atomic(add, add), to)
            }
            Wr::CompareSwap {
                remote,
                compare,
                swap,
                to,
            } => self.atomic(
                (Opcode::CompareSwap, None),
                remote,
                seg::atomic(swap, compare),
                to,
            ),
            Wr::MaskedFetchAdd {
                remote,
                add,
                boundary,
                to,
            } => self.atomic(
                (Opcode::MaskedFetchAdd, wide),
                remote,
                seg::masked_fa8(add, boundary),
                to,
            ),
            Wr::MaskedFetchAdd32 {
                remote,
                add,
                boundary,
                to,
            } => self.atomic(
                (Opcode::MaskedFetchAdd, narrow),
                remote,
                seg::masked_fa4(add, boundary),
                to,
            ),
            Wr::MaskedCompareSwap32 { remote, swap, to } => {
                let operands =
                    seg::masked_cs4(swap.swap, swap.compare, swap.swap_mask, swap.compare_mask);
                self.atomic((Opcode::MaskedCompareSwap, narrow), remote, operands, to)
            }
            Wr::MaskedCompareSwap { remote, swap, .. } if k == 0 => {
                let [values, masks] =
                    seg::masked_cs8(swap.swap, swap.compare, swap.swap_mask, swap.compare_mask);
                let opmod = Width::Eight.opmod();
                [
                    self.ctrl(Opcode::MaskedCompareSwap, opmod, 5, flags::CQ_ERROR_ONLY),
                    seg::raddr(remote.addr, remote.key),
                    values,
                    masks,
                ]
            }
            Wr::MaskedCompareSwap { to, .. } if k == 1 => [
                seg::data(8, to.key, to.addr),
                Chunk::ZERO,
                Chunk::ZERO,
                Chunk::ZERO,
            ],
            Wr::MaskedCompareSwap { .. } => self.nop(),
            Wr::CountAfter {
                cqn, completion, ..
            } if k == 0 => [
                self.ctrl(Opcode::Wait, 0, 2, flags::CQ_UPDATE),
                seg::wait(completion, cqn),
                Chunk::ZERO,
                Chunk::ZERO,
            ],
            Wr::CountAfter { counter, add, .. } => self.add(counter, add),
        }
    }

    #[inline(always)]
    pub(crate) const fn ctrl(self, opcode: Opcode, opmod: u8, ds: u32, fm_ce_se: u8) -> Chunk {
        seg::ctrl_raw(
            0,
            opcode as u8,
            opmod,
            (self.qpn.get() << 8 | ds).swap_bytes(),
            fm_ce_se,
            0,
        )
    }

    #[inline(always)]
    pub(crate) const fn ctrl_imm(self, opcode: Opcode, ds: u32, imm: u32) -> Chunk {
        seg::ctrl_raw(
            0,
            opcode as u8,
            0,
            (self.qpn.get() << 8 | ds).swap_bytes(),
            flags::CQ_UPDATE,
            imm,
        )
    }

    /// SEND of at most [`PIECE`] bytes; none at all is a message too.
    #[inline(always)]
    const fn send(self, op: Opcode, local: Local, imm: u32) -> Slot {
        let ds = if local.len == 0 { 1 } else { 2 };
        [
            self.ctrl_imm(op, ds, imm),
            seg::data(local.len as u32, local.key, local.addr),
            Chunk::ZERO,
            Chunk::ZERO,
        ]
    }

    /// A transfer of at most [`PIECE`] bytes.
    #[inline(always)]
    pub(crate) const fn transfer(self, op: Opcode, remote: Remote, local: Local) -> Slot {
        // Zero bytes: a NOP, as DOCA's code does.
        let (op, ds) = if local.len == 0 {
            (Opcode::Nop, 1)
        } else {
            (op, 3)
        };
        [
            self.ctrl(op, 0, ds, flags::CQ_UPDATE),
            seg::raddr(remote.addr, remote.key),
            seg::data(local.len as u32, local.key, local.addr),
            Chunk::ZERO,
        ]
    }

    /// An atomic of one slot.
    #[inline(always)]
    fn atomic(
        self,
        (op, width): (Opcode, Option<Width>),
        remote: Remote,
        operands: Chunk,
        to: Fetch,
    ) -> Slot {
        let (opmod, len) = match width {
            None => (0, 8),
            Some(Width::Four) => (Width::Four.opmod(), 4),
            Some(Width::Eight) => (Width::Eight.opmod(), 8),
        };
        [
            self.ctrl(op, opmod, 4, flags::CQ_UPDATE),
            seg::raddr(remote.addr, remote.key),
            operands,
            seg::data(len, to.key, to.addr),
        ]
    }

    #[inline(always)]
    fn add(self, remote: Remote, add: u64) -> Slot {
        self.atomic(
            (Opcode::FetchAdd, None),
            remote,
            seg::atomic(add, add),
            self.sink,
        )
    }

    #[inline(always)]
    fn dump(self) -> Slot {
        [
            self.ctrl(Opcode::Dump, 0, 2, flags::CQ_UPDATE | flags::FENCE_READS),
            seg::data(1, self.sink.key, self.sink.addr),
            Chunk::ZERO,
            Chunk::ZERO,
        ]
    }

    #[inline(always)]
    fn nop(self) -> Slot {
        [
            self.ctrl(Opcode::Nop, 0, 1, flags::CQ_UPDATE),
            Chunk::ZERO,
            Chunk::ZERO,
            Chunk::ZERO,
        ]
    }
}
