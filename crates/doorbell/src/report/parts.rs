//! The parts of a report that come from the flight recorder: events, requests that wait in a queue, regions, waits.

use doorbell_device::layout::{WAIT_OVER, WAIT_RECEIVE, WAIT_TICKET, WAIT_WORD};
use doorbell_hca::record as rec;
use doorbell_hca::record::{Kind, QpRecord, RegionRecord, WaitKind, WaitRecord};
use doorbell_wire::{Chunk, Ctrl, Opcode, Qpn, Request};
use serde::{Deserialize, Serialize};

/// Requests decoded of one queue pair at most.
const MOST_PENDING: u64 = 32_768;

/// Something that happened to a range of slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// When, nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// `posted`, `rung`, `executed`, `issued`, `completed`, `done`, `error`, `flushed`, `parked`, `fault` or `state`; see
    /// [`Kind`].
    pub kind: String,
    /// First slot.
    pub from: u64,
    /// Slots.
    pub slots: u32,
    /// Bytes, syndrome, state: as the kind says.
    pub value: u32,
}

impl EventReport {
    /// Does it say something of that slot?
    pub fn covers(&self, slot: u64) -> bool {
        slot.checked_sub(self.from)
            .is_some_and(|n| n < u64::from(self.slots))
    }

    /// In words, without the time.
    pub fn text(&self) -> String {
        let last = self.from.saturating_add(u64::from(self.slots.max(1)) - 1);
        let slots = match self.slots {
            0 | 1 => format!("slot {}", self.from),
            _ => format!("slots {} to {last}", self.from),
        };
        let bytes = match self.value {
            0 => String::new(),
            n => format!(", {n} bytes"),
        };
        match Kind::named(&self.kind) {
            Some(Kind::Posted) => format!("{slots}: written, engine saw no doorbell yet"),
            Some(Kind::Rung) => format!("{slots}: rung"),
            Some(Kind::Executed) => format!("{slots}: executed and complete{bytes}"),
            Some(Kind::Issued) => format!("{slots}: under way{bytes}"),
            Some(Kind::Completed) => format!("{slots}: complete"),
            Some(Kind::Done) => format!("{slots}: rung, executed and complete{bytes}"),
            Some(Kind::Error) => format!(
                "{slots}: failed, {}; {}",
                doorbell_wire::Syndrome(self.value as u8),
                doorbell_wire::Vendor((self.value >> 8) as u8)
            ),
            Some(Kind::Flushed) => format!("{slots}: flushed"),
            Some(Kind::Parked) => format!(
                "slot {}: set aside, it waits for {}",
                self.from,
                rec::Park::from_u32(self.value).text()
            ),
            Some(Kind::Fault) => format!("slot {}: fault rule {}", self.from, self.value),
            Some(Kind::State) => format!(
                "the queue pair is {}",
                ["reset", "ready", "in error", "destroyed"]
                    .get(self.value as usize)
                    .unwrap_or(&"in a state that this release does not know")
            ),
            None => format!("{slots}: {}", self.kind),
        }
    }
}

/// A request that is written and not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingReport {
    /// Its first slot.
    pub index: u64,
    /// What it is to do, in a word or two.
    pub what: String,
    /// The target's key, if it names one.
    pub key: Option<u32>,
    /// The target's address, as the WQE has it.
    pub addr: u64,
    /// Bytes there.
    pub len: u64,
    /// It changes them.
    pub writes: bool,
    /// It takes a receive at the target.
    #[serde(default)]
    pub takes: bool,
    /// When the engine first saw it, rung or not.
    pub posted_ns: Option<u64>,
}

/// A kernel that was launched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReport {
    /// Its name.
    pub name: String,
    /// When it was launched, nanoseconds of the monotonic clock.
    pub from_ns: u64,
    /// When whoever waited for it knew that it had ended.
    pub to_ns: Option<u64>,
}

/// A memory region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionReport {
    /// Its key.
    pub key: u32,
    /// The address by which WQEs name its first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// The owner's address of its first byte.
    pub addr: u64,
    /// Rights.
    pub access: String,
    /// Protection domain.
    pub pd: u32,
    /// GPU memory that the CPU does not reach.
    pub on_gpu: bool,
}

impl RegionReport {
    pub(super) fn of(region: &RegionRecord) -> Self {
        Self {
            key: region.key,
            base: region.base,
            len: region.len,
            addr: region.addr,
            access: format!("{:?}", region.access),
            pd: region.pd,
            on_gpu: region.on_gpu,
        }
    }
}

/// A wait that has lasted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReport {
    /// `word`, `ticket` or `receive`.
    pub kind: String,
    /// Address of the word; the queue pair otherwise.
    pub at: u64,
    /// The value, or the slot, that is waited for.
    pub wanted: u64,
    /// What was there when it last looked.
    pub have: u64,
    /// Since when, nanoseconds of the monotonic clock.
    pub since_ns: u64,
    /// The thread, if it is one of the host.
    pub thread: Option<u32>,
    /// It gave up at its deadline.
    pub over: bool,
    /// How long it has waited, or had when it gave up, nanoseconds.
    #[serde(default)]
    pub lasted_ns: u64,
    /// What is missing, and where.
    pub verdict: String,
}

impl WaitReport {
    pub(super) fn of(wait: &WaitRecord) -> Self {
        Self {
            kind: match wait.kind {
                WaitKind::Word => "word",
                WaitKind::Ticket => "ticket",
                WaitKind::Receive => "receive",
            }
            .to_owned(),
            at: wait.at,
            wanted: wait.wanted,
            have: wait.have,
            since_ns: wait.since_ns,
            thread: Some(wait.thread),
            over: false,
            lasted_ns: wait.seen_ns.saturating_sub(wait.since_ns),
            verdict: String::new(),
        }
    }
}

impl WaitReport {
    /// From what device code noted, by its own clock: what that says now, if it can be asked; else the note, which is written again and again
    /// while a wait lasts, is of `now_ns`.
    pub(crate) fn noted(note: [u64; 6], now_ns: u64, its_clock: Option<u64>) -> Option<Self> {
        let [kind, at, wanted, have, since, seen] = note;
        let over = kind & WAIT_OVER != 0;
        let until = its_clock.filter(|_| !over).unwrap_or(seen);
        let lasted_ns = until.saturating_sub(since);
        Some(Self {
            kind: match kind & 0xff {
                WAIT_WORD => "word",
                WAIT_TICKET => "ticket",
                WAIT_RECEIVE => "receive",
                _ => return None,
            }
            .to_owned(),
            at,
            wanted,
            have,
            since_ns: now_ns.saturating_sub(lasted_ns),
            thread: None,
            over,
            lasted_ns,
            verdict: String::new(),
        })
    }
}

pub(super) fn events(qp: &QpRecord) -> Vec<EventReport> {
    qp.events
        .iter()
        .map(|e| EventReport {
            at_ns: e.at_ns,
            kind: e.kind.name().to_owned(),
            from: e.from,
            slots: e.slots,
            value: e.value,
        })
        .collect()
}

/// `loopback`, `shm`, `roce`, `verbs`, or nothing; and the number of the queue pair at the other end.
pub(super) fn link((target, qpn): (rec::Target, u32)) -> (String, Option<u32>) {
    let name = match target {
        rec::Target::None => return (String::new(), None),
        rec::Target::Loopback => "loopback",
        rec::Target::Shm => "shm",
        rec::Target::Roce => "roce",
        rec::Target::Verbs => "verbs",
    };
    (name.to_owned(), Some(qpn))
}

/// What a queue pair was set aside for, in words.
pub(super) fn parked(still: &rec::Still) -> Option<String> {
    (still.parked != rec::Park::None).then(|| still.parked.text().to_owned())
}

/// The requests in slots `from` to `to`, as far as the slots hold what they should.
pub(super) fn pending(
    qpn: u32,
    (from, to): (u64, u64),
    events: &[EventReport],
    slot: impl Fn(u64) -> Option<[u8; 64]>,
) -> Vec<PendingReport> {
    let mut found = Vec::new();
    let to = to.min(from.saturating_add(MOST_PENDING));
    let mut at = from;
    while at < to {
        let Some(first) = slot(at) else { break };
        let head = Chunk::from_bytes(&first.as_chunks::<16>().0[0]);
        let ctrl = Ctrl::parse(head);
        if Qpn::new(qpn).is_none_or(|qpn| !ctrl.matches(at as u16, qpn)) || ctrl.ds == 0 {
            // Not written (yet): what follows may be.
            at += 1;
            continue;
        }
        let slots = u64::from(ctrl.slots()).max(1);
        let mut chunks = Vec::with_capacity(usize::from(ctrl.ds));
        for more in 0..slots {
            let Some(bytes) = slot(at.wrapping_add(more)) else {
                break;
            };
            chunks.extend(bytes.as_chunks::<16>().0.iter().map(Chunk::from_bytes));
        }
        chunks.truncate(usize::from(ctrl.ds));
        found.push(one(at, &ctrl, &chunks, events));
        at = at.saturating_add(slots);
    }
    found
}

fn one(index: u64, ctrl: &Ctrl, chunks: &[Chunk], events: &[EventReport]) -> PendingReport {
    let name = Opcode::try_from(ctrl.opcode).map_or("unknown opcode", Opcode::name);
    let request = Request::parse(chunks);
    let (remote, len, writes) = match &request {
        Ok(Request::Write { remote, local, .. }) => (Some(*remote), local.len(), true),
        Ok(Request::Read { remote, local }) => (Some(*remote), local.len(), false),
        Ok(Request::FetchAdd { remote, .. } | Request::CompareSwap { remote, .. }) => {
            (Some(*remote), 8, true)
        }
        Ok(
            Request::MaskedFetchAdd { remote, width, .. }
            | Request::MaskedCompareSwap { remote, width, .. },
        ) => (Some(*remote), width.bytes().into(), true),
        Ok(Request::Send { local, .. }) => (None, local.len(), false),
        _ => (None, 0, false),
    };
    let what = match &request {
        Ok(Request::FetchAdd { add, .. }) => format!("{name} of {add}"),
        Ok(_) if len != 0 => format!("{name} of {len} bytes"),
        Ok(_) => name.to_owned(),
        Err(e) => format!("{name}, malformed: {e}"),
    };
    PendingReport {
        index,
        what,
        key: remote.map(|r| r.key.0),
        addr: remote.map_or(0, |r| r.addr),
        len,
        writes,
        takes: match &request {
            Ok(Request::Send { .. }) => true,
            Ok(Request::Write { imm, .. }) => imm.is_some(),
            _ => false,
        },
        posted_ns: first_sight(events, index),
    }
}

/// When the engine first saw a slot.
pub(super) fn first_sight(events: &[EventReport], slot: u64) -> Option<u64> {
    events
        .iter()
        .filter(|e| {
            matches!(
                Kind::named(&e.kind),
                Some(Kind::Posted | Kind::Rung | Kind::Done)
            ) && e.covers(slot)
        })
        .map(|e| e.at_ns)
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_another_process_may_be_anything() {
        let event = EventReport {
            at_ns: u64::MAX,
            kind: "rung".into(),
            from: u64::MAX,
            slots: u32::MAX,
            value: u32::MAX,
        };
        assert!(event.text().contains("rung") && !event.covers(0));
        assert!(pending(1, (u64::MAX - 1, u64::MAX), &[], |_| None).is_empty());
    }
}
