//! The usual WQEs: one slot, WRITE or READ of one piece, WRITE of a few inline bytes, FETCH_ADD, without fences, with keys used before. They go to the
//! device without being taken apart first. Anything else, and anything wrong, ends the loop without effect and goes to `post`, which says what it is.
//! What a WQE costs is counted in instructions by `examples/verbs_cost.rs`.

use doorbell_verbs::{Data, Op};
use doorbell_wire::{Chunk, Ctrl, Opcode, flags, seg};

use super::Sent;
use crate::engine::hot::{AHEAD, index_bits};
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
/// Flags that are not for this loop (fences, solicited events), as the second word has them.
const OTHER_FLAGS: u64 = (!flags::CQ_MASK as u64) << 24;
const SIGNALLED: u64 = (flags::CQ_UPDATE as u64) << 24;
/// Opcodes that devices carry out, a bit each.
const DEVICES: u64 = 1 << Opcode::RdmaWrite as u8
    | 1 << Opcode::RdmaWriteImm as u8
    | 1 << Opcode::Send as u8
    | 1 << Opcode::SendImm as u8
    | 1 << Opcode::RdmaRead as u8
    | 1 << Opcode::CompareSwap as u8
    | 1 << Opcode::FetchAdd as u8;

const WRITE: u8 = Opcode::RdmaWrite as u8;
const READ: u8 = Opcode::RdmaRead as u8;
const ADD: u8 = Opcode::FetchAdd as u8;

/// Is this, at slot `at`, a WQE that goes to the device? `want`: a WQE of this queue pair with index 0.
#[inline(always)]
fn goes(first: u64, want: u64, at: u64) -> bool {
    let opcode = (first >> OPCODE) as u8;
    (first ^ (want | index_bits(at))) & SAME == 0 && opcode < 64 && DEVICES >> opcode & 1 != 0
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
        let most = link.nic.port.port().max_message;
        let (atomics, inline_most) = (link.nic.port.device().atomics, link.nic.inline);
        // SAFETY: a slot of the ring, which is mapped and 64-byte aligned.
        let slot = |at: u64| unsafe { ring.word(((at & mask) * 8) as usize) };
        let mut at = self.exec;
        // SAFETY: the first word of a slot.
        let mut first = unsafe { slot(at).load() };
        while at < end && link.room() != 0 && !flight.is_full() {
            if at + AHEAD < end {
                prefetch(slot(at + AHEAD).as_ptr());
            }
            // SAFETY: eight words in a slot.
            let word = |i: usize| unsafe { slot(at).word(i).load() };
            let second = word(1);
            let (opcode, size) = ((first >> OPCODE) as u8, (first >> SIZE) as u8);
            let same = (first ^ (want | index_bits(at))) & SAME == 0;
            if !same || second & OTHER_FLAGS != 0 || (per_slot && second & SIGNALLED == 0) {
                break;
            }
            let (addr, rkey) = (word(2).swap_bytes(), (word(3) as u32).swap_bytes());
            // The data segment is the last of three or four chunks.
            let is_add = opcode == ADD && size == 4 && atomics;
            let data = if is_add { 6 } else { 4 };
            let head = (word(data) as u32).swap_bytes();
            let mut bytes = [0u64; 4];
            let (op, piece, len);
            if head & seg::INLINE != 0 && opcode == WRITE {
                len = head & !seg::INLINE;
                // Header and bytes in the second half of the slot.
                if len > 28 || u32::from(size) != 2 + seg::inline_ds(len) || len > inline_most {
                    break;
                }
                bytes = [word(4), word(5), word(6), word(7)];
                (op, piece) = (
                    Op::Write {
                        addr,
                        rkey,
                        imm: None,
                    },
                    None,
                );
            } else {
                len = head;
                let plain = match opcode {
                    WRITE | READ => size == 3,
                    _ => is_add && len == 8 && addr.is_multiple_of(8),
                };
                let need = match opcode {
                    WRITE => Access::NONE,
                    _ => Access::LOCAL_WRITE,
                };
                let key = ((word(data) >> 32) as u32).swap_bytes();
                let found = link.keys.find(key, word(data + 1).swap_bytes(), len, need);
                if !plain || len >= seg::INLINE || len > most || found.is_none() {
                    break;
                }
                piece = found;
                op = match opcode {
                    WRITE => Op::Write {
                        addr,
                        rkey,
                        imm: None,
                    },
                    READ => Op::Read { addr, rkey },
                    _ => Op::FetchAdd {
                        addr,
                        rkey,
                        add: word(4).swap_bytes(),
                    },
                };
            }
            let next = at + 1;
            // SAFETY: as above.
            let following = unsafe { slot(next).load() };
            let last_of_run = next >= pi || !goes(following, want, next);
            let sent = Sent {
                at,
                last: true,
                ..Sent::default()
            };
            let data = match &piece {
                Some(piece) => Data::Pieces(core::slice::from_ref(piece)),
                // SAFETY: the words are 32 initialised bytes, of which the header takes four, and `len` is at most 28.
                None => Data::Inline(unsafe {
                    core::slice::from_raw_parts(bytes.as_ptr().cast::<u8>().add(4), len as usize)
                }),
            };
            // SAFETY: the piece is of a registered region; inline bytes are copied at once.
            if !unsafe { link.push(sent, 0, last_of_run, op, data) } {
                break;
            }
            let ctrl = Ctrl::parse(Chunk([first, second]));
            flight.push(InFlight::elsewhere(at, ctrl, len));
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
