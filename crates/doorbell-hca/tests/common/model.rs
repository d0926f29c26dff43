//! A model of two zero-based regions: what valid and nearly valid WQEs do to them, and which fault they raise.
//! Plain byte arrays and no cleverness, so that it can be believed.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of each test file, which uses a part of it"
)]

use doorbell_hca::Fault;
use doorbell_wire::{Key, Local, Remote, Wqe};
use proptest::prelude::*;

/// Bytes of each region.
pub const LEN: usize = 256;

/// What a test puts into a WQE.
#[derive(Clone, Debug)]
pub enum Op {
    Write {
        to: u64,
        from: u64,
        len: u32,
    },
    Inline {
        to: u64,
        bytes: Vec<u8>,
    },
    Read {
        from: u64,
        to: u64,
        len: u32,
    },
    Add {
        at: u64,
        sink: u64,
        add: u64,
    },
    Swap {
        at: u64,
        sink: u64,
        compare: u64,
        swap: u64,
    },
    Add4 {
        at: u64,
        sink: u64,
        add: u32,
        boundary: u32,
    },
    Swap8 {
        at: u64,
        sink: u64,
        compare: (u64, u64),
        swap: (u64, u64),
    },
    Nop,
}

pub fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Mostly inside, sometimes over the edge.
    let addr = prop_oneof![12 => 0..LEN as u64, 4 => (0..32u64).prop_map(|i| i * 8), 1 => Just(u64::MAX - 3)];
    let len = prop_oneof![4 => Just(8u32), 3 => 1..64u32, 1 => 1..LEN as u32 + 2];
    let word = prop_oneof![12 => (0..31u64).prop_map(|i| i * 8), 1 => 0..LEN as u64];
    let op = prop_oneof![
        4 => (addr.clone(), addr.clone(), len.clone()).prop_map(|(to, from, len)| Op::Write { to, from, len }),
        3 => (addr.clone(), prop::collection::vec(any::<u8>(), 0..=28)).prop_map(|(to, bytes)| Op::Inline { to, bytes }),
        3 => (addr.clone(), addr.clone(), len).prop_map(|(from, to, len)| Op::Read { from, to, len }),
        2 => (word.clone(), addr.clone(), any::<u64>()).prop_map(|(at, sink, add)| Op::Add { at, sink, add }),
        1 => (word.clone(), addr.clone(), prop_oneof![Just(0), any::<u64>()], any::<u64>())
            .prop_map(|(at, sink, compare, swap)| Op::Swap { at, sink, compare, swap }),
        1 => (word.clone(), addr.clone(), any::<u32>(), any::<u32>())
            .prop_map(|(at, sink, add, boundary)| Op::Add4 { at, sink, add, boundary }),
        1 => (word, addr, any::<(u64, u64)>(), any::<(u64, u64)>())
            .prop_map(|(at, sink, compare, swap)| Op::Swap8 { at, sink, compare, swap }),
        1 => Just(Op::Nop),
    ];
    prop::collection::vec(op, 1..40)
}

/// The WQE of an operation between a local and a remote region.
pub fn wqe(op: &Op, src: Key, dst: Key) -> Option<Wqe> {
    let there = |at: u64| Remote { addr: at, key: dst };
    let here = |at: u64, len| Local {
        addr: at,
        key: src,
        len,
    };
    Some(
        match op {
            Op::Write { to, from, len } => Wqe::write(there(*to), here(*from, *len)),
            Op::Inline { to, bytes } => Wqe::write_inline(there(*to), bytes),
            Op::Read { from, to, len } => Wqe::read(there(*from), here(*to, *len)),
            Op::Add { at, sink, add } => Wqe::fetch_add(there(*at), here(*sink, 8), *add),
            Op::Swap {
                at,
                sink,
                compare,
                swap,
            } => Wqe::compare_swap(there(*at), here(*sink, 8), *compare, *swap),
            Op::Add4 {
                at,
                sink,
                add,
                boundary,
            } => Wqe::masked_fetch_add4(there(*at), here(*sink, 4), *add, *boundary),
            Op::Swap8 {
                at,
                sink,
                compare,
                swap,
            } => Wqe::masked_compare_swap8(there(*at), here(*sink, 8), *compare, *swap),
            Op::Nop => Ok(Wqe::nop()),
        }
        // The builder refuses misaligned atomics; the engine's own answer to them is tested in `faults.rs`.
        .ok()?
        .signalled(true),
    )
}

/// The local and the remote region.
pub struct Model {
    pub src: Vec<u8>,
    pub dst: Vec<u8>,
}

fn range(at: u64, len: usize, fault: Fault) -> Result<std::ops::Range<usize>, Fault> {
    let end = at
        .checked_add(len as u64)
        .filter(|end| *end <= LEN as u64)
        .ok_or(fault)?;
    Ok(at as usize..end as usize)
}

impl Model {
    /// Executes an operation.
    pub fn run(&mut self, op: &Op) -> Result<(), Fault> {
        let atomic =
            |model: &mut Self, at: u64, sink: u64, len: usize, new: &dyn Fn(u64) -> u64| {
                let word = range(at, len, Fault::RkeyRange)?;
                let sink = range(sink, len, Fault::LkeyRange)?;
                let mut bytes = [0; 8];
                bytes[..len].copy_from_slice(&model.dst[word.clone()]);
                let old = u64::from_le_bytes(bytes);
                model.dst[word].copy_from_slice(&new(old).to_le_bytes()[..len]);
                if len == 4 {
                    model.src[sink].copy_from_slice(&(old as u32).to_be_bytes());
                } else {
                    model.src[sink].copy_from_slice(&old.to_le_bytes());
                }
                Ok::<(), Fault>(())
            };
        match op {
            Op::Write { to, from, len } => {
                let to = range(*to, *len as usize, Fault::RkeyRange)?;
                let from = range(*from, *len as usize, Fault::LkeyRange)?;
                self.dst[to].copy_from_slice(&self.src[from]);
            }
            Op::Inline { bytes, .. } if bytes.is_empty() => {}
            Op::Inline { to, bytes } => {
                let to = range(*to, bytes.len(), Fault::RkeyRange)?;
                self.dst[to].copy_from_slice(bytes);
            }
            Op::Read { from, to, len } => {
                let from = range(*from, *len as usize, Fault::RkeyRange)?;
                let to = range(*to, *len as usize, Fault::LkeyRange)?;
                self.src[to].copy_from_slice(&self.dst[from]);
            }
            Op::Add { at, sink, add } => {
                atomic(self, *at, *sink, 8, &|old| old.wrapping_add(*add))?
            }
            Op::Swap {
                at,
                sink,
                compare,
                swap,
            } => {
                atomic(self, *at, *sink, 8, &|old| {
                    if old == *compare { *swap } else { old }
                })?;
            }
            Op::Add4 {
                at,
                sink,
                add,
                boundary,
            } => atomic(self, *at, *sink, 4, &|old| {
                doorbell_wire::arith::masked_add(old, u64::from(*add), u64::from(*boundary))
            })?,
            Op::Swap8 {
                at,
                sink,
                compare,
                swap,
            } => atomic(self, *at, *sink, 8, &|old| {
                doorbell_wire::arith::masked_swap(old, swap.0, compare.0, swap.1, compare.1)
            })?,
            Op::Nop => {}
        }
        Ok(())
    }
}
