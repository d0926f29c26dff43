//! `atomic-rate`: all threads add 1 to the same few words.
//!
//! The sum of the words is always compared with the number of additions. Checked, every old value
//! that came back is kept, and per word they must be base, base + 1, … each once: an addition that
//! was lost, doubled or not atomic cannot hide.

use anyhow::Result;
use doorbell_kernels::params::Area;

use super::check::{Layout, Picture, Verdict};
use super::far::Far;
use super::plan::Case;
use super::side::{Reach, Side};
use super::tally::Tally;

/// Words that all threads share.
const WORDS: u64 = 64;

/// The target's memory: one window of words.
pub(crate) fn far_layout() -> Layout {
    Layout::new(1, WORDS * 8)
}

/// The words as the kernel addresses them: the same for every thread.
pub(crate) fn words(reach: &Reach, _near: &Layout) -> Area {
    Area {
        addr: reach.addr + far_layout().lead(),
        stride: 0,
        key: reach.key,
        mask: (WORDS - 1) as u32,
    }
}

/// Random words, and a place for every old value.
pub(crate) fn paint(near: &Side, far: &mut Far<'_>, sink: &Picture) -> Result<()> {
    near.paint(sink)?;
    far.paint(&Picture::source(sink.seed, sink.round))
}

fn bases(picture: &Picture) -> Vec<u64> {
    let layout = far_layout();
    let mut bytes = vec![0; layout.window as usize];
    Picture::source(picture.seed, picture.round).render(&layout, layout.lead(), &mut bytes);
    numbers(&bytes)
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect()
}

/// How far the words went up, together and each.
fn rises(far: &mut Far<'_>, picture: &Picture) -> Result<Vec<u64>> {
    let layout = far_layout();
    let now = numbers(&far.read(layout.lead(), layout.window)?);
    Ok(now
        .iter()
        .zip(bases(picture))
        .map(|(now, base)| now.wrapping_sub(base))
        .collect())
}

/// The sum of all words against the number of additions.
pub(crate) fn verify_sum(far: &mut Far<'_>, picture: &Picture, tally: &mut Tally) -> Result<()> {
    let sum = rises(far, picture)?
        .iter()
        .fold(0u64, |a, b| a.wrapping_add(*b));
    if sum != tally.messages {
        tally.fault(format!(
            "the words went up by {sum}, but {} additions were completed",
            tally.messages
        ));
    }
    Ok(())
}

/// After a checked round of `iters` additions a thread: words, old values, canaries.
pub(crate) fn verify(
    near: &Side,
    far: &mut Far<'_>,
    layout: &Layout,
    case: &Case,
    iters: u64,
    round: u64,
    tally: &mut Tally,
) -> Result<()> {
    let picture = Picture::sink(case.seed, round, 0);
    let rises = rises(far, &picture)?;
    let mut olds: Vec<Vec<u64>> = vec![Vec::new(); WORDS as usize];
    let bases = bases(&picture);
    let mut region = near.read_all()?;
    for thread in 0..layout.windows {
        let start = (layout.lead() + thread * layout.step()) as usize;
        let window = &mut region[start..start + (iters * 8) as usize];
        for (i, old) in numbers(window).into_iter().enumerate() {
            let word = i % WORDS as usize;
            olds[word].push(old.wrapping_sub(bases[word]));
        }
        // Looked at above; what is left to compare is what must not have changed.
        let mut as_painted = vec![0; window.len()];
        picture.render(layout, start as u64, &mut as_painted);
        window.copy_from_slice(&as_painted);
    }
    let mut verdict = Verdict::default();
    let mut scratch = vec![0; region.len()];
    picture.compare(layout, 0, &region, &mut scratch, &mut verdict);
    tally.verdict("the initiator's memory", verdict);
    for (word, mut olds) in olds.into_iter().enumerate() {
        let count = olds.len() as u64;
        if rises[word] != count {
            tally.fault(format!(
                "word {word} went up by {}, but {count} additions were completed on it",
                rises[word]
            ));
        }
        olds.sort_unstable();
        let odd = olds.iter().enumerate().find(|(i, old)| **old != *i as u64);
        if let Some((i, old)) = odd {
            tally.fault(format!(
                "word {word}: the old values that came back are not base, base + 1, …: number {i} is base + {old}"
            ));
        }
    }
    Ok(())
}
