//! Did every byte arrive, once, where it belongs, and nothing anywhere else?
//!
//! Sources are filled with a seeded stream that no pattern of the code under test resembles;
//! before a round every destination byte holds the complement of what it must become, so a byte
//! that was not written is as wrong as one that was written wrongly; what lies around the windows
//! (canaries) must not change. The first mismatch is reported with offset, expected and got.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A stream of bytes given by a seed: any part of it can be made without what precedes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of `seed`, separate for every `part` (round, test, purpose).
    pub(crate) fn new(seed: u64, part: u64) -> Self {
        Self(mix(seed ^ mix(part.wrapping_add(0x6a09_e667_f3bc_c909))))
    }

    /// The 8 bytes at `8 * index`, as a little-endian number.
    pub(crate) fn word(self, index: u64) -> u64 {
        mix(self
            .0
            .wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Fills `into` with the stream from byte `offset`.
    pub(crate) fn fill(self, offset: u64, into: &mut [u8]) {
        let mut index = offset / 8;
        let skip = (offset % 8) as usize;
        let (head, rest) = into.split_at_mut(if skip == 0 {
            0
        } else {
            (8 - skip).min(into.len())
        });
        if !head.is_empty() {
            let word = self.word(index).to_le_bytes();
            head.copy_from_slice(&word[skip..skip + head.len()]);
            index += 1;
        }
        let mut words = rest.chunks_exact_mut(8);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.word(index).to_le_bytes());
            index += 1;
        }
        let tail = words.into_remainder();
        let word = self.word(index).to_le_bytes();
        tail.copy_from_slice(&word[..tail.len()]);
    }
}

/// The finaliser of splitmix64: every input bit changes every output bit half of the time.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Where windows lie in a region: a canary, then windows with a canary after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    /// Windows: one a thread.
    pub(crate) windows: u64,
    /// Bytes of a window.
    pub(crate) window: u64,
    /// Bytes between two windows, and at both ends.
    pub(crate) canary: u64,
}

impl Layout {
    /// Few windows are kept a page apart, as an application's buffers would be; many, at least a
    /// cache line.
    pub(crate) fn new(windows: u64, window: u64) -> Self {
        let canary: u64 = if windows <= 256 { 4096 } else { 64 };
        // Windows begin at cache lines.
        let canary = (window + canary).next_multiple_of(64) - window;
        Self {
            windows,
            window,
            canary,
        }
    }

    /// From one window to the next.
    pub(crate) fn step(&self) -> u64 {
        self.window + self.canary
    }

    /// Where the first window starts.
    pub(crate) fn lead(&self) -> u64 {
        self.canary.next_multiple_of(64)
    }

    /// Bytes of the whole region.
    pub(crate) fn total(&self) -> u64 {
        self.lead() + self.windows * self.step()
    }

    /// The same of a layout that somebody else made up; `None`: there is none of so many bytes, or it has no window of a byte.
    pub(crate) fn possible_total(&self) -> Option<u64> {
        let step = self.window.checked_add(self.canary)?;
        let lead = self.canary.checked_next_multiple_of(64)?;
        let total = self.windows.checked_mul(step)?.checked_add(lead)?;
        (self.windows > 0 && self.window > 0).then_some(total)
    }

    /// The window that `offset` lies in and the offset there; `None` in a canary.
    fn find(&self, offset: u64) -> Option<(u64, u64)> {
        let at = offset.checked_sub(self.lead())?;
        let (window, inside) = (at / self.step(), at % self.step());
        (window < self.windows && inside < self.window).then_some((window, inside))
    }
}

/// What a region must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Picture {
    pub(crate) seed: u64,
    /// Which round's stream: each has new bytes.
    pub(crate) round: u64,
    /// So many bytes at the start of each window hold the stream; the rest, its complement.
    pub(crate) done: u64,
}

/// The part of a seed's streams that canaries are filled with; rounds count up from 0.
const CANARIES: u64 = u64::MAX;

impl Picture {
    /// What a source holds.
    pub(crate) fn source(seed: u64, round: u64) -> Self {
        Self {
            seed,
            round,
            done: u64::MAX,
        }
    }

    /// What a destination holds when `done` bytes of each window have arrived.
    pub(crate) fn sink(seed: u64, round: u64, done: u64) -> Self {
        Self { seed, round, done }
    }

    /// The bytes of a region from `offset` on.
    pub(crate) fn render(&self, layout: &Layout, offset: u64, into: &mut [u8]) {
        let (stream, canary) = (
            Stream::new(self.seed, self.round),
            Stream::new(self.seed, CANARIES),
        );
        let mut at = 0;
        while at < into.len() {
            let position = offset + at as u64;
            let left = (into.len() - at) as u64;
            match layout.find(position) {
                None => {
                    let until = self.next_window(layout, position);
                    let take = (until - position).min(left) as usize;
                    canary.fill(position, &mut into[at..at + take]);
                    at += take;
                }
                Some((window, inside)) => {
                    let from = window * layout.window + inside;
                    let done = inside < self.done;
                    let until = if done {
                        self.done.min(layout.window)
                    } else {
                        layout.window
                    };
                    let take = (until - inside).min(left) as usize;
                    let part = &mut into[at..at + take];
                    stream.fill(from, part);
                    if !done {
                        for byte in part {
                            *byte = !*byte;
                        }
                    }
                    at += take;
                }
            }
        }
    }

    /// Where the canary that `position` lies in ends.
    fn next_window(&self, layout: &Layout, position: u64) -> u64 {
        let Some(at) = position.checked_sub(layout.lead()) else {
            return layout.lead();
        };
        let next = layout.lead() + (at / layout.step() + 1) * layout.step();
        next.min(layout.total()).max(position.saturating_add(1))
    }

    /// Compares `got`, which lies at `offset` of the region, with what must be there (`scratch`
    /// is as long), and counts into `verdict`.
    pub(crate) fn compare(
        &self,
        layout: &Layout,
        offset: u64,
        got: &[u8],
        scratch: &mut [u8],
        verdict: &mut Verdict,
    ) {
        let expected = &mut scratch[..got.len()];
        self.render(layout, offset, expected);
        verdict.count(layout, offset, got, expected, self.done);
    }
}

/// The outcome of comparing a region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// Bytes compared, canaries included.
    pub(crate) bytes: u64,
    /// Bytes that are wrong.
    pub(crate) wrong: u64,
    pub(crate) first: Option<Mismatch>,
}

impl Verdict {
    /// Counts what is wrong in `got`, which lies at `offset` of the region. Bytes below `done` in
    /// each window were the complement of what is expected.
    pub(crate) fn count(
        &mut self,
        layout: &Layout,
        offset: u64,
        got: &[u8],
        expected: &[u8],
        done: u64,
    ) {
        self.bytes += got.len() as u64;
        if expected == got {
            return;
        }
        for (i, (&e, &g)) in expected.iter().zip(got).enumerate() {
            if e == g {
                continue;
            }
            self.wrong += 1;
            let at = offset + i as u64;
            let window = layout.find(at);
            self.first.get_or_insert_with(|| Mismatch {
                offset: at,
                window,
                expected: e,
                got: g,
                unwritten: g == !e && window.is_some_and(|(_, inside)| inside < done),
            });
        }
    }
}

/// The first byte that is not what it must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mismatch {
    /// In the region.
    pub(crate) offset: u64,
    /// Window and offset there; `None` in a canary.
    pub(crate) window: Option<(u64, u64)>,
    pub(crate) expected: u8,
    pub(crate) got: u8,
    /// It looks as if nothing was ever written there.
    pub(crate) unwritten: bool,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "offset {:#x}: expected {:#04x}, got {:#04x}",
            self.offset, self.expected, self.got
        )?;
        match self.window {
            Some((window, inside)) => write!(f, " (byte {inside} of thread {window}'s window")?,
            None => write!(f, " (outside every window: a stray write")?,
        }
        if self.unwritten {
            write!(f, "; never written")?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_stream_agrees_with_the_whole() {
        let stream = Stream::new(7, 3);
        let mut whole = vec![0; 100];
        stream.fill(0, &mut whole);
        for start in 0..20 {
            for len in 0..40 {
                let mut part = vec![0; len];
                stream.fill(start as u64, &mut part);
                assert_eq!(part, whole[start..start + len], "{start} {len}");
            }
        }
        let mut other = vec![0; 100];
        Stream::new(7, 4).fill(0, &mut other);
        let same = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 20, "{same} of 100 bytes agree between two streams");
    }

    fn region(layout: &Layout, picture: &Picture) -> Vec<u8> {
        let mut bytes = vec![0; layout.total() as usize];
        picture.render(layout, 0, &mut bytes);
        bytes
    }

    fn verdict(layout: &Layout, picture: &Picture, got: &[u8], offset: u64) -> Verdict {
        let mut verdict = Verdict::default();
        let mut scratch = vec![0; got.len()];
        picture.compare(layout, offset, got, &mut scratch, &mut verdict);
        verdict
    }

    #[test]
    fn pictures_render_alike_in_any_pieces() {
        for (windows, window) in [(3, 100), (300, 24), (1, 4096)] {
            let layout = Layout::new(windows, window);
            let picture = Picture::sink(5, 2, window / 2);
            let whole = region(&layout, &picture);
            let mut at = 0;
            for step in [1, 7, 63, 64, 1000].into_iter().cycle() {
                let end = (at + step).min(whole.len());
                let mut part = vec![0; end - at];
                picture.render(&layout, at as u64, &mut part);
                assert_eq!(part, whole[at..end], "{at}..{end}");
                at = end;
                if at == whole.len() {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_sink_that_got_everything_has_the_source_in_its_windows() {
        let layout = Layout::new(4, 80);
        let source = region(&layout, &Picture::source(9, 1));
        let full = region(&layout, &Picture::sink(9, 1, 80));
        assert_eq!(source, full);
        let empty = region(&layout, &Picture::sink(9, 1, 0));
        for (i, (a, b)) in source.iter().zip(&empty).enumerate() {
            let inside = layout.find(i as u64).is_some();
            assert_eq!(*a == !*b, inside, "byte {i}");
            assert_eq!(*a == *b, !inside, "byte {i}");
        }
    }

    #[test]
    fn wrong_missing_and_stray_bytes_are_told_apart() {
        let layout = Layout::new(2, 64);
        let picture = Picture::sink(1, 1, 64);
        let good = region(&layout, &picture);
        let clean = verdict(&layout, &picture, &good, 0);
        assert_eq!((clean.wrong, clean.bytes), (0, layout.total()));

        let mut bad = good.clone();
        let at = (layout.lead() + layout.step() + 13) as usize;
        bad[at] ^= 0x40;
        bad[at + 20] ^= 1;
        let found = verdict(&layout, &picture, &bad, 0);
        assert_eq!(found.wrong, 2);
        let first = found.first.unwrap();
        assert_eq!((first.offset, first.window), (at as u64, Some((1, 13))));
        assert!(!first.unwritten);

        let mut bad = good.clone();
        bad[at] = !bad[at];
        let text = verdict(&layout, &picture, &bad, 0)
            .first
            .unwrap()
            .to_string();
        assert!(text.contains("never written"), "{text}");

        let mut bad = good;
        bad[3] ^= 1;
        let text = verdict(&layout, &picture, &bad, 0)
            .first
            .unwrap()
            .to_string();
        assert!(text.starts_with("offset 0x3: expected 0x"), "{text}");
        assert!(text.contains("stray"), "{text}");
    }

    #[test]
    fn windows_begin_at_cache_lines_and_have_canaries() {
        for (windows, window) in [(1, 8), (3, 100), (1000, 8), (257, 64)] {
            let layout = Layout::new(windows, window);
            assert_eq!(layout.lead() % 64, 0);
            assert_eq!(layout.step() % 64, 0);
            assert!(layout.canary >= 64);
            assert_eq!(layout.find(layout.lead() - 1), None);
            assert_eq!(layout.find(layout.lead()), Some((0, 0)));
            assert_eq!(layout.find(layout.lead() + window), None);
            assert_eq!(layout.find(layout.total() - 1), None);
            let last = layout.lead() + (windows - 1) * layout.step();
            assert_eq!(layout.find(last), Some((windows - 1, 0)));
        }
    }
}
