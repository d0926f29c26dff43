//! Cutting a submitted list of copies into pieces that the driver takes at once.
//!
//! The pieces of one ticket run in stream order, and within a piece its steps do; the copies of a step run in any order. That order is
//! what makes one bounce buffer enough: it is filled again only after it was emptied. A piece has one event, however many steps it has:
//! looking for the end of each step costs more than the copies of small ones, and far more where processes share the GPU.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use super::copier::BOUNCE;
use crate::copier::CopyOp;

/// Most copies a piece.
const MOST: usize = 256;

/// Who carries a piece out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Way {
    /// The copy engine.
    #[default]
    Engine,
    /// A kernel.
    Kernel,
}

/// A piece: parallel arrays, as the driver's batch call takes them, and the ends of its steps.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) ticket: u64,
    /// The ticket ends with it.
    pub(super) last: bool,
    pub(super) born: Instant,
    pub(super) way: Way,
    pub(super) dst: Vec<u64>,
    pub(super) src: Vec<u64>,
    pub(super) size: Vec<usize>,
    ends: Vec<usize>,
}

impl Segment {
    fn new() -> Self {
        let (dst, src, size, ends) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self {
            ticket: 0,
            last: false,
            born: Instant::now(),
            way: Way::Engine,
            dst,
            src,
            size,
            ends,
        }
    }

    /// Its steps, as ranges of the arrays.
    pub(super) fn steps(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end)
    }

    pub(super) fn len(&self) -> usize {
        self.size.len()
    }

    fn push(&mut self, dst: u64, src: u64, len: usize) {
        self.dst.push(dst);
        self.src.push(src);
        self.size.push(len);
    }
}

/// Collects the copies of one step of a ticket.
#[derive(Default)]
pub(super) struct Plan {
    direct: Vec<CopyOp>,
    /// (copy to the bounce buffer, copy from it), with the offset used there.
    bounced: Vec<(CopyOp, CopyOp)>,
    bounced_ops: u64,
    bounce_used: u64,
    /// Indexes into `bounced` at which the bounce buffer starts over.
    rounds: Vec<usize>,
    /// Who carries out what is collected.
    way: Way,
    spare: Vec<Segment>,
}

impl Plan {
    /// For a new ticket, which goes one way as a whole.
    pub(super) fn begin(&mut self, way: Way) {
        self.clear_step();
        self.bounced_ops = 0;
        self.way = way;
    }

    fn clear_step(&mut self) {
        self.direct.clear();
        self.bounced.clear();
        self.rounds.clear();
        self.bounce_used = 0;
    }

    /// A copy that is done as it is.
    pub(super) fn direct(&mut self, op: &CopyOp) {
        if op.len > 0 {
            self.direct.push(*op);
        }
    }

    /// A copy that goes through the bounce buffer at `bounce`, in as many parts as needed.
    pub(super) fn bounced(&mut self, op: &CopyOp, bounce: u64) {
        self.bounced_ops += 1;
        let mut at = 0;
        while at < op.len {
            let in_round = self.bounced.len() - self.rounds.last().copied().unwrap_or(0);
            if self.bounce_used >= BOUNCE as u64 || in_round >= MOST {
                self.rounds.push(self.bounced.len());
                self.bounce_used = 0;
            }
            let len = (op.len - at).min(BOUNCE as u64 - self.bounce_used);
            let through = bounce + self.bounce_used;
            self.bounced.push((
                CopyOp {
                    dst: through,
                    src: op.src + at,
                    len,
                },
                CopyOp {
                    dst: op.dst + at,
                    src: through,
                    len,
                },
            ));
            at += len;
            // Kept aligned: small copies at odd addresses are slower.
            self.bounce_used = (self.bounce_used + len)
                .next_multiple_of(64)
                .min(BOUNCE as u64);
        }
    }

    pub(super) fn bounced_ops(&self) -> u64 {
        self.bounced_ops
    }

    /// What was collected becomes steps, at the end of `queue`; the next copies come after them.
    pub(super) fn step(&mut self, ticket: u64, born: Instant, queue: &mut VecDeque<Segment>) {
        let Self {
            direct,
            bounced,
            rounds,
            spare,
            way,
            ..
        } = self;
        let mut add = |ops: &mut dyn ExactSizeIterator<Item = &CopyOp>| {
            let joins = queue
                .back()
                .is_some_and(|s| s.ticket == ticket && s.len() + ops.len() <= MOST);
            if !joins {
                queue.push_back(spawn(spare, ticket, born, *way));
            }
            if let Some(segment) = queue.back_mut() {
                for op in ops {
                    segment.push(op.dst, op.src, op.len as usize);
                }
                segment.ends.push(segment.len());
            }
        };
        for ops in direct.chunks(MOST) {
            add(&mut ops.iter());
        }
        let mut start = 0;
        for end in rounds.iter().copied().chain([bounced.len()]) {
            let round = &bounced[start..end];
            start = end;
            if !round.is_empty() {
                add(&mut round.iter().map(|(inward, _)| inward));
                add(&mut round.iter().map(|(_, outward)| outward));
            }
        }
        self.clear_step();
    }

    /// The last step, and the end of the ticket: it has at least one piece, so that every ticket ends.
    pub(super) fn finish(&mut self, ticket: u64, born: Instant, queue: &mut VecDeque<Segment>) {
        self.step(ticket, born, queue);
        if queue.back().is_none_or(|s| s.ticket != ticket) {
            queue.push_back(spawn(&mut self.spare, ticket, born, self.way));
        }
        if let Some(segment) = queue.back_mut() {
            segment.last = true;
        }
    }

    /// Turns a piece for a kernel into pieces for the engine, in front of `queue`. `within` says which copies have both ends in one GPU.
    pub(super) fn convert(
        &mut self,
        segment: Segment,
        bounce: u64,
        mut within: impl FnMut(&CopyOp) -> bool,
        queue: &mut VecDeque<Segment>,
    ) {
        let mut pieces = VecDeque::new();
        self.begin(Way::Engine);
        for step in segment.steps() {
            for i in step {
                let (dst, src, len) = (segment.dst[i], segment.src[i], segment.size[i] as u64);
                let op = CopyOp { dst, src, len };
                match within(&op) {
                    true => self.bounced(&op, bounce),
                    false => self.direct(&op),
                }
            }
            self.step(segment.ticket, segment.born, &mut pieces);
        }
        if let Some(back) = pieces.back_mut() {
            back.last = segment.last;
        }
        self.recycle(segment);
        while let Some(piece) = pieces.pop_back() {
            queue.push_front(piece);
        }
    }

    /// Takes a piece's arrays back for reuse.
    pub(super) fn recycle(&mut self, mut segment: Segment) {
        if self.spare.len() < 64 {
            segment.dst.clear();
            segment.src.clear();
            segment.size.clear();
            segment.ends.clear();
            self.spare.push(segment);
        }
    }
}

fn spawn(spare: &mut Vec<Segment>, ticket: u64, born: Instant, way: Way) -> Segment {
    let segment = spare.pop().unwrap_or_else(Segment::new);
    Segment {
        ticket,
        last: false,
        born,
        way,
        ..segment
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finish(plan: &mut Plan) -> Vec<Segment> {
        let mut queue = VecDeque::new();
        plan.finish(7, Instant::now(), &mut queue);
        assert_eq!(queue.iter().filter(|s| s.last).count(), 1);
        assert!(
            queue.back().unwrap().last && queue.iter().all(|s| s.ticket == 7 && s.len() <= MOST)
        );
        queue.into()
    }

    #[test]
    fn an_empty_list_is_one_empty_piece() {
        let pieces = finish(&mut Plan::default());
        assert_eq!(pieces.iter().map(Segment::len).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn long_lists_are_cut() {
        let mut plan = Plan::default();
        for i in 0..600 {
            plan.direct(&CopyOp {
                dst: i,
                src: 1000 + i,
                len: i % 2,
            });
        }
        let pieces = finish(&mut plan);
        // Empty copies are left out.
        assert_eq!(
            pieces.iter().map(Segment::len).collect::<Vec<_>>(),
            [256, 44]
        );
        assert_eq!(
            (pieces[1].dst[43], pieces[1].src[43], pieces[1].size[43]),
            (599, 1599, 1)
        );
        plan.recycle(pieces.into_iter().next().unwrap());
        plan.begin(Way::Engine);
        assert_eq!(finish(&mut plan)[0].len(), 0);
    }

    #[test]
    fn steps_share_pieces_as_far_as_there_is_room() {
        let mut plan = Plan::default();
        let mut queue = VecDeque::new();
        let op = CopyOp {
            dst: 1,
            src: 2,
            len: 3,
        };
        // Three hundred lone copies, one of no bytes among them, and at the end some that have no order.
        for i in 0..301 {
            plan.direct(&CopyOp {
                len: op.len * u64::from(i != 7),
                ..op
            });
            plan.step(7, Instant::now(), &mut queue);
        }
        (0..10).for_each(|_| plan.direct(&op));
        plan.finish(7, Instant::now(), &mut queue);
        let steps: Vec<Vec<_>> = queue.iter().map(|s| s.steps().collect()).collect();
        assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [256, 45]);
        assert!(
            steps[0]
                .iter()
                .enumerate()
                .all(|(i, step)| *step == (i..i + 1))
        );
        assert_eq!(steps[1][43..], [43..44, 44..54]);
        assert_eq!(
            queue.iter().map(|s| s.last).collect::<Vec<_>>(),
            [false, true]
        );
        // Another ticket shares nothing with it.
        plan.direct(&op);
        plan.finish(8, Instant::now(), &mut queue);
        assert_eq!(queue.len(), 3);
    }

    #[test]
    fn what_a_kernel_did_not_do_becomes_the_engines_in_the_same_steps() {
        let (mut plan, mut queue) = (Plan::default(), VecDeque::new());
        plan.begin(Way::Kernel);
        // Three steps of two; the second copy of each is within the GPU.
        for step in 0..3 {
            for i in 0..2 {
                let dst = 1000 * (i + 1) + step;
                plan.direct(&CopyOp {
                    dst,
                    src: dst + 500,
                    len: 1,
                });
            }
            plan.step(7, Instant::now(), &mut queue);
        }
        plan.finish(7, Instant::now(), &mut queue);
        let piece = queue.pop_front().unwrap();
        assert!(queue.is_empty() && piece.way == Way::Kernel && piece.last);
        // Somebody's piece is waiting behind it.
        plan.begin(Way::Engine);
        plan.finish(8, Instant::now(), &mut queue);
        plan.convert(piece, 9000, |op| op.dst >= 2000, &mut queue);
        assert_eq!(plan.bounced_ops(), 3);
        assert_eq!(queue.len(), 2);
        let first = &queue[0];
        assert!(first.way == Way::Engine && first.last && first.ticket == 7);
        let steps: Vec<Vec<_>> = first
            .steps()
            .map(|step| step.map(|i| (first.dst[i], first.src[i])).collect())
            .collect();
        let want: Vec<_> = (0..3)
            .flat_map(|s| {
                let there = vec![(9000, 2500 + s)];
                [vec![(1000 + s, 1500 + s)], there, vec![(2000 + s, 9000)]]
            })
            .collect();
        assert_eq!(steps, want);
    }

    /// Runs pieces as the engine may, copies of one step in any order, on a toy memory.
    fn run(pieces: &[Segment], memory: &mut [u8], base: u64) {
        for (piece, step) in pieces.iter().flat_map(|p| p.steps().map(move |s| (p, s))) {
            let before = memory.to_vec();
            for i in step.rev() {
                let (dst, src) = (
                    (piece.dst[i] - base) as usize,
                    (piece.src[i] - base) as usize,
                );
                memory[dst..dst + piece.size[i]].copy_from_slice(&before[src..src + piece.size[i]]);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "moves tens of megabytes")]
    fn bounced_copies_arrive_whole() {
        // Memory: bounce buffer, then 12 MiB of data, then their destination.
        const LEN: usize = 12 << 20;
        let base = 0x1000;
        let mut memory = vec![0u8; BOUNCE + 2 * LEN];
        for (i, byte) in memory[BOUNCE..BOUNCE + LEN].iter_mut().enumerate() {
            *byte = (i * 31 + (i >> 13)) as u8;
        }
        let mut plan = Plan::default();
        let (mut at, mut n) = (0u64, 0u64);
        for len in [1, 300, 5 << 20, 0, 4 << 20, 63]
            .into_iter()
            .chain([8; 1000])
        {
            let src = base + BOUNCE as u64 + at;
            plan.bounced(
                &CopyOp {
                    dst: src + LEN as u64,
                    src,
                    len,
                },
                base,
            );
            at += len;
            n += 1;
        }
        assert_eq!(plan.bounced_ops(), n);
        let pieces = finish(&mut plan);
        run(&pieces, &mut memory, base);
        let (data, copy) = memory[BOUNCE..].split_at(LEN);
        assert!(data[..at as usize] == copy[..at as usize]);
        assert!(copy[at as usize..].iter().all(|&b| b == 0));
    }
}
