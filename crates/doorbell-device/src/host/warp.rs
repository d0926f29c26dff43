//! An emulated warp: OS threads that meet to act as lanes.
//!
//! Lanes that call `group` within a short while of each other are "converged"; who comes late forms a group of its own, as
//! diverged lanes do on a GPU. So the code sees groups of every size, and may rely on none.

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::arch::Group;

/// How long a lane waits for the others of its warp before it goes on with those that came.
const PATIENCE: Duration = Duration::from_micros(200);
/// How often a lane in a collective call looks again; a missing partner is a bug, so there is no time-out.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Warp {
    state: Mutex<State>,
    turn: Condvar,
}

#[derive(Debug)]
struct State {
    /// Lanes that have not ended.
    live: u32,
    /// Lanes waiting for a group, and their keys.
    arrived: u32,
    key: [u64; 32],
    /// Lanes waiting for the whole warp.
    whole: u32,
    /// Groups formed and not yet picked up.
    formed: [Option<Group>; 32],
    /// Tag of the group a lane is in.
    member: [Option<u32>; 32],
    groups: BTreeMap<u32, Meeting>,
    next_tag: u32,
}

/// The collective calls of one group.
#[derive(Debug)]
struct Meeting {
    mask: u32,
    members: u32,
    arrived: u32,
    round: u64,
    /// Values passed in this round, and those of the round before: a lane is at most one round behind.
    value: [[u64; 32]; 2],
}

impl Warp {
    pub(super) fn new(lanes: u32) -> Self {
        Self {
            state: Mutex::new(State {
                live: if lanes == 32 {
                    u32::MAX
                } else {
                    (1 << lanes) - 1
                },
                arrived: 0,
                key: [0; 32],
                whole: 0,
                formed: [None; 32],
                member: [None; 32],
                groups: BTreeMap::new(),
                next_tag: 1,
            }),
            turn: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn exit(&self, lane: u32) {
        let mut state = self.lock();
        state.leave(lane);
        state.live &= !(1 << lane);
        if state.arrived != 0 && state.arrived == state.live {
            state.form();
        }
        if state.whole != 0 && state.whole == state.live {
            state.form_whole();
        }
        self.turn.notify_all();
    }

    pub(super) fn group(&self, lane: u32, key: u64) -> Group {
        let mut state = self.lock();
        state.leave(lane);
        state.arrived |= 1 << lane;
        state.key[lane as usize] = key;
        if state.arrived == state.live {
            state.form();
            self.turn.notify_all();
        }
        loop {
            if let Some(group) = state.formed[lane as usize].take() {
                return group;
            }
            let (next, waited) = self
                .turn
                .wait_timeout(state, PATIENCE)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            if waited.timed_out() && state.formed[lane as usize].is_none() {
                state.form();
                self.turn.notify_all();
            }
        }
    }

    /// All lanes that have not ended.
    pub(super) fn whole(&self, lane: u32) -> Group {
        let mut state = self.lock();
        state.leave(lane);
        state.whole |= 1 << lane;
        if state.whole == state.live {
            state.form_whole();
            self.turn.notify_all();
        }
        loop {
            if let Some(group) = state.formed[lane as usize].take() {
                return group;
            }
            state = self
                .turn
                .wait_timeout(state, LOOK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Passes `value` and returns that of the lane of rank `rank`.
    pub(super) fn exchange(&self, lane: u32, group: Group, value: u64, rank: u32) -> u64 {
        let mut state = self.lock();
        let meeting = state
            .groups
            .get_mut(&group.tag)
            .expect("a lane used a group after it ended");
        debug_assert_eq!(meeting.mask, group.mask);
        let round = meeting.round;
        let slot = (round & 1) as usize;
        meeting.value[slot][lane as usize] = value;
        meeting.arrived |= 1 << lane;
        if meeting.arrived == meeting.mask {
            meeting.arrived = 0;
            meeting.round += 1;
            self.turn.notify_all();
        }
        let from = nth_lane(group.mask, rank);
        loop {
            let meeting = &state.groups[&group.tag];
            if meeting.round != round {
                return meeting.value[slot][from];
            }
            state = self
                .turn
                .wait_timeout(state, LOOK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl State {
    fn leave(&mut self, lane: u32) {
        let Some(tag) = self.member[lane as usize].take() else {
            return;
        };
        let meeting = self.groups.get_mut(&tag).expect("a member's group exists");
        meeting.members &= !(1 << lane);
        if meeting.members == 0 {
            self.groups.remove(&tag);
        }
    }

    /// Makes groups of the lanes that have arrived, by key.
    fn form(&mut self) {
        let mut left = core::mem::take(&mut self.arrived);
        while left != 0 {
            let key = self.key[left.trailing_zeros() as usize];
            let mask = lanes(left)
                .filter(|&l| self.key[l as usize] == key)
                .fold(0, |m, l| m | 1 << l);
            left &= !mask;
            self.add(mask);
        }
    }

    fn form_whole(&mut self) {
        let mask = core::mem::take(&mut self.whole);
        self.add(mask);
    }

    fn add(&mut self, mask: u32) {
        let tag = self.next_tag;
        self.next_tag = self.next_tag.wrapping_add(1);
        self.groups.insert(
            tag,
            Meeting {
                mask,
                members: mask,
                arrived: 0,
                round: 0,
                value: [[0; 32]; 2],
            },
        );
        for (rank, lane) in lanes(mask).enumerate() {
            self.formed[lane as usize] = Some(Group {
                mask,
                rank: rank as u32,
                size: mask.count_ones(),
                tag,
            });
            self.member[lane as usize] = Some(tag);
        }
    }
}

fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |l| mask >> l & 1 == 1)
}

fn nth_lane(mask: u32, rank: u32) -> usize {
    lanes(mask)
        .nth(rank as usize)
        .expect("a rank below the size of the group") as usize
}
