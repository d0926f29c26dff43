//! Finding doorbells that were rung: lines of up to eight words, compared with what was last seen there.
//! QPs in use are looked at directly; this sweep is for the idle ones, a few lines a round, so thousands of them cost next to nothing.

use crate::doorbells::WORDS_PER_LINE;
use crate::raw::Shared;

/// No QP.
pub(super) const NOBODY: u32 = u32::MAX;

/// A line of words of one core.
#[derive(Debug)]
struct Line {
    words: Shared<u64>,
    /// 8 for a line of an array, 1 for a word of its own, 0 for a doorbell record (32 bits).
    kind: LineKind,
    qps: [u32; WORDS_PER_LINE],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineKind {
    Eight,
    One,
    Record,
    Empty,
}

/// What was last seen in a line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Seen([u64; WORDS_PER_LINE]);

/// All lines of a core.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lines: Vec<Line>,
    seen: Vec<Seen>,
    next: usize,
}

impl Lines {
    /// Adds word `word` of the line at `line` for a QP.
    pub(super) fn add_slot(&mut self, line: Shared<u64>, word: usize, qp: u32) {
        let known = self
            .lines
            .iter()
            .position(|l| l.kind == LineKind::Eight && l.words == line);
        let index = known.unwrap_or_else(|| self.new_line(line, LineKind::Eight));
        self.lines[index].qps[word] = qp;
        self.seen[index].0[word] = 0;
    }

    /// Adds a word by itself.
    pub(super) fn add_word(&mut self, word: Shared<u64>, record: bool, qp: u32) {
        let kind = if record {
            LineKind::Record
        } else {
            LineKind::One
        };
        let index = self.new_line(word, kind);
        self.lines[index].qps[0] = qp;
    }

    fn new_line(&mut self, words: Shared<u64>, kind: LineKind) -> usize {
        let line = Line {
            words,
            kind,
            qps: [NOBODY; WORDS_PER_LINE],
        };
        if let Some(index) = self.lines.iter().position(|l| l.kind == LineKind::Empty) {
            self.lines[index] = line;
            self.seen[index] = Seen([0; WORDS_PER_LINE]);
            return index;
        }
        self.lines.push(line);
        self.seen.push(Seen([0; WORDS_PER_LINE]));
        self.lines.len() - 1
    }

    /// Removes a QP's word. A line without QPs is not looked at any more: its memory may go.
    pub(super) fn remove(&mut self, qp: u32) {
        for line in &mut self.lines {
            for owner in &mut line.qps {
                if *owner == qp {
                    *owner = NOBODY;
                }
            }
            if line.kind != LineKind::Empty && line.qps.iter().all(|q| *q == NOBODY) {
                line.kind = LineKind::Empty;
            }
        }
    }

    /// The word of that QP was reset to zero.
    pub(super) fn forget(&mut self, qp: u32) {
        for (line, seen) in self.lines.iter().zip(&mut self.seen) {
            for (owner, seen) in line.qps.iter().zip(&mut seen.0) {
                if *owner == qp {
                    *seen = 0;
                }
            }
        }
    }

    /// Looks at the next `budget` lines and calls `rung` for the QP of every word that changed.
    ///
    /// # Safety
    /// Every line's memory is mapped (each belongs to an attached QP).
    #[inline(always)]
    pub(super) unsafe fn sweep(&mut self, budget: usize, mut rung: impl FnMut(u32)) {
        let count = self.lines.len();
        for _ in 0..budget.min(count) {
            let index = self.next;
            self.next = if index + 1 == count { 0 } else { index + 1 };
            let (line, seen) = (&self.lines[index], &mut self.seen[index]);
            // SAFETY: the caller's promise.
            if line.kind == LineKind::Eight && unsafe { same(line.words, seen) } {
                continue;
            }
            // SAFETY: the caller's promise.
            unsafe { inspect(line, seen, &mut rung) };
        }
    }
}

#[inline(never)]
unsafe fn inspect(line: &Line, seen: &mut Seen, rung: &mut impl FnMut(u32)) {
    let words = match line.kind {
        LineKind::Eight => WORDS_PER_LINE,
        LineKind::One | LineKind::Record => 1,
        LineKind::Empty => 0,
    };
    for word in 0..words {
        // SAFETY: the caller promises the line's memory; a record is a word of 32 bits.
        let now = unsafe {
            match line.kind {
                LineKind::Record => u64::from(line.words.cast::<u32>().load()),
                _ => line.words.word(word).load(),
            }
        };
        if now != seen.0[word] {
            seen.0[word] = now;
            if line.qps[word] != NOBODY {
                rung(line.qps[word]);
            }
        }
    }
}

/// Are the eight words what was seen?
///
/// # Safety
/// The eight words are mapped and 64-byte aligned.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
unsafe fn same(words: Shared<u64>, seen: &Seen) -> bool {
    use core::arch::x86_64::{
        __m128i, _mm_and_si128, _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8,
    };
    // SAFETY: mapped and aligned, by the contract; SSE2 is part of x86-64. Others store to these words while they are loaded: this is a hint
    // only (each 8-byte half of such a load is old or new), and a word that differs is loaded again as an atomic before it is used.
    unsafe {
        let now = words.as_ptr().cast::<__m128i>();
        let then = seen.0.as_ptr().cast::<__m128i>();
        let equal =
            |i: usize| _mm_cmpeq_epi32(_mm_load_si128(now.add(i)), _mm_load_si128(then.add(i)));
        let all = _mm_and_si128(
            _mm_and_si128(equal(0), equal(1)),
            _mm_and_si128(equal(2), equal(3)),
        );
        _mm_movemask_epi8(all) == 0xffff
    }
}

/// Are the eight words what was seen?
///
/// # Safety
/// The eight words are mapped and aligned.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline(always)]
unsafe fn same(words: Shared<u64>, seen: &Seen) -> bool {
    let mut differ = 0;
    for (i, then) in seen.0.iter().enumerate() {
        // SAFETY: the contract.
        differ |= unsafe { words.word(i).load() } ^ then;
    }
    differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbells::host_array;

    #[test]
    fn finds_exactly_what_was_rung() {
        let array = host_array(32);
        let mut lines = Lines::default();
        for i in 0..20usize {
            // SAFETY: line 0 to 2 of the array.
            let line = unsafe { array.words.word(i / 8 * 8) };
            lines.add_slot(line, i % 8, i as u32);
        }
        let mut found = Vec::new();
        let mut sweep = |lines: &mut Lines| {
            found.clear();
            // SAFETY: the array lives on.
            unsafe { lines.sweep(8, |q| found.push(q)) };
            found.clone()
        };
        assert!(sweep(&mut lines).is_empty());
        // SAFETY: inside the array.
        unsafe {
            array.words.word(3).store(9);
            array.words.word(19).store(1);
            array.words.word(21).store(1);
        }
        let mut rung = sweep(&mut lines);
        rung.sort_unstable();
        assert_eq!(rung, [3, 19], "word 21 belongs to nobody");
        assert!(sweep(&mut lines).is_empty());
        for qp in 16..20 {
            lines.remove(qp);
        }
        // SAFETY: inside the array.
        unsafe { array.words.word(18).store(5) };
        assert!(sweep(&mut lines).is_empty());
        lines.add_word(array.words, false, 77);
        // SAFETY: inside the array.
        unsafe { array.words.store(4) };
        let mut rung = sweep(&mut lines);
        rung.sort_unstable();
        assert_eq!(rung, [0, 77]);
        assert_eq!(lines.lines.len(), 3, "the empty line was used again");
    }
}
