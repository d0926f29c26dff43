//! Which connections have something to do: those that posted, heard, or wait for a copy, and those whose time has come. A round looks at
//! these only, however many queue pairs are connected.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Slots of queue pairs whose connections are to be asked, each once.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// To be asked in the next pass.
    active: Vec<u32>,
    /// Memory for the list after it.
    spare: Vec<u32>,
    /// When to look at which again. An entry may be too early, or of a queue pair that is gone: whoever takes it looks.
    timers: BinaryHeap<Reverse<(u64, u32)>>,
}

/// What a connection's place in the list is; kept with the connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    active: bool,
    /// Its entry among the timers.
    timer: Option<u64>,
}

impl Ready {
    /// The connection of this slot has something to do.
    #[inline]
    pub(super) fn rouse(&mut self, slot: u32, place: &mut Place) {
        if !std::mem::replace(&mut place.active, true) {
            self.active.push(slot);
        }
    }

    /// Takes the list; each goes back by [`Self::keep`] or [`Self::rest`].
    pub(super) fn take(&mut self) -> Vec<u32> {
        std::mem::replace(&mut self.active, std::mem::take(&mut self.spare))
    }

    /// Gives the list's memory back.
    pub(super) fn put_back(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.spare = list;
    }

    /// It may have more to do at once.
    pub(super) fn keep(&mut self, slot: u32) {
        self.active.push(slot);
    }

    /// It has nothing to do before `timeout`.
    pub(super) fn rest(&mut self, slot: u32, place: &mut Place, timeout: Option<u64>) {
        place.active = false;
        if let Some(at) = timeout
            && place.timer.is_none_or(|timer| at < timer)
        {
            place.timer = Some(at);
            self.timers.push(Reverse((at, slot)));
        }
    }

    /// A slot whose time has come.
    pub(super) fn due(&mut self, now: u64) -> Option<(u32, u64)> {
        let &Reverse((at, slot)) = self.timers.peek()?;
        if at > now {
            return None;
        }
        self.timers.pop();
        Some((slot, at))
    }

    /// The entry that [`Self::due`] gave is the connection's.
    pub(super) fn rouse_due(&mut self, slot: u32, at: u64, place: &mut Place) {
        if place.timer == Some(at) {
            place.timer = None;
            self.rouse(slot, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_in_the_list_once_and_comes_back_in_time() {
        let (mut ready, mut a, mut b) = (Ready::default(), Place::default(), Place::default());
        ready.rouse(1, &mut a);
        ready.rouse(1, &mut a);
        ready.rouse(2, &mut b);
        assert_eq!(ready.take(), [1, 2]);
        ready.rest(1, &mut a, Some(50));
        ready.keep(2);
        // Already there.
        ready.rouse(2, &mut b);
        assert_eq!(ready.take(), [2]);
        ready.rest(2, &mut b, None);
        assert_eq!(ready.due(49), None);
        // A later time of the same needs no entry of its own; an earlier one does.
        ready.rest(1, &mut a, Some(60));
        ready.rest(1, &mut a, Some(40));
        let (slot, at) = ready.due(49).expect("due");
        ready.rouse_due(slot, at, &mut a);
        assert_eq!(ready.take(), [1]);
        ready.rest(1, &mut a, Some(70));
        // The entry that was overtaken wakes nobody.
        let (slot, at) = ready.due(55).expect("the old entry");
        ready.rouse_due(slot, at, &mut a);
        assert_eq!(ready.take(), []);
        let (slot, at) = ready.due(70).expect("due");
        ready.rouse_due(slot, at, &mut a);
        assert_eq!((ready.take(), ready.due(u64::MAX)), (vec![1], None));
    }
}
