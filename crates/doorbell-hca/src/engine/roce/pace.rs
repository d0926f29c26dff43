//! When acknowledgements leave. A packet costs the kernel far more than it costs us, so in a ping-pong of WRITEs they travel with the answers,
//! and most of them not at all: one acknowledges all before it.
//!
//! A queue pair that has answered each request in the very next round holds what it owes for that round. An answer then leaves
//! acknowledgements behind, which go with the one after [`BEHIND`] such. Who counts completions instead of answers waits for them: when the next request
//! does not come within [`PATIENCE`], they leave by themselves, and answers are trusted less.

/// Requests in a row that were answered in the next round, after which acknowledgements are held for one.
const ANSWERS: u32 = 4;
/// The same, after which answers leave them behind; doubled, up to the second, whenever the peer waited for them.
const TRUST: (u32, u32) = (16, 1024);
/// Answers in a row that leave their acknowledgements behind.
const BEHIND: u32 = 8;
/// How long after an answer the next request may take, ns: some round trips.
const PATIENCE: u64 = 40_000;

/// What a connection may send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Nothing: the next round comes first.
    Nothing,
    /// Everything but acknowledgements, which are looked at again in the next round.
    Messages,
    /// Everything.
    All,
}

/// Does this queue pair answer what it hears in the next round?
#[derive(Debug)]
pub(super) struct Pace {
    /// The round in which the last request arrived.
    pub(super) heard: u64,
    /// A message was posted, and no packet asked for since.
    pub(super) posted: bool,
    /// The last round in which one was.
    answered: u64,
    /// Requests in a row that were answered in the round after.
    answers: u32,
    /// Everything was held in the last round: not again.
    held: bool,
    /// Answers whose acknowledgements were left behind, and until when they may be.
    behind: u32,
    until: u64,
    /// Answers in a row that it takes to leave any behind.
    trust: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            heard: 0,
            posted: false,
            answered: 0,
            answers: 0,
            held: false,
            behind: 0,
            until: 0,
            trust: TRUST.0,
        }
    }
}

impl Pace {
    /// What leaves in this round. `heard`: what arrived in it has been handled; `now`: in ns.
    pub(super) fn leave(&mut self, heard: bool, round: u64, now: u64) -> Leave {
        if std::mem::take(&mut self.posted) {
            self.answered = round;
            self.held = false;
            if self.heard + 1 != round {
                self.answers = 0;
                return self.all();
            }
            self.answers = (self.answers + 1).min(TRUST.1);
            if self.answers < self.trust || self.behind == BEHIND {
                return self.all();
            }
            self.behind += 1;
            self.until = now + PATIENCE;
            return Leave::Messages;
        }
        if heard && self.answered != round && (self.held || self.heard + 1 == round) {
            // There was nothing to travel with.
            self.answers = 0;
        }
        let hold = heard && !self.held && self.heard == round && self.answers >= ANSWERS;
        self.held = hold;
        if hold {
            return Leave::Nothing;
        }
        if self.behind == 0 || self.answers == 0 {
            return self.all();
        }
        if now < self.until {
            return Leave::Messages;
        }
        self.answers = 0;
        self.trust = (self.trust * 2).min(TRUST.1);
        self.all()
    }

    /// Would nothing leave in the round in which a request is heard? Then nobody needs to ask.
    #[inline]
    pub(super) fn awaits_answer(&self) -> bool {
        self.answers >= ANSWERS && !self.held
    }

    /// Nothing is left behind any more.
    pub(super) fn all(&mut self) -> Leave {
        self.behind = 0;
        Leave::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lap: a request arrives in one round, and is answered in the next.
    fn lap(pace: &mut Pace, round: &mut u64, now: u64) -> [Leave; 3] {
        *round += 1;
        pace.heard = *round;
        let first = pace.leave(true, *round, now);
        *round += 1;
        pace.posted = true;
        let answer = pace.leave(false, *round, now);
        [first, answer, pace.leave(true, *round, now)]
    }

    #[test]
    fn a_ping_pong_acknowledges_every_ninth_lap() {
        use Leave::{All, Messages, Nothing};
        let (mut pace, mut round) = (Pace::default(), 1);
        for n in 1..TRUST.0 {
            let first = if n > ANSWERS { Nothing } else { All };
            assert_eq!(lap(&mut pace, &mut round, 0), [first, All, All], "{n}");
        }
        for _ in 0..5 {
            for _ in 0..BEHIND {
                assert_eq!(lap(&mut pace, &mut round, 0), [Nothing, Messages, Messages]);
            }
            assert_eq!(lap(&mut pace, &mut round, 0), [Nothing, All, All]);
        }
    }

    #[test]
    fn who_waits_for_completions_gets_them_and_is_left_waiting_less_and_less() {
        let (mut pace, mut round, mut now) = (Pace::default(), 1, 0);
        for trust in [TRUST.0, 2 * TRUST.0, 4 * TRUST.0] {
            for _ in 1..trust {
                assert_eq!(lap(&mut pace, &mut round, now)[1], Leave::All);
            }
            assert_eq!(lap(&mut pace, &mut round, now)[1], Leave::Messages);
            round += 1;
            assert_eq!(pace.leave(true, round, now + PATIENCE - 1), Leave::Messages);
            now += PATIENCE;
            round += 1;
            assert_eq!(pace.leave(true, round, now), Leave::All);
            round += 1;
            assert_eq!(pace.leave(true, round, now), Leave::All);
        }
    }

    #[test]
    fn a_request_that_is_not_answered_brings_out_what_was_left_behind() {
        let (mut pace, mut round) = (Pace::default(), 1);
        for _ in 0..TRUST.0 {
            lap(&mut pace, &mut round, 0);
        }
        round += 1;
        pace.heard = round;
        assert_eq!(pace.leave(true, round, 0), Leave::Nothing);
        round += 1;
        assert_eq!(pace.leave(true, round, 0), Leave::All);
        // What is posted without a request asks for nothing to be left behind.
        round += 2;
        pace.posted = true;
        assert_eq!(pace.leave(false, round, 0), Leave::All);
    }
}
