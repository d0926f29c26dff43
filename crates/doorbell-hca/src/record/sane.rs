//! Signs that a flight record is damaged: what no writer writes.
//!
//! A record has no checksum, since it is written while it may be read. But much of it is known beforehand: places that nobody uses, numbers
//! with bounds, texts, times. Each check holds at every moment of a record that is being written, so that none that is whole is called damaged.

use super::QpRecord;
use super::layout::{self, block_words, core, head, qp, still};

/// Signs that are told one by one.
const MOST: usize = 3;
/// How far the clocks of the cores of a machine, and the reckoning of a record that has just begun, may be apart.
const SLACK_NS: u64 = 5_000_000_000;

/// What was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Signs {
    told: Vec<String>,
    more: usize,
}

impl Signs {
    fn add(&mut self, wrong: bool, text: impl FnOnce() -> String) {
        match (wrong, self.told.len() < MOST) {
            (true, true) => self.told.push(text()),
            (true, false) => self.more += 1,
            _ => {}
        }
    }

    /// In words; nothing: it may be whole.
    pub(super) fn text(&self) -> Option<String> {
        let told = self.told.join(", ");
        match (self.told.len(), self.more) {
            (0, _) => None,
            (_, 0) => Some(told),
            (_, 1) => Some(format!("{told}, and 1 sign more")),
            (_, n) => Some(format!("{told}, and {n} signs more")),
        }
    }

    /// Words that nobody writes.
    fn unused(&mut self, words: &[u64], what: impl Fn() -> String) {
        self.add(words.iter().any(|w| *w != 0), || {
            format!("words that nobody writes are not zero ({})", what())
        });
    }

    fn words(&mut self, words: &[u64], what: &str) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let len = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        let tail = bytes[len..].iter().any(|b| *b != 0);
        let cut = bytes.len() - len < 8;
        // A last letter that is cut in two is no sign.
        let text = std::str::from_utf8(&bytes[..len]);
        let whole = text.is_ok() || text.is_err_and(|e| cut && e.error_len().is_none());
        let strange = bytes[..len]
            .iter()
            .any(|b| b.is_ascii_control() && !b.is_ascii_whitespace());
        self.add(tail || strange || !whole, || format!("{what} is no text"));
    }

    /// Of the head.
    pub(super) fn head(words: &[u64]) -> Self {
        let mut signs = Self::default();
        let cores = words[head::CORES];
        signs.add(cores == 0 || cores > 1 << 16, || {
            format!("it has {cores} engine cores")
        });
        let blocks = words[head::BLOCKS];
        signs.add(blocks > 1 << 20, || format!("it has {blocks} queue pairs"));
        signs.add(words[head::CALLER] > 1, || {
            "who runs the engine is not told".to_owned()
        });
        signs.add(words[head::RANK] > 1 << 32, || {
            "its rank is none".to_owned()
        });
        signs.words(
            &words[head::RELEASE..][..head::RELEASE_WORDS],
            "its release",
        );
        signs.words(
            &words[head::COMMAND..][..head::COMMAND_WORDS],
            "its command line",
        );
        signs.unused(&words[head::FIRINGS + 1..head::RELEASE], || {
            "in its head".to_owned()
        });
        signs.unused(
            &words[head::RELEASE + head::RELEASE_WORDS..head::COMMAND],
            || "in its head".to_owned(),
        );
        for i in 0..layout::MAX_CORES {
            let one = &words[layout::CORES + i * layout::CORE_WORDS..][..layout::CORE_WORDS];
            let from = match (i as u64) < cores {
                true => core::DEAD + 1,
                false => 0,
            };
            signs.unused(&one[from..], || format!("of core {i}"));
            signs.add(one[core::DEAD] > 1 && from != 0, || {
                format!("core {i} is neither dead nor alive")
            });
        }
        for i in 0..layout::MAX_REGIONS {
            let one = &words[layout::REGIONS + i * layout::REGION_WORDS..][..layout::REGION_WORDS];
            signs.unused(&one[layout::region::RIGHTS + 1..], || {
                format!("of region place {i}")
            });
            signs.add(one[layout::region::KEY] > 1 << 32, || {
                format!("region place {i} has no key")
            });
        }
        for i in 0..layout::MAX_WAITS {
            let one = &words[layout::WAITS + i * layout::WAIT_WORDS..][..layout::WAIT_WORDS];
            signs.unused(&one[layout::wait::THREAD + 1..], || {
                format!("of wait place {i}")
            });
        }
        let tables = layout::DEATHS + layout::MAX_DEATHS * layout::DEATH_WORDS;
        signs.unused(&words[tables..layout::HEAD_WORDS], || {
            "behind its tables".to_owned()
        });
        signs
    }

    /// Of a queue pair's block, and of what was read in it. `life`: from when to when its process may have lived, if that is known.
    pub(super) fn block(
        &mut self,
        block: &[u64],
        read: Option<&QpRecord>,
        cores: usize,
        log_events: u32,
        life: Option<(u64, u64)>,
    ) {
        if block.len() < block_words(log_events) {
            return;
        }
        let end = layout::EVENTS + layout::EVENT_WORDS * (1 << log_events);
        let name = || format!("of QP {:#08x}", block[qp::NUMBERS] as u32);
        self.unused(&block[qp::POSTER + 1..layout::STILL], name);
        self.unused(&block[layout::STILL + still::WORDS..layout::EVENTS], name);
        self.unused(&block[end..block_words(log_events)], name);
        if block[qp::NUMBERS] == 0 {
            return;
        }
        let Some(read) = read else {
            self.add(true, || "a queue pair has no depth".to_owned());
            return;
        };
        let qpn = read.qpn;
        self.add(block[qp::NUMBERS] & 0xff00_0000_ff00_0000 != 0, || {
            format!("QP {qpn:#08x} has no such number")
        });
        self.add(read.core as usize >= cores, || {
            format!("QP {qpn:#08x} is of core {}, of {cores}", read.core)
        });
        // A doorbell announces a ring of slots at most; a reader may see two moments of the indexes.
        let depth = u64::from(read.depth);
        let apart = |a: u64, b: u64| a.saturating_sub(b) > 1 << 40;
        let ahead = read.rung.saturating_sub(read.completed) > depth.saturating_mul(1 << 16)
            || apart(read.completed, read.rung)
            || apart(read.posted, read.completed);
        self.add(ahead, || {
            format!(
                "QP {qpn:#08x} of {depth} slots has {} posted, {} rung and {} complete",
                read.posted, read.rung, read.completed
            )
        });
        let Some((from, to)) = life else { return };
        let outside =
            |at: u64| at < from.saturating_sub(SLACK_NS) || at > to.saturating_add(SLACK_NS);
        let n = read.events.iter().filter(|e| outside(e.at_ns)).count();
        self.add(n != 0, || {
            format!("{n} events of QP {qpn:#08x} are of a time at which its process did not live")
        });
        let slots = read
            .events
            .iter()
            .filter(|e| apart(e.from, read.posted.max(1 << 16)));
        let n = slots.count();
        self.add(n != 0, || {
            format!("{n} events of QP {qpn:#08x} are of slots that it never had")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Vec<u64> {
        let mut words = vec![0; layout::HEAD_WORDS];
        (words[head::CORES], words[head::BLOCKS]) = (2, 64);
        words[head::RELEASE] = u64::from_le_bytes(*b"0.1.0\0\0\0");
        words[head::COMMAND] = u64::from_le_bytes(*b"perf\n -x");
        words
    }

    #[test]
    fn a_whole_head_has_no_signs() {
        assert_eq!(Signs::head(&whole()).text(), None);
        // A letter that was cut in two.
        let mut cut = whole();
        cut[head::COMMAND..][..head::COMMAND_WORDS].fill(u64::from_le_bytes(*b"abcdefgh"));
        cut[head::COMMAND + head::COMMAND_WORDS - 1] = u64::from_le_bytes(*b"abcdefg\xc3");
        assert_eq!(Signs::head(&cut).text(), None);
    }

    #[test]
    fn damage_is_told() {
        let damage = |at: usize, value: u64| {
            let mut words = whole();
            words[at] = value;
            Signs::head(&words).text().unwrap_or_default()
        };
        for (at, value, part) in [
            (head::CORES, 1 << 33, "engine cores"),
            (head::CALLER, 7, "who runs"),
            (
                head::COMMAND,
                u64::from_le_bytes(*b"ab\x1b[31m\0"),
                "its command line is no text",
            ),
            (
                head::COMMAND,
                u64::from_le_bytes(*b"ab\xffcdef\0"),
                "its command line is no text",
            ),
            (head::RELEASE + 2, 1, "its release is no text"),
            (
                layout::CORES + 5 * layout::CORE_WORDS,
                9,
                "nobody writes are not zero (of core 5)",
            ),
            (layout::REGIONS + 6, 9, "of region place 0"),
        ] {
            let text = damage(at, value);
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = Signs::head(&vec![u64::MAX; layout::HEAD_WORDS]).text();
        assert!(text.is_some_and(|t| t.contains("signs more")));
    }
}
