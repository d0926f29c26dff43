//! The hot loops: one-slot WRITEs, READs and FETCH_ADDs between host memory, with the keys used before.
//! Anything else, and anything wrong, ends the loop without effect and goes to `exec`, which says what it is. Costs here are counted in
//! instructions: see `examples/engine_rate.rs`.

use core::sync::atomic::{AtomicU64, Ordering};

use doorbell_wire::flags;

use super::qp::EngineQp;
use crate::copy::{copy, store8};
use crate::raw::prefetch;

/// Bytes of one QP moved in one turn, roughly.
pub(super) const TURN_BYTES: u64 = 1 << 20;

/// WQEs fetched ahead. They come from the last-level cache (a GPU writes them there), whose latency is longer than the out-of-order
/// window of a core covers.
pub(super) const AHEAD: u64 = 16;

/// First word of an inline segment of 8 bytes, as loaded.
const INLINE8: u32 = (doorbell_wire::seg::INLINE | 8).swap_bytes();

/// The index's two bytes where the control segment's first word has them, as loaded.
#[inline(always)]
pub(super) fn index_bits(at: u64) -> u64 {
    u64::from((at as u16).swap_bytes()) << 8
}

/// The `fm_ce_se` byte of the control segment's second half, as loaded.
#[inline(always)]
pub(super) fn is_signalled(second: u64) -> bool {
    second & (u64::from(flags::CQ_UPDATE) << 24) != 0
}

impl EngineQp {
    /// Looks at the doorbell before the QP's turn, and asks for the first of its new WQEs: while other QPs have their turns, they arrive.
    #[inline(always)]
    pub(super) fn peek(&mut self) {
        let rung = self.look();
        let end = self.pi.min(self.exec + AHEAD);
        for at in self.exec..end {
            // SAFETY: the slot is in the ring.
            prefetch(unsafe { self.ring.word(((at & self.mask) * 8) as usize) }.as_ptr());
        }
        self.peeked = Some(rung);
    }

    /// Executes WRITEs (`READ`: READs) from `exec` on, up to slot `end`, as long as they are plain. Returns at the first that is not.
    ///
    /// # Safety
    /// The QP is attached, `end <= pi`, no copies are under way, and the cached keys are of this round.
    #[inline(always)]
    pub(super) unsafe fn transfers<const PER_SLOT: bool, const READ: bool>(&mut self, end: u64) {
        let (ring, mask, cq) = (self.ring, self.mask, self.cq);
        let (want, sop) = if READ {
            (self.want_read, self.sop_read)
        } else {
            (self.want_write, self.sop_write)
        };
        let local = if READ {
            self.keys.sink
        } else {
            self.keys.source
        };
        let remote = if READ {
            self.keys.read
        } else {
            self.keys.write
        };
        let (start, mut at, mut signalled, mut bytes) =
            (self.exec, self.exec, self.signalled, 0u64);
        while at < end && bytes < TURN_BYTES {
            // SAFETY: `at & mask` is a slot of the ring, which is mapped and 64-byte aligned; words 0 to 5 lie in the slot.
            let [first, second, addr, rkey, seg0, seg1] = unsafe {
                let slot = ring.word(((at & mask) * 8) as usize);
                if at + AHEAD < end {
                    prefetch(ring.word((((at + AHEAD) & mask) * 8) as usize).as_ptr());
                }
                core::array::from_fn(|i| slot.word(i).load())
            };
            // One compare: opcode, opmod 0, index, QP number, ds 3.
            if first != want | index_bits(at) || rkey as u32 != remote.raw {
                break;
            }
            let signal = is_signalled(second);
            if PER_SLOT && !signal {
                break;
            }
            let addr = addr.swap_bytes();
            let head = seg0 as u32;
            if !READ && head == INLINE8 {
                let (offset, inside) = remote.locate(addr, 8);
                if !inside {
                    break;
                }
                // SAFETY: the range lies inside a region that this round may use.
                unsafe { store8(remote.ptr.add(offset as usize), seg0 >> 32 | seg1 << 32) };
                bytes += 8;
            } else {
                // Inline data of other sizes (bit 31) and empty segments are not for this loop; nor are copies that fill a turn.
                let len = u64::from(head.swap_bytes());
                if len.wrapping_sub(1) >= TURN_BYTES || (seg0 >> 32) as u32 != local.raw {
                    break;
                }
                let (there, inside) = remote.locate(addr, len);
                let (here, inside_too) = local.locate(seg1.swap_bytes(), len);
                if !(inside & inside_too) {
                    break;
                }
                // SAFETY: both ranges lie inside regions that this round may use; WRITE needs no right on the local one, READ's sink has it.
                unsafe {
                    let there = remote.ptr.add(there as usize);
                    let here = local.ptr.add(here as usize);
                    if READ {
                        copy(here, there, len as usize)
                    } else {
                        copy(there, here, len as usize)
                    }
                }
                bytes += len;
                if PER_SLOT && READ {
                    // SAFETY: the CQ is mapped.
                    unsafe { cq.ok_with_count(at, sop, len as u32) };
                }
            }
            if PER_SLOT && !READ {
                // SAFETY: the CQ is mapped.
                unsafe { cq.ok(at, sop) };
            }
            at += 1;
            if signal {
                signalled = at;
            }
        }
        if at != start {
            if signalled != self.signalled {
                (self.signalled, self.signalled_sop) = (signalled, sop);
            }
            self.exec = at;
            self.wqes += at - start;
            self.bytes += bytes;
        }
    }

    /// Executes FETCH_ADDs in the same way.
    ///
    /// # Safety
    /// As for [`Self::transfers`].
    #[inline(always)]
    pub(super) unsafe fn additions<const PER_SLOT: bool>(&mut self, end: u64) {
        let (ring, mask, cq) = (self.ring, self.mask, self.cq);
        let (want, sop, local, remote) = (
            self.want_add,
            self.sop_add,
            self.keys.sink,
            self.keys.atomic,
        );
        let (start, mut at, mut signalled) = (self.exec, self.exec, self.signalled);
        while at < end {
            // SAFETY: `at & mask` is a slot of the ring, which is mapped and 64-byte aligned; the words lie in the slot.
            let [first, second, addr, rkey, add, _, seg0, seg1] = unsafe {
                let slot = ring.word(((at & mask) * 8) as usize);
                core::array::from_fn(|i| slot.word(i).load())
            };
            if first != want | index_bits(at) || rkey as u32 != remote.raw {
                break;
            }
            let signal = is_signalled(second);
            if PER_SLOT && !signal {
                break;
            }
            let (addr, sink) = (addr.swap_bytes(), seg1.swap_bytes());
            let (there, inside) = remote.locate(addr, 8);
            let (here, inside_too) = local.locate(sink, 8);
            let plain = seg0 as u32 == 8u32.swap_bytes() && (seg0 >> 32) as u32 == local.raw;
            let word = remote.ptr.wrapping_add(there as usize);
            if !(inside & inside_too & plain) || (addr | word.addr() as u64) & 7 != 0 {
                break;
            }
            // SAFETY: both ranges lie inside regions that this round may use, and the word is aligned.
            unsafe {
                let old =
                    AtomicU64::from_ptr(word.cast()).fetch_add(add.swap_bytes(), Ordering::AcqRel);
                store8(local.ptr.add(here as usize), old);
                if PER_SLOT {
                    cq.ok_with_count(at, sop, 8);
                }
            }
            at += 1;
            if signal {
                signalled = at;
            }
        }
        if at != start {
            if signalled != self.signalled {
                (self.signalled, self.signalled_sop) = (signalled, sop);
            }
            self.exec = at;
            self.wqes += at - start;
            self.bytes += 8 * (at - start);
        }
    }
}
