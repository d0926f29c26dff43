//! Writing completions. The body first, the last eight bytes last and in one store: pollers look only at those.
//! Per-slot CQs get one CQE a WQE; a collapsed CQ has one CQE, rewritten once a turn with the newest signalled WQE.

use core::ops::Range;

use doorbell_device::layout::CqKind;
use doorbell_wire::cqe::{self, CqeTail, Kind};
use doorbell_wire::{Qpn, Syndrome, Vendor};

use crate::qp::CqConfig;
use crate::raw::{Shared, fill_words};
use crate::record::Numbered;

/// Words in a CQE.
const WORDS: usize = 8;

/// One CQ, as its only writer has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CqWriter {
    ring: Shared<u64>,
    mask: u64,
    log: u32,
    collapsed: bool,
    qpn: Qpn,
}

impl CqWriter {
    pub(crate) fn new(config: &CqConfig, qpn: Qpn) -> Self {
        let collapsed = config.kind == CqKind::Collapsed;
        let log = if collapsed {
            0
        } else {
            u32::from(config.log_entries)
        };
        Self {
            ring: config.ring.cast(),
            mask: (1 << log) - 1,
            log,
            collapsed,
            qpn,
        }
    }

    pub(crate) fn is_collapsed(&self) -> bool {
        self.collapsed
    }

    /// Makes every entry "not written yet": owner bit 1 for pollers of a per-slot CQ, whose first lap has owner bit 0.
    ///
    /// # Safety
    /// The CQ is mapped and nobody uses it.
    pub(crate) unsafe fn initialise(&self) {
        let entries = self.mask as usize + 1;
        let tail = CqeTail::initial(u8::from(!self.collapsed));
        // SAFETY: the caller's promise; `entries` CQEs of eight words each.
        unsafe {
            fill_words(self.ring, entries * WORDS, 0);
            for i in 0..entries {
                self.ring
                    .word(i * WORDS + WORDS - 1)
                    .store_release(u64::from(tail.0) << 32);
            }
        }
    }

    /// The CQE of position `at`, and its owner bit.
    #[inline(always)]
    fn entry(&self, at: u64) -> (Shared<u64>, u8) {
        // SAFETY: `at & mask` is below the number of entries.
        let entry = unsafe { self.ring.word((at & self.mask) as usize * WORDS) };
        (
            entry,
            if self.collapsed {
                0
            } else {
                cqe::owner(at, self.log)
            },
        )
    }

    /// The low half of the last eight bytes: opcode and QP number.
    #[inline(always)]
    pub(crate) fn sop(&self, opcode: u8) -> u32 {
        ((opcode as u32) << 24 | self.qpn.get()).swap_bytes()
    }

    /// Completes the WQE at slot `at`: one eight-byte store, after everything before it.
    ///
    /// # Safety
    /// The CQ is mapped (the QP is attached).
    #[inline(always)]
    pub(crate) unsafe fn ok(&self, at: u64, sop: u32) {
        let (entry, owner) = self.entry(at);
        let tail = CqeTail::new(at as u16, Kind::Requester, owner);
        // SAFETY: the caller's promise; word 7 lies inside the CQE.
        unsafe {
            entry
                .word(7)
                .store_release(u64::from(sop) | u64::from(tail.0) << 32)
        };
    }

    /// As [`Self::ok`], with the byte count that READs and atomics report.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn ok_with_count(&self, at: u64, sop: u32, byte_cnt: u32) {
        let (entry, _) = self.entry(at);
        // SAFETY: the caller's promise; word 5 (bytes 40 to 47) lies inside the CQE.
        unsafe {
            entry.word(5).store(u64::from(byte_cnt.swap_bytes()) << 32);
            self.ok(at, sop);
        }
    }

    /// Completes a receive: number `at` of this CQ, receive WQE `index`.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn received(&self, at: u64, index: u16, kind: Kind, byte_cnt: u32, imm: u32) {
        let (entry, owner) = self.entry(at);
        let chunks = cqe::recv_chunks(kind, self.qpn, index, owner, byte_cnt, imm);
        // SAFETY: the caller's promise.
        unsafe { write(entry, &chunks) };
    }

    /// Lets `write` write into `words` instead of the CQ.
    pub(crate) fn onto(&self, words: &mut [u64; WORDS], write: impl FnOnce(&Self)) {
        let scratch = Self {
            ring: Shared::new(core::ptr::NonNull::from(&mut words[0])),
            mask: 0,
            ..*self
        };
        write(&scratch);
    }

    /// Puts a CQE that was made before into position `at`.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn put(&self, at: u64, words: &[u64; WORDS]) {
        let (entry, _) = self.entry(at);
        for (i, word) in words[..WORDS - 1].iter().enumerate() {
            // SAFETY: the caller's promise; eight words in a CQE.
            unsafe { entry.word(i).store(*word) };
        }
        // SAFETY: as above.
        unsafe { entry.word(WORDS - 1).store_release(words[WORDS - 1]) };
    }

    /// The words of the CQE of position `at`, as they lie in memory.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn words(&self, at: u64) -> [u64; WORDS] {
        let (entry, _) = self.entry(at);
        // SAFETY: the caller's promise; eight words in a CQE.
        core::array::from_fn(|i| unsafe { entry.word(i).load() })
    }

    /// The first of some positions that does not show what was written there, by `shows`, and its words. For who looks, not for who works.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn first_lacking(
        &self,
        mut of: Range<u64>,
        shows: impl Fn(&Self, u64, u64) -> bool,
    ) -> Option<Numbered> {
        of.find_map(|at| {
            let (entry, _) = self.entry(at);
            // SAFETY: the caller's promise; word 7 lies inside the CQE.
            let last = unsafe { entry.word(WORDS - 1).load() };
            // SAFETY: the caller's promise.
            (!shows(self, at, last)).then(|| (at, unsafe { self.words(at) }))
        })
    }

    /// Does a CQE's last word say that the send WQE of that position completed, or failed?
    pub(crate) fn shows_send(&self, at: u64, last: u64) -> bool {
        let kinds = [Kind::Requester, Kind::RequesterError];
        self.shows(at, last, &kinds)
    }

    /// Does it say that the receive of that position was filled, or failed?
    pub(crate) fn shows_receive(&self, at: u64, last: u64) -> bool {
        let kinds = [
            Kind::ResponderWriteImm,
            Kind::ResponderSend,
            Kind::ResponderSendImm,
            Kind::ResponderError,
        ];
        self.shows(at, last, &kinds)
    }

    fn shows(&self, at: u64, last: u64, kinds: &[Kind]) -> bool {
        let (_, owner) = self.entry(at);
        let qpn = u32::from_be(last as u32) & 0xff_ffff;
        let tail = (last >> 32) as u32;
        qpn == self.qpn.get()
            && kinds
                .iter()
                .any(|kind| tail == CqeTail::new(at as u16, *kind, owner).0)
    }

    /// Completes slot `at` in error.
    ///
    /// # Safety
    /// As for [`Self::ok`].
    pub(crate) unsafe fn error(
        &self,
        at: u64,
        index: u16,
        kind: Kind,
        opcode: u8,
        syndrome: Syndrome,
        vendor: Vendor,
    ) {
        let (entry, owner) = self.entry(at);
        let chunks = cqe::error_chunks(kind, self.qpn, opcode, index, owner, syndrome, vendor);
        // SAFETY: the caller's promise.
        unsafe { write(entry, &chunks) };
    }
}

/// Writes a whole CQE, its last word last.
unsafe fn write(entry: Shared<u64>, chunks: &[doorbell_wire::Chunk; 4]) {
    for (i, chunk) in chunks.iter().enumerate() {
        for (j, word) in chunk.0.into_iter().enumerate() {
            // SAFETY: eight words in a CQE, which the callers promise is mapped.
            unsafe {
                if i == 3 && j == 1 {
                    entry.word(7).store_release(word);
                } else {
                    entry.word(2 * i + j).store(word);
                }
            }
        }
    }
}
