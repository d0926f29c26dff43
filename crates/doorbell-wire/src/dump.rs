//! Printing WQEs and requests for people: flight recorders, error messages, dumps of a ring.
//!
//! A request prints as one line that says what moves where; a dump adds the control segment and the bytes.
//! A WQE that means nothing still dumps: bytes first, then what is wrong with it.

use core::fmt::{Display, Formatter, Result};

use crate::{Chunk, Ctrl, Fence, Local, Payload, Piece, Remote, Request, flags};

/// Displays a WQE: its control segment, its request or what is wrong with it, and its bytes, 16 a line.
///
/// ```
/// use doorbell_wire::{Dump, Qpn, Wqe};
/// let slots = Wqe::nop().signalled(true).emit(7, Qpn::new(0x12).expect("24 bits"));
/// assert_eq!(
///     Dump(&slots[..1]).to_string(),
///     "#7 qp 0x12 ds 1 signalled: NOP\n  00: 00000700 00001201 00000008 00000000\n"
/// );
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Dump<'a>(pub &'a [Chunk]);

impl Display for Dump<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Some(first) = self.0.first() else {
            return writeln!(f, "no WQE");
        };
        let ctrl = Ctrl::parse(*first);
        match Request::parse(self.0) {
            Ok(request) => writeln!(f, "{ctrl}: {request}")?,
            Err(error) => writeln!(f, "{ctrl}: {error}")?,
        }
        for (row, chunk) in self.0.iter().enumerate() {
            writeln!(f, "  {:02x}: {chunk:?}", 16 * row)?;
        }
        Ok(())
    }
}

/// `#idx qp N ds N`, then the flags that are set; the opcode is the request's to name.
impl Display for Ctrl {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "#{} qp {:#x} ds {}", self.idx, self.qpn, self.ds)?;
        f.write_str(match self.fm_ce_se & flags::CQ_MASK {
            flags::CQ_ERROR_ONLY => "",
            flags::CQ_FIRST_ERROR => " first-error",
            flags::CQ_UPDATE => " signalled",
            _ => " signalled+event",
        })?;
        if self.solicited() {
            f.write_str(" solicited")?;
        }
        match self.fm_ce_se & flags::FENCE_MASK {
            flags::FENCE_NONE => Ok(()),
            bits => write!(
                f,
                " fence:{}",
                Fence::from_bits(bits).map_or("reserved", Fence::name)
            ),
        }
    }
}

impl Display for Remote {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{:#x} (rkey {})", self.addr, self.key)
    }
}

/// Address and key; the length is printed with what is done to it.
impl Display for Local {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{:#x} (lkey {})", self.addr, self.key)
    }
}

impl Display for Payload<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Empty => f.write_str("0 B"),
            Self::Local(local) => write!(f, "{} B from {local}", local.len),
            Self::Inline(inline) => write!(f, "{} B inline", inline.len()),
            Self::List(list) => {
                write!(f, "{} B from {{", self.len())?;
                for (i, piece) in list.enumerate() {
                    let comma = if i == 0 { "" } else { ", " };
                    match piece {
                        Piece::Local(local) => write!(f, "{comma}{} B {local}", local.len)?,
                        Piece::Inline(inline) => write!(f, "{comma}{} B inline", inline.len())?,
                    }
                }
                f.write_str("}")
            }
        }
    }
}

/// One line: opcode, what moves, from where, to where.
impl Display for Request<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let op = self.opcode();
        match *self {
            Self::Nop => write!(f, "{op}"),
            Self::Write {
                remote,
                local,
                imm: None,
            } => write!(f, "{op} {local} to {remote}"),
            Self::Write {
                remote,
                local,
                imm: Some(imm),
            } => write!(f, "{op} {local} to {remote} imm {imm:#x}"),
            Self::Send { local, imm: None } => write!(f, "{op} {local}"),
            Self::Send {
                local,
                imm: Some(imm),
            } => write!(f, "{op} {local} imm {imm:#x}"),
            Self::Read {
                remote,
                local: Payload::Local(local),
            } => {
                write!(f, "{op} {} B from {remote} to {local}", local.len)
            }
            Self::Read { remote, local } => {
                write!(f, "{op} {} B from {remote}, scattered", local.len())
            }
            Self::FetchAdd { remote, local, add } => {
                write!(f, "{op} {add:#x} at {remote}, old value to {local}")
            }
            Self::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                write!(
                    f,
                    "{op} {compare:#x} by {swap:#x} at {remote}, old value to {local}"
                )
            }
            Self::MaskedFetchAdd {
                remote,
                local,
                width,
                add,
                boundary,
            } => {
                let bytes = width.bytes();
                write!(
                    f,
                    "{op} {bytes} B {add:#x} boundary {boundary:#x} at {remote}, old value to {local}"
                )
            }
            Self::MaskedCompareSwap {
                remote,
                local,
                width,
                swap,
                compare,
                swap_mask,
                compare_mask,
            } => write!(
                f,
                "{op} {} B {compare:#x}/{compare_mask:#x} by {swap:#x}/{swap_mask:#x} at {remote}, old value to {local}",
                width.bytes()
            ),
            Self::Wait { index, cqn } => write!(f, "{op} for completion {index} of cq {cqn}"),
            Self::Dump { local } => write!(f, "{op} {} B at {local}", local.len),
        }
    }
}
