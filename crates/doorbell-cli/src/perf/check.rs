//! Did every byte arrive, once, where it belongs, and nothing anywhere else?
//!
//! Sources are filled with a seeded stream that no pattern of the code under test resembles;
//! before a round every destination byte holds the complement of what it must become, so a byte
//! that was not written is as wrong as one that was written wrongly; what lies around the windows
//! (canaries) must not change. The first mismatch is reported with offset, expected and got.

use std::fmt;

/// A stream of bytes given by a seed: any part of it can be made without what precedes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of `seed`, separate for every `part` (round, side, thread).
    pub(crate) fn new(seed: u64, part: u64) -> Self {
        Self(mix(seed ^ mix(part.wrapping_add(0x6a09_e667_f3bc_c909))))
    }

    /// The 8 bytes at `8 * index`.
    fn word(self, index: u64) -> u64 {
        mix(self
            .0
            .wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Fills `into` with the stream from byte `offset`.
    pub(crate) fn fill(self, offset: u64, into: &mut [u8]) {
        self.each(offset, into.len(), |at, bytes| {
            into[at..at + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Fills `into` with the complement of the stream from byte `offset`.
    pub(crate) fn fill_complement(self, offset: u64, into: &mut [u8]) {
        self.fill(offset, into);
        for byte in into {
            *byte = !*byte;
        }
    }

    /// Compares `got`, which lies at `offset` of the stream. The result's offset counts from
    /// the start of `got`.
    pub(crate) fn compare(self, offset: u64, got: &[u8]) -> Result<(), Mismatch> {
        let mut first = None;
        let mut wrong = 0;
        self.each(offset, got.len(), |at, expected| {
            let part = &got[at..at + expected.len()];
            if part != expected {
                for (i, (e, g)) in expected.iter().zip(part).enumerate() {
                    if e != g {
                        first.get_or_insert((at + i, *e, *g));
                        wrong += 1;
                    }
                }
            }
        });
        match first {
            None => Ok(()),
            Some((offset, expected, got)) => Err(Mismatch {
                offset: offset as u64,
                expected,
                got,
                wrong,
            }),
        }
    }

    fn each(self, offset: u64, len: usize, mut f: impl FnMut(usize, &[u8])) {
        let mut at = 0;
        while at < len {
            let position = offset + at as u64;
            let skip = (position % 8) as usize;
            let word = self.word(position / 8).to_le_bytes();
            let take = (8 - skip).min(len - at);
            f(at, &word[skip..skip + take]);
            at += take;
        }
    }
}

/// The finaliser of splitmix64: every input bit changes every output bit half of the time.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Bytes that are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Of the first wrong byte.
    pub(crate) offset: u64,
    pub(crate) expected: u8,
    pub(crate) got: u8,
    /// How many bytes are wrong.
    pub(crate) wrong: u64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "offset {:#x}: expected {:#04x}, got {:#04x}",
            self.offset, self.expected, self.got
        )?;
        if self.wrong > 1 {
            write!(f, " ({} bytes are wrong)", self.wrong)?;
        }
        Ok(())
    }
}

/// Where windows lie in a region: a canary, then `windows` windows of `window` bytes with a
/// canary after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) windows: u64,
    /// Bytes of a window, a multiple of 64.
    pub(crate) window: u64,
}

/// Bytes of a canary: a page, so that windows start at pages as an application's buffers would
/// when their size is a multiple of it.
pub(crate) const CANARY: u64 = 4096;

impl Layout {
    pub(crate) fn new(windows: u64, bytes: u64) -> Self {
        Self {
            windows,
            window: bytes.next_multiple_of(64),
        }
    }

    /// Bytes of the whole region.
    pub(crate) fn total(&self) -> u64 {
        CANARY + self.windows * (self.window + CANARY)
    }

    /// Where window `index` starts.
    pub(crate) fn start(&self, index: u64) -> u64 {
        CANARY + index * (self.window + CANARY)
    }

    /// Canary number `index`, 0 to `windows` inclusive.
    pub(crate) fn canary(&self, index: u64) -> u64 {
        index * (self.window + CANARY)
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
            let mut part = vec![0; 50];
            stream.fill(start as u64, &mut part);
            assert_eq!(part, whole[start..start + 50]);
            assert_eq!(stream.compare(start as u64, &part), Ok(()));
        }
        let mut other = vec![0; 100];
        Stream::new(7, 4).fill(0, &mut other);
        let same = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(same < 20, "{same} of 100 bytes agree between two streams");
    }

    #[test]
    fn a_complement_is_wrong_everywhere() {
        let stream = Stream::new(1, 1);
        let mut bytes = vec![0; 33];
        stream.fill_complement(5, &mut bytes);
        let mismatch = stream.compare(5, &bytes).unwrap_err();
        assert_eq!((mismatch.offset, mismatch.wrong), (0, 33));
        assert_eq!(mismatch.expected, !mismatch.got);
    }

    #[test]
    fn the_first_wrong_byte_is_named() {
        let stream = Stream::new(1, 2);
        let mut bytes = vec![0; 64];
        stream.fill(0, &mut bytes);
        bytes[13] ^= 0x40;
        bytes[60] ^= 1;
        let mismatch = stream.compare(0, &bytes).unwrap_err();
        assert_eq!((mismatch.offset, mismatch.wrong), (13, 2));
        let text = mismatch.to_string();
        assert!(text.starts_with("offset 0xd: expected 0x"), "{text}");
        assert!(text.ends_with("(2 bytes are wrong)"), "{text}");
    }

    #[test]
    fn windows_and_canaries_tile_a_region() {
        let layout = Layout::new(3, 100);
        assert_eq!(layout.window, 128);
        let mut at = 0;
        for i in 0..3 {
            assert_eq!(layout.canary(i), at);
            at += CANARY;
            assert_eq!(layout.start(i), at);
            at += layout.window;
        }
        assert_eq!(layout.canary(3), at);
        assert_eq!(layout.total(), at + CANARY);
    }
}
