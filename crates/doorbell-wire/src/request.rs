//! Reading a whole WQE that somebody else wrote: checked completely, once, before a byte is moved.
//!
//! [`Request::parse`] is total: any chunks give a request or an error that names field, value and what is allowed; reserved fields, which
//! foreign device code leaves uninitialised, are ignored. It does not look at index and QP number: that is [`crate::Ctrl::matches`].
//! It copies nothing, so the chunks must be a private copy of the ring's, not the ring itself.

use crate::wqe::MAX_LEN;
use crate::{Chunk, Cqn, Ctrl, Local, Opcode, Remote, Width, WqeError, seg};

/// The largest `ds`: the field has six bits.
const MAX_DS: u8 = 63;

/// A valid work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Do nothing.
    Nop,
    /// RDMA WRITE, with or without immediate data.
    Write {
        /// Where to.
        remote: Remote,
        /// What.
        local: Payload<'a>,
        /// Immediate data, if the opcode carries it.
        imm: Option<u32>,
    },
    /// SEND, with or without immediate data.
    Send {
        /// What.
        local: Payload<'a>,
        /// Immediate data, if the opcode carries it.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// Where from.
        remote: Remote,
        /// Where to; never inline.
        local: Payload<'a>,
    },
    /// Fetch and add of 8 bytes.
    FetchAdd {
        /// The word, 8-byte aligned.
        remote: Remote,
        /// 8 bytes for the old value.
        local: Local,
        /// What to add.
        add: u64,
    },
    /// Compare and swap of 8 bytes.
    CompareSwap {
        /// The word, 8-byte aligned.
        remote: Remote,
        /// 8 bytes for the old value.
        local: Local,
        /// What to store if the word equals `compare`.
        swap: u64,
        /// What to compare with.
        compare: u64,
    },
    /// Fetch and add with carry boundaries; see [`crate::arith::masked_add`]. 4-byte operands are zero-extended.
    MaskedFetchAdd {
        /// The word, aligned to its width.
        remote: Remote,
        /// As many bytes for the old value.
        local: Local,
        /// 4 or 8 bytes.
        width: Width,
        /// What to add.
        add: u64,
        /// Bits whose carry is dropped.
        boundary: u64,
    },
    /// Compare and swap under masks; see [`crate::arith::masked_swap`]. 4-byte operands are zero-extended.
    MaskedCompareSwap {
        /// The word, aligned to its width.
        remote: Remote,
        /// As many bytes for the old value.
        local: Local,
        /// 4 or 8 bytes.
        width: Width,
        /// What to store.
        swap: u64,
        /// What to compare with.
        compare: u64,
        /// Bits to store.
        swap_mask: u64,
        /// Bits to compare.
        compare_mask: u64,
    },
    /// Hold the queue until a CQ has produced a completion.
    Wait {
        /// Number of that completion, modulo 2^32.
        index: u32,
        /// The CQ.
        cqn: Cqn,
    },
    /// Read local memory and drop it.
    Dump {
        /// What to read.
        local: Local,
    },
}

impl<'a> Request<'a> {
    /// Reads the WQE that starts with `slots[0]`; chunks behind its `ds` are not looked at.
    #[inline]
    pub fn parse(slots: &'a [Chunk]) -> Result<Self, WqeError> {
        let [first, rest @ ..] = slots else {
            return Err(WqeError::Truncated { ds: 0, have: 0 });
        };
        let ctrl = Ctrl::parse(*first);
        let opcode = ctrl.opcode().map_err(|e| WqeError::Opcode { value: e.0 })?;
        let (min, max) = sizes(opcode);
        let bad_ds = || WqeError::Ds {
            opcode,
            value: ctrl.ds,
            min,
            max,
        };
        if ctrl.ds < min || ctrl.ds > max {
            return Err(bad_ds());
        }
        let Some(body) = rest.get(..usize::from(ctrl.ds) - 1) else {
            return Err(WqeError::Truncated {
                ds: ctrl.ds,
                have: slots.len(),
            });
        };
        let width = check_opmod(opcode, ctrl.opmod)?;

        Ok(match (opcode, body) {
            (Opcode::Nop, _) => Self::Nop,
            (Opcode::RdmaWrite | Opcode::RdmaWriteImm, [raddr, data @ ..]) => {
                let imm = (opcode == Opcode::RdmaWriteImm).then_some(ctrl.imm);
                Self::Write {
                    remote: Remote::parse(*raddr),
                    local: Payload::parse(opcode, data)?,
                    imm,
                }
            }
            (Opcode::Send | Opcode::SendImm, data) => {
                let imm = (opcode == Opcode::SendImm).then_some(ctrl.imm);
                Self::Send {
                    local: Payload::parse(opcode, data)?,
                    imm,
                }
            }
            (Opcode::RdmaRead, [raddr, data @ ..]) => Self::Read {
                remote: Remote::parse(*raddr),
                local: Payload::parse(opcode, data)?,
            },
            (Opcode::FetchAdd, [raddr, operands, data]) => {
                let (remote, local) = atomic_ends(opcode, Width::Eight, *raddr, *data)?;
                Self::FetchAdd {
                    remote,
                    local,
                    add: operands.be64(0),
                }
            }
            (Opcode::CompareSwap, [raddr, operands, data]) => {
                let (remote, local) = atomic_ends(opcode, Width::Eight, *raddr, *data)?;
                Self::CompareSwap {
                    remote,
                    local,
                    swap: operands.be64(0),
                    compare: operands.be64(1),
                }
            }
            (Opcode::MaskedFetchAdd, [raddr, operands, data]) => {
                let (remote, local) = atomic_ends(opcode, width, *raddr, *data)?;
                let (add, boundary) = match width {
                    Width::Four => (operands.be32(0).into(), operands.be32(1).into()),
                    Width::Eight => (operands.be64(0), operands.be64(1)),
                };
                Self::MaskedFetchAdd {
                    remote,
                    local,
                    width,
                    add,
                    boundary,
                }
            }
            (Opcode::MaskedCompareSwap, [raddr, o, data]) if width == Width::Four => {
                let (remote, local) = atomic_ends(opcode, width, *raddr, *data)?;
                Self::MaskedCompareSwap {
                    remote,
                    local,
                    width,
                    swap: o.be32(0).into(),
                    compare: o.be32(1).into(),
                    swap_mask: o.be32(2).into(),
                    compare_mask: o.be32(3).into(),
                }
            }
            (Opcode::MaskedCompareSwap, [raddr, values, masks, data]) if width == Width::Eight => {
                let (remote, local) = atomic_ends(opcode, width, *raddr, *data)?;
                Self::MaskedCompareSwap {
                    remote,
                    local,
                    width,
                    swap: values.be64(0),
                    compare: values.be64(1),
                    swap_mask: masks.be64(0),
                    compare_mask: masks.be64(1),
                }
            }
            (Opcode::MaskedCompareSwap, _) => {
                let ds = if width == Width::Four { 4 } else { 5 };
                return Err(WqeError::Ds {
                    opcode,
                    value: ctrl.ds,
                    min: ds,
                    max: ds,
                });
            }
            (Opcode::Wait, [wait]) => {
                let value = wait.be32(3);
                let cqn = Cqn::new(value).ok_or(WqeError::Cqn { value })?;
                Self::Wait {
                    index: wait.be32(2),
                    cqn,
                }
            }
            (Opcode::Dump, [data]) => {
                let local = data_segment(opcode, *data)?;
                if local.len == 0 {
                    return Err(WqeError::Length {
                        opcode,
                        value: 0,
                        min: 1,
                        max: MAX_LEN.into(),
                    });
                }
                Self::Dump { local }
            }
            // `sizes` leaves nothing for this arm; an error is still a better answer than a panic.
            _ => return Err(bad_ds()),
        })
    }

    /// The opcode it came from.
    #[must_use]
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Nop => Opcode::Nop,
            Self::Write { imm: None, .. } => Opcode::RdmaWrite,
            Self::Write { .. } => Opcode::RdmaWriteImm,
            Self::Send { imm: None, .. } => Opcode::Send,
            Self::Send { .. } => Opcode::SendImm,
            Self::Read { .. } => Opcode::RdmaRead,
            Self::FetchAdd { .. } => Opcode::FetchAdd,
            Self::CompareSwap { .. } => Opcode::CompareSwap,
            Self::MaskedFetchAdd { .. } => Opcode::MaskedFetchAdd,
            Self::MaskedCompareSwap { .. } => Opcode::MaskedCompareSwap,
            Self::Wait { .. } => Opcode::Wait,
            Self::Dump { .. } => Opcode::Dump,
        }
    }
}

/// The smallest and largest `ds` of an opcode, control segment included.
const fn sizes(opcode: Opcode) -> (u8, u8) {
    match opcode {
        // A NOP of several slots pads a ring (DPDK does that), so it may have any size.
        Opcode::Nop => (1, MAX_DS),
        Opcode::Send | Opcode::SendImm => (1, MAX_DS),
        Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => (2, MAX_DS),
        Opcode::FetchAdd | Opcode::CompareSwap | Opcode::MaskedFetchAdd => (4, 4),
        Opcode::MaskedCompareSwap => (4, 5),
        Opcode::Wait | Opcode::Dump => (2, 2),
    }
}

/// Only the extended atomics have a modifier; for all others this answers 8 bytes, the width of a plain atomic.
fn check_opmod(opcode: Opcode, value: u8) -> Result<Width, WqeError> {
    match opcode {
        Opcode::MaskedCompareSwap | Opcode::MaskedFetchAdd => {
            const ALLOWED: &[u8] = &[Width::Four.opmod(), Width::Eight.opmod()];
            Width::from_opmod(value).ok_or(WqeError::Opmod {
                opcode,
                value,
                allowed: ALLOWED,
            })
        }
        _ if value == 0 => Ok(Width::Eight),
        _ => Err(WqeError::Opmod {
            opcode,
            value,
            allowed: &[0],
        }),
    }
}

/// A data segment that must not be inline.
fn data_segment(opcode: Opcode, chunk: Chunk) -> Result<Local, WqeError> {
    if seg::is_inline(chunk) {
        Err(WqeError::InlineNotAllowed { opcode })
    } else {
        Ok(Local::parse(chunk))
    }
}

fn atomic_ends(
    opcode: Opcode,
    width: Width,
    raddr: Chunk,
    data: Chunk,
) -> Result<(Remote, Local), WqeError> {
    let (remote, local) = (Remote::parse(raddr), data_segment(opcode, data)?);
    let bytes = width.bytes();
    if local.len != bytes {
        return Err(WqeError::Length {
            opcode,
            value: local.len.into(),
            min: bytes.into(),
            max: bytes.into(),
        });
    }
    if !remote.addr.is_multiple_of(bytes.into()) {
        return Err(WqeError::Misaligned {
            addr: remote.addr,
            align: bytes,
        });
    }
    Ok((remote, local))
}

/// The local side of a transfer, already checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// No bytes at all.
    Empty,
    /// One piece of registered memory: the usual case.
    Local(Local),
    /// One piece of data inside the WQE.
    Inline(Inline<'a>),
    /// Several pieces, of either sort, in order.
    List(Pieces<'a>),
}

impl<'a> Payload<'a> {
    #[inline(always)]
    fn parse(opcode: Opcode, chunks: &'a [Chunk]) -> Result<Self, WqeError> {
        match chunks {
            [] => Ok(Self::Empty),
            [only] if !seg::is_inline(*only) => {
                let local = Local::parse(*only);
                // ConnectX takes length 0 for no bytes (ConnectX-3 took it for 2^31), and no bytes need no key.
                Ok(if local.len == 0 {
                    Self::Empty
                } else {
                    Self::Local(local)
                })
            }
            _ => Self::parse_pieces(opcode, chunks),
        }
    }

    /// Everything but the usual case of one data segment.
    fn parse_pieces(opcode: Opcode, chunks: &'a [Chunk]) -> Result<Self, WqeError> {
        let mut rest = chunks;
        let mut only = None;
        let mut count = 0usize;
        while let Some((piece, tail)) = Piece::take(rest)? {
            if opcode == Opcode::RdmaRead && matches!(piece, Piece::Inline(_)) {
                return Err(WqeError::InlineNotAllowed { opcode });
            }
            (rest, only, count) = (tail, Some(piece), count + 1);
        }
        Ok(match (count, only) {
            (1, Some(Piece::Inline(inline))) => Self::Inline(inline),
            _ => Self::List(Pieces { rest: chunks }),
        })
    }

    /// Bytes in all.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.pieces().map(|p| p.len()).sum()
    }

    /// Whether there is nothing to move.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every piece, in order, whatever the variant.
    pub fn pieces(self) -> impl Iterator<Item = Piece<'a>> {
        let (one, list) = match self {
            Self::Empty => (None, None),
            Self::Local(local) => (Some(Piece::Local(local)), None),
            Self::Inline(inline) => (Some(Piece::Inline(inline)), None),
            Self::List(list) => (None, Some(list)),
        };
        one.into_iter().chain(list.into_iter().flatten())
    }
}

/// One piece of a payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece<'a> {
    /// Registered memory.
    Local(Local),
    /// Bytes inside the WQE.
    Inline(Inline<'a>),
}

impl<'a> Piece<'a> {
    /// Bytes in this piece.
    #[must_use]
    pub const fn len(&self) -> u64 {
        match self {
            Self::Local(local) => local.len as u64,
            Self::Inline(inline) => inline.len() as u64,
        }
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first piece and what follows it; `None` at the end.
    fn take(chunks: &'a [Chunk]) -> Result<Option<(Self, &'a [Chunk])>, WqeError> {
        let [first, rest @ ..] = chunks else {
            return Ok(None);
        };
        if !seg::is_inline(*first) {
            return Ok(Some((Self::Local(Local::parse(*first)), rest)));
        }
        let len = first.be32(0) & !seg::INLINE;
        let room = WqeError::Inline {
            value: len.into(),
            room: 16 * chunks.len() as u64 - 4,
        };
        let (own, rest) = chunks
            .split_at_checked(seg::inline_ds(len) as usize)
            .ok_or(room)?;
        Ok(Some((Self::Inline(Inline { len, chunks: own }), rest)))
    }
}

/// The pieces of a [`Payload::List`], already checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pieces<'a> {
    rest: &'a [Chunk],
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        // `Payload::parse` walked the same chunks without error, so an error cannot come up here; it would end the list.
        let (piece, rest) = Piece::take(self.rest).ok()??;
        self.rest = rest;
        Some(piece)
    }
}

/// Payload bytes that lie in the WQE.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Inline<'a> {
    len: u32,
    chunks: &'a [Chunk],
}

impl<'a> Inline<'a> {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, one by one.
    pub fn bytes(self) -> impl Iterator<Item = u8> + 'a {
        self.chunks
            .iter()
            .flat_map(|c| c.to_bytes())
            .skip(4)
            .take(self.len as usize)
    }

    /// Copies the bytes to the front of `out` and says how many there were; `None`, and nothing copied, if `out` is too short.
    pub fn copy_to(self, out: &mut [u8]) -> Option<usize> {
        let out = out.get_mut(..self.len())?;
        for (to, from) in out.iter_mut().zip(self.bytes()) {
            *to = from;
        }
        Some(self.len())
    }
}

impl core::fmt::Debug for Inline<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.bytes()).finish()
    }
}
