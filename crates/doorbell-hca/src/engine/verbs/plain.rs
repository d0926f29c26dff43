//! The usual WQEs: one slot, one piece of memory or (WRITE) a few inline bytes, with keys used before. They go to the device without
//! being taken apart first. Anything else, and anything wrong, ends the loop without effect and goes to `post`, which says what it is.
//! What a WQE costs is counted in instructions by `examples/verbs_cost.rs`.

use doorbell_verbs::{Data, Op};
use doorbell_wire::{Chunk, Ctrl, Opcode, seg};

use super::post::flags_of;
use super::{Link, Sent};
use crate::engine::hot::{AHEAD, index_bits, is_signalled};
use crate::engine::qp::{ColdQp, EngineQp, Target};
use crate::engine::roce::InFlight;
use crate::hca::Inner;
use crate::mem::Access;
use crate::raw::prefetch;

/// Where the control segment's first word has the opcode, and where the size, as loaded.
const OPCODE: u32 = 24;
const SIZE: u32 = 56;
/// What must be as the queue pair has it: index, QP number, opcode modifier.
const SAME: u64 = !(0xff << OPCODE | 0xff << SIZE);
/// Opcodes that devices carry out, a bit each.
const DEVICES: u64 = 1 << Opcode::RdmaWrite as u8
    | 1 << Opcode::RdmaWriteImm as u8
    | 1 << Opcode::Send as u8
    | 1 << Opcode::SendImm as u8
    | 1 << Opcode::RdmaRead as u8
    | 1 << Opcode::CompareSwap as u8
    | 1 << Opcode::FetchAdd as u8;

/// Opcode and size of the WQEs that are plain, at the places that they have in the first word from the opcode on.
const fn plain(opcode: Opcode, size: u64) -> u64 {
    opcode as u64 | size << (SIZE - OPCODE)
}
const WRITE: u64 = plain(Opcode::RdmaWrite, 3);
const WRITE_IMM: u64 = plain(Opcode::RdmaWriteImm, 3);
const INLINE: u64 = WRITE;
/// More inline data than one chunk has.
const INLINE_LONGER: u64 = plain(Opcode::RdmaWrite, 4);
const READ: u64 = plain(Opcode::RdmaRead, 3);
const SEND: u64 = plain(Opcode::Send, 2);
const SEND_IMM: u64 = plain(Opcode::SendImm, 2);
const ADD: u64 = plain(Opcode::FetchAdd, 4);
const SWAP: u64 = plain(Opcode::CompareSwap, 4);
/// The bit of a data segment's first word that says that its bytes follow, as loaded.
const HEADER: u32 = seg::INLINE.swap_bytes();

/// Is this, at slot `at`, a WQE that goes to the device? `want`: a WQE of this queue pair with index 0.
#[inline(always)]
fn goes(first: u64, want: u64, at: u64) -> bool {
    let opcode = (first >> OPCODE) as u8;
    (first ^ (want | index_bits(at))) & SAME == 0 && opcode < 64 && DEVICES >> opcode & 1 != 0
}

#[inline(always)]
fn write_to(addr: u64, rkey: u32, imm: Option<u32>) -> Op {
    Op::Write { addr, rkey, imm }
}

/// A request on its way: the bytes that it moves if it was posted, `None` if it is not plain.
struct Run<'a> {
    link: &'a mut Link,
    sent: Sent,
    flags: u32,
    ask: bool,
}

impl Run<'_> {
    /// Of one piece of memory, as a data segment's two words describe it.
    #[inline(always)]
    fn piece(&mut self, op: Op, [head, from]: [u64; 2], need: Access) -> Option<u32> {
        let (len, key) = ((head as u32).swap_bytes(), (head >> 32) as u32);
        let keys = &self.link.keys;
        let piece = keys.find(key.swap_bytes(), from.swap_bytes(), len, need)?;
        if len >= seg::INLINE || len > self.link.nic.port.port().max_message {
            return None;
        }
        let data = Data::Pieces(core::slice::from_ref(&piece));
        // SAFETY: the piece is of a registered region.
        unsafe { self.link.push(self.sent, self.flags, self.ask, op, data) }.then_some(len)
    }

    #[inline(always)]
    fn atomic(&mut self, op: Op, addr: u64, sink: [u64; 2]) -> Option<u32> {
        let whole = sink[0] as u32 == 8u32.swap_bytes() && addr.is_multiple_of(8);
        whole.then(|| self.piece(op, sink, Access::LOCAL_WRITE))?
    }

    /// Of the bytes in the second half of a slot, behind their header, if the WQE has the size for that.
    #[inline(always)]
    fn inline(&mut self, op: Op, size: u32, words: &[u64; 4]) -> Option<u32> {
        let len = (words[0] as u32).swap_bytes() ^ seg::INLINE;
        if len > 28 || size != 2 + seg::inline_ds(len) || len > self.link.nic.inline {
            return None;
        }
        // SAFETY: 32 initialised bytes, of which the header takes four, and `len` is at most 28.
        let bytes = unsafe {
            let bytes = words.as_ptr().cast::<u8>().add(4);
            core::slice::from_raw_parts(bytes, len as usize)
        };
        // SAFETY: inline bytes are copied at once.
        unsafe {
            self.link
                .push(self.sent, self.flags, self.ask, op, Data::Inline(bytes))
        }
        .then_some(len)
    }
}

impl EngineQp {
    /// Posts from `exec` on, up to slot `end`, as long as requests are plain and the device has room.
    ///
    /// # Safety
    /// The QP is attached, and `end <= pi`.
    pub(in crate::engine) unsafe fn post_plain(&mut self, inner: &Inner, end: u64) {
        let (ring, mask, pi, want) = (self.ring, self.mask, self.pi, self.want_write);
        let per_slot = self.per_slot();
        let ColdQp { target, flight, .. } = &mut *self.cold;
        let Target::Verbs(link) = target else { return };
        link.keys.refresh(inner);
        let atomics = link.nic.port.device().atomics;
        // SAFETY: a slot of the ring, which is mapped and 64-byte aligned.
        let slot = |at: u64| unsafe { ring.word(((at & mask) * 8) as usize) };
        let mut at = self.exec;
        let room = link.room().min(flight.room());
        let end = end.min(at + room);
        // SAFETY: the first word of a slot.
        let mut first = unsafe { slot(at).load() };
        while at < end {
            if at + AHEAD < end {
                prefetch(slot(at + AHEAD).as_ptr());
            }
            let here = slot(at);
            // SAFETY: eight words in a slot.
            let word = |i: usize| unsafe { here.word(i).load() };
            let second = word(1);
            let same = (first ^ (want | index_bits(at))) & SAME == 0;
            if !same || (per_slot && !is_signalled(second)) {
                break;
            }
            let next = at + 1;
            // SAFETY: as above.
            let following = unsafe { slot(next).load() };
            let ask = next >= pi || !goes(following, want, next);
            let ctrl = Ctrl::parse(Chunk([first, second]));
            let (addr, rkey) = (word(2).swap_bytes(), (word(3) as u32).swap_bytes());
            let imm = Some(ctrl.imm);
            let mut run = Run {
                link,
                sent: Sent::whole(at),
                flags: flags_of(ctrl),
                ask,
            };
            let (read, write) = (Access::NONE, Access::LOCAL_WRITE);
            // Each arm has a copy of all that follows, made for its operation.
            let posted = match (first & !SAME) >> OPCODE {
                INLINE | INLINE_LONGER if word(4) as u32 & HEADER != 0 => {
                    // Header and bytes in the second half of the slot.
                    let words = [word(4), word(5), word(6), word(7)];
                    run.inline(write_to(addr, rkey, None), (first >> SIZE) as u32, &words)
                }
                WRITE => run.piece(write_to(addr, rkey, None), [word(4), word(5)], read),
                WRITE_IMM => run.piece(write_to(addr, rkey, imm), [word(4), word(5)], read),
                READ => run.piece(Op::Read { addr, rkey }, [word(4), word(5)], write),
                SEND => run.piece(Op::Send { imm: None }, [word(2), word(3)], read),
                SEND_IMM => run.piece(Op::Send { imm }, [word(2), word(3)], read),
                ADD if atomics => {
                    let add = word(4).swap_bytes();
                    let op = Op::FetchAdd { addr, rkey, add };
                    run.atomic(op, addr, [word(6), word(7)])
                }
                SWAP if atomics => {
                    let [swap, compare] = [word(4), word(5)].map(u64::swap_bytes);
                    let op = Op::CompareSwap {
                        addr,
                        rkey,
                        compare,
                        swap,
                    };
                    run.atomic(op, addr, [word(6), word(7)])
                }
                _ => None,
            };
            let Some(bytes) = posted else { break };
            flight.push(InFlight::elsewhere(at, ctrl, bytes));
            (at, first) = (next, following);
        }
        if at != self.exec {
            (self.exec, self.park) = (at, None);
        }
    }

    /// Should the device say when the WQE before slot `next` is complete? Yes, unless the next one is there, and goes to the device too.
    pub(super) fn is_last_of_run(&self, next: u64) -> bool {
        // SAFETY: a slot of the ring, which is mapped while the QP is attached.
        let first = unsafe { self.ring.word(((next & self.mask) * 8) as usize).load() };
        next >= self.pi || !goes(first, self.want_write, next)
    }
}
