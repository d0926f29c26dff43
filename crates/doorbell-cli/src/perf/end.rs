//! One end of a ping-pong: what it sends, where messages arrive, its signal word.
//!
//! Three windows of one registered region with canaries around them. What each must hold before
//! and after a launch follows from the seed, the launch's number and its rounds.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::bench::Bench;
use super::check::{Layout, Picture};
use super::far::whole;
use super::latency::PlayOrder;
use super::side::{MAX_TOTAL, Reach, Side, SideSpec, Step};
use super::tally::Tally;

/// What an end is made of.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct EndSpec {
    pub(crate) size: u64,
    pub(crate) on_gpu: bool,
    pub(crate) shared: bool,
    /// Reached by RDMA devices.
    #[serde(default)]
    pub(crate) verbs: bool,
}

/// The memory of one end.
pub(crate) struct End {
    side: Side,
    layout: Layout,
}

/// What a peer process found wrong at its end.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Faults {
    errors: u64,
    compared: u64,
    told: Vec<String>,
}

impl Faults {
    pub(crate) fn of(tally: Tally) -> Self {
        Self {
            errors: tally.errors,
            compared: tally.compared,
            told: tally.faults,
        }
    }

    /// Of an end of so many bytes that were to be compared.
    pub(crate) fn add_to(self, tally: &mut Tally, total: u64) -> Result<()> {
        whole(self.compared, total)?;
        // Its numbers and words may be anything: what was wrong must not count up to nothing, nor steer a terminal.
        tally.errors = tally.errors.saturating_add(self.errors);
        tally.compared = tally.compared.saturating_add(self.compared);
        for fault in self.told.into_iter().take(Tally::TOLD) {
            tally.tell(crate::shown(&fault));
        }
        Ok(())
    }
}

impl EndSpec {
    /// What its memory is made of, if it can be: it may be another process's number.
    pub(crate) fn side(&self) -> Result<SideSpec> {
        ensure!(
            (8..=MAX_TOTAL).contains(&self.size),
            "messages of {} bytes: from 8, a word, to {MAX_TOTAL}",
            self.size
        );
        Ok(SideSpec {
            layout: Layout::new(3, self.size),
            on_gpu: self.on_gpu,
            shared: self.shared,
            verbs: self.verbs,
        })
    }
}

impl End {
    /// Windows.
    pub(crate) const SEND: u64 = 0;
    pub(crate) const RECV: u64 = 1;
    pub(crate) const SIGNAL: u64 = 2;

    pub(crate) fn new(bench: &Bench, spec: &EndSpec) -> Result<Self> {
        let spec = spec.side()?;
        Ok(Self {
            side: Side::new(&bench.pd, &bench.device, &spec)?,
            layout: spec.layout,
        })
    }

    /// Can it play this?
    pub(crate) fn takes(&self, order: &PlayOrder) -> Result<()> {
        let PlayOrder { size, .. } = *order;
        let own = self.layout.window;
        ensure!(size == own, "messages of {size} bytes at an end for {own}");
        order.other.of(self.total()).map(drop)
    }

    /// Bytes of its memory.
    pub(crate) fn total(&self) -> u64 {
        self.layout.total()
    }

    pub(crate) fn abroad(&self) -> Result<Reach> {
        self.side.abroad()
    }

    pub(crate) fn reach(&self) -> Reach {
        self.side.reach()
    }

    /// Where a window starts in the region.
    pub(crate) fn offset(&self, window: u64) -> u64 {
        self.layout.lead() + window * self.layout.step()
    }

    /// The address at which kernels load and store.
    pub(crate) fn pointer(&self, window: u64) -> u64 {
        self.side.mr().memory().device_addr() + self.offset(window)
    }

    /// Fills it for a launch; `which` is 0 for the end that begins.
    pub(crate) fn paint(&self, order: &PlayOrder, which: u64, step: Step<'_>) -> Result<()> {
        let image = Image::new(&self.layout, order, which, 0);
        self.side
            .paint_with(step, |at, piece| image.render(at, piece))
    }

    /// Compares it after a launch, if the order says so.
    pub(crate) fn verify(
        &self,
        order: &PlayOrder,
        which: u64,
        tally: &mut Tally,
        step: Step<'_>,
    ) -> Result<()> {
        if !order.check {
            return Ok(());
        }
        let image = Image::new(&self.layout, order, which, order.iters);
        let verdict = self
            .side
            .verify_with(step, u64::MAX, |at, piece| image.render(at, piece))?;
        tally.verdict(&format!("end {which}'s memory"), verdict);
        Ok(())
    }
}

/// What the region of an end holds once `rounds` messages went each way (0: before the launch).
struct Image<'a> {
    layout: &'a Layout,
    own: Picture,
    other: Picture,
    /// Nothing has arrived yet.
    before: bool,
    /// Words that kernels write, and where.
    words: [(u64, u64); 3],
}

impl<'a> Image<'a> {
    fn new(layout: &'a Layout, order: &PlayOrder, which: u64, rounds: u64) -> Self {
        let picture = |end: u64| Picture::source(order.seed ^ (end + 1), order.number);
        let window = |n: u64| layout.lead() + n * layout.step();
        // `signal_lat` stamps a message's first word, `put_lat` its last.
        let stamp = if order.signal { 0 } else { layout.window - 8 };
        let signalled = if order.signal { rounds } else { 0 };
        Self {
            layout,
            own: picture(which),
            other: picture(1 - which),
            before: rounds == 0,
            words: [
                (window(End::SEND) + stamp, rounds),
                (window(End::RECV) + stamp, rounds),
                (window(End::SIGNAL), signalled),
            ],
        }
    }

    /// The bytes from `offset` on.
    fn render(&self, offset: u64, into: &mut [u8]) {
        let layout = self.layout;
        self.own.render(layout, offset, into);
        // The other end's window of what it sends lies elsewhere in its region.
        let arrives = layout.lead() + End::RECV * layout.step();
        if let Some((at, part)) = part(offset, into, arrives, layout.window) {
            self.other
                .render(layout, layout.lead() + at - arrives, part);
            if self.before {
                for byte in part {
                    *byte = !*byte;
                }
            }
        }
        for (word, value) in self.words {
            if let Some((at, part)) = part(offset, into, word, 8) {
                let skip = (at - word) as usize;
                part.copy_from_slice(&value.to_ne_bytes()[skip..][..part.len()]);
            }
        }
    }
}

/// What of `bytes`, which lie at `offset`, is among the `len` at `start`: from where on, and the bytes.
fn part(offset: u64, bytes: &mut [u8], start: u64, len: u64) -> Option<(u64, &mut [u8])> {
    let from = start.max(offset);
    let to = (start + len).min(offset + bytes.len() as u64);
    let range = (from.checked_sub(offset)? as usize)..(to.checked_sub(offset)? as usize);
    (from < to).then(|| (from, &mut bytes[range]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(size: u64, signal: bool) -> PlayOrder {
        PlayOrder {
            signal,
            size,
            iters: 7,
            deadline_ns: 1,
            seed: 3,
            number: 2,
            check: true,
            other: Reach { addr: 0, key: 0 },
        }
    }

    /// What one end sends is what the other gets, words included; pieces of any length are the whole.
    #[test]
    fn the_two_ends_hold_each_others_messages_in_any_pieces() {
        for (size, signal) in [(8, false), (8, true), (100, true), (1000, false)] {
            let (layout, order) = (Layout::new(3, size), order(size, signal));
            let whole = |which, rounds| {
                let mut bytes = vec![0; layout.total() as usize];
                Image::new(&layout, &order, which, rounds).render(0, &mut bytes);
                bytes
            };
            let window = |bytes: &[u8], n: u64| {
                let at = (layout.lead() + n * layout.step()) as usize;
                bytes[at..][..size as usize].to_vec()
            };
            let (first, second) = (whole(0, 7), whole(1, 7));
            assert_eq!(window(&first, End::SEND), window(&second, End::RECV));
            assert_eq!(window(&second, End::SEND), window(&first, End::RECV));
            let stamp = if signal { 0 } else { size as usize - 8 };
            assert_eq!(window(&first, End::RECV)[stamp..][..8], 7u64.to_ne_bytes());
            let signalled = if signal { 7u64 } else { 0 };
            assert_eq!(window(&first, End::SIGNAL)[..8], signalled.to_ne_bytes());
            // Before it, no byte of what is to come is there, but for the word.
            let (before, after) = (window(&whole(0, 0), End::RECV), window(&first, End::RECV));
            for (i, (a, b)) in before.iter().zip(&after).enumerate() {
                assert!(*a == !*b || (stamp..stamp + 8).contains(&i), "byte {i}");
            }
            for step in [1, 7, 64, 1000] {
                let mut at = 0;
                while at < first.len() {
                    let mut piece = vec![0; step.min(first.len() - at)];
                    Image::new(&layout, &order, 0, 7).render(at as u64, &mut piece);
                    assert_eq!(piece, first[at..at + piece.len()], "{at}, {step} bytes");
                    at += piece.len();
                }
            }
        }
    }

    /// A peer that claims as many faults as there are numbers does not make the sum none.
    #[test]
    fn faults_of_another_process_count_up_and_never_round() {
        let mut tally = Tally::default();
        for _ in 0..2 {
            let faults = Faults {
                errors: u64::MAX,
                compared: u64::MAX,
                told: vec!["\u{1b}[2J".to_owned(); 1000],
            };
            faults
                .add_to(&mut tally, u64::MAX)
                .expect("all of its bytes");
        }
        // One that claims to have found nothing, since it did not look.
        let none = Faults::default().add_to(&mut tally, 8).expect_err("less");
        assert!(none.to_string().contains("compared 0 bytes"), "{none}");
        assert_eq!((tally.errors, tally.compared), (u64::MAX, u64::MAX));
        assert_eq!(tally.faults.len(), Tally::TOLD);
        assert!(!tally.faults[0].contains('\u{1b}'), "{:?}", tally.faults);
    }
}
