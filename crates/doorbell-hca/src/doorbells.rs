//! Doorbell words in compact arrays: eight to a cache line, each line scanned by one engine core.
//! The host library gives arrays (memory that its GPU can write) and reserves words for its QPs; the engine looks at eight words at a time.

use core::fmt;
use core::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{HcaError, Result};
use crate::mem::Keep;
use crate::raw::Shared;

/// Words in a line.
pub const WORDS_PER_LINE: usize = 8;

/// Memory for doorbell words.
#[derive(Clone)]
pub struct DoorbellArray {
    /// First word, 64-byte aligned.
    pub words: Shared<u64>,
    /// Number of words, a multiple of 8.
    pub len: usize,
    /// Keeps the memory mapped.
    pub keep: Keep,
}

impl fmt::Debug for DoorbellArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} doorbell words at {:?}", self.len, self.words)
    }
}

/// A reserved word; given back when the last clone is dropped. A QP keeps one; whoever knows that somebody may still ring the
/// word after the QP is gone (a kernel that is abandoned, say) keeps another, so that no other QP gets the word meanwhile.
#[derive(Clone)]
pub struct DoorbellSlot(Arc<Slot>);

struct Slot {
    core: usize,
    array: usize,
    index: usize,
    line: Shared<u64>,
    pool: Weak<Mutex<Pool>>,
    _keep: Keep,
}

impl fmt::Debug for DoorbellSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slot {
            core, array, index, ..
        } = &*self.0;
        write!(f, "doorbell word {index} of array {array} (core {core})")
    }
}

impl DoorbellSlot {
    /// The engine core that scans it.
    pub fn core(&self) -> usize {
        self.0.core
    }

    /// Which array, in the order they were added.
    pub fn array(&self) -> usize {
        self.0.array
    }

    /// Index of the word in its array: the device address is the array's plus eight times this.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The word.
    pub fn word(&self) -> Shared<u64> {
        // SAFETY: the line has eight words, all inside the array.
        unsafe { self.0.line.word(self.word_in_line()) }
    }

    pub(crate) fn line(&self) -> Shared<u64> {
        self.0.line
    }

    pub(crate) fn word_in_line(&self) -> usize {
        self.0.index % WORDS_PER_LINE
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
            let (line, word) = (self.index / WORDS_PER_LINE, self.index % WORDS_PER_LINE);
            if let Some(line) = pool
                .arrays
                .get_mut(self.array)
                .and_then(|a| a.lines.get_mut(line))
            {
                line.used &= !(1 << word);
                if line.used == 0 {
                    line.core = None;
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct Pool {
    arrays: Vec<ArrayState>,
}

#[derive(Debug)]
struct ArrayState {
    array: DoorbellArray,
    lines: Vec<LineState>,
}

#[derive(Debug, Clone, Copy, Default)]
struct LineState {
    core: Option<usize>,
    used: u8,
}

/// All arrays of an HCA.
#[derive(Debug, Default)]
pub(crate) struct Doorbells {
    pool: Arc<Mutex<Pool>>,
}

impl Doorbells {
    pub(crate) fn add(&self, array: DoorbellArray) -> Result<usize> {
        if !array.words.is_aligned_to(64)
            || array.len == 0
            || !array.len.is_multiple_of(WORDS_PER_LINE)
        {
            return Err(HcaError::BadConfig {
                what: format!(
                    "{array:?}: arrays must be 64-byte aligned and hold a multiple of {WORDS_PER_LINE} words"
                ),
            });
        }
        let lines = vec![LineState::default(); array.len / WORDS_PER_LINE];
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        pool.arrays.push(ArrayState { array, lines });
        Ok(pool.arrays.len() - 1)
    }

    /// A free word in a line of that core; takes a new line only when the core's are full.
    pub(crate) fn reserve(&self, core: usize, array: Option<usize>) -> Result<DoorbellSlot> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = |index: usize| array.is_none_or(|a| a == index);
        let find = |pool: &Pool, owned: Option<usize>| {
            pool.arrays
                .iter()
                .enumerate()
                .filter(|(i, _)| wanted(*i))
                .find_map(|(i, a)| {
                    let line = a
                        .lines
                        .iter()
                        .position(|l| l.core == owned && l.used != u8::MAX)?;
                    Some((i, line))
                })
        };
        let Some((array, line)) = find(&pool, Some(core)).or_else(|| find(&pool, None)) else {
            return Err(HcaError::Exhausted {
                what: "doorbell word (add a doorbell array)",
            });
        };
        let state = &mut pool.arrays[array];
        let words = state.array.words;
        let keep = Arc::clone(&state.array.keep);
        let slot = &mut state.lines[line];
        slot.core = Some(core);
        let word = slot.used.trailing_ones() as usize;
        slot.used |= 1 << word;
        // SAFETY: `line` is below the number of lines, so its first word is inside the array.
        let line_ptr = unsafe { words.word(line * WORDS_PER_LINE) };
        Ok(DoorbellSlot(Arc::new(Slot {
            core,
            array,
            index: line * WORDS_PER_LINE + word,
            line: line_ptr,
            pool: Arc::downgrade(&self.pool),
            _keep: keep,
        })))
    }
}

/// Heap memory for doorbell words, for posters on this host only.
pub(crate) fn host_array(words: usize) -> DoorbellArray {
    #[repr(align(64))]
    struct Line(
        #[allow(dead_code, reason = "memory, reached by pointer")]
        [core::sync::atomic::AtomicU64; WORDS_PER_LINE],
    );
    let lines = words.div_ceil(WORDS_PER_LINE).max(1);
    let memory: Arc<[Line]> = (0..lines).map(|_| Line(Default::default())).collect();
    let ptr = NonNull::from(&memory[..]).cast::<u64>();
    DoorbellArray {
        words: Shared::new(ptr),
        len: lines * WORDS_PER_LINE,
        keep: Arc::new(memory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_belong_to_one_core_and_words_come_back() {
        let bells = Doorbells::default();
        assert!(bells.reserve(0, None).is_err());
        bells.add(host_array(16)).expect("aligned");
        let first: Vec<_> = (0..8)
            .map(|_| bells.reserve(0, None).expect("free"))
            .collect();
        let other = bells.reserve(1, None).expect("free");
        assert_eq!(other.index(), 8);
        assert!(
            bells.reserve(0, None).is_err(),
            "the second line is core 1's"
        );
        assert_eq!(first[3].word().addr(), first[0].word().addr() + 24);
        drop(other);
        assert_eq!(bells.reserve(0, None).expect("line free again").index(), 8);
    }
}
