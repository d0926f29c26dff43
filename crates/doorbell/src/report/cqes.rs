//! Completions that the engine has written, or says that it has, against what lies in the CQ. The engine moves its index when the work is
//! done; if the CQE of a slot below it is missing or damaged, whoever polls for it waits for ever, or reads nonsense.
//!
//! "Not written" is what an entry shows that still is as the queue pair's making or the lap before left it; anything else that is wrong is
//! damage, also if it makes pollers believe that nothing was written.

use doorbell_device::layout::CqKind;
use doorbell_wire::Chunk;
use doorbell_wire::cqe::{CqeTail, Kind};

use super::{Receives, Seen};

/// A CQ, as far as it can be read.
pub(super) struct Look<'a> {
    pub(super) qpn: u32,
    /// Entries; a power of two.
    pub(super) entries: u32,
    /// The entry of a position, if it can be read.
    pub(super) entry: &'a dyn Fn(u64) -> Option<[u8; 64]>,
}

/// A CQE that is not as it was written: its position, and what is wrong, in words.
pub(super) type Lacks = Option<(u64, String)>;

/// The first CQE of the send queue that whoever polls lacks; nothing if all are there. `newest`: one more than the newest slot that a collapsed CQ
/// ought to show.
pub(super) fn lacking(
    look: &Look<'_>,
    kind: CqKind,
    engine: Seen,
    consumed: Option<u64>,
    newest: Option<u64>,
) -> Lacks {
    match kind {
        CqKind::PerSlot => {
            let from = engine.completed.saturating_sub(look.entries.into());
            let from = consumed.map_or(from, |c| c.max(from));
            (from..engine.completed).find_map(|at| {
                let wrong = look.per_slot(at, |k| k == Kind::Requester)?;
                Some((at, wrong.text(&format!("WQE {at}"), "executed")))
            })
        }
        // Nothing signalled yet: nothing to show.
        CqKind::Collapsed => {
            let at = newest?.checked_sub(1)?;
            Some((at, look.collapsed(at)?))
        }
    }
}

/// The first CQE of the receive queue that is not as it was written.
pub(super) fn lacking_receive(look: &Look<'_>, recv: Receives) -> Lacks {
    let from = recv.done.saturating_sub(look.entries.into());
    let filled = |kind| {
        matches!(
            kind,
            Kind::ResponderWriteImm | Kind::ResponderSend | Kind::ResponderSendImm
        )
    };
    (from..recv.done).find_map(|at| {
        let wrong = look.per_slot(at, filled)?;
        Some((at, wrong.text(&format!("receive {at}"), "filled")))
    })
}

/// What is wrong with an entry: its last eight bytes, and why they are wrong (nothing: nothing was written).
struct Wrong {
    words: String,
    damage: Option<String>,
}

impl Wrong {
    /// `done` was what became of `what`.
    fn text(&self, what: &str, done: &str) -> String {
        let words = &self.words;
        match &self.damage {
            Some(damage) => {
                format!("the CQE of {what} is damaged ({words}): {damage}; it was {done}")
            }
            None => format!(
                "{what} was {done}, but no CQE was written for it (its entry holds {words}): whoever waits for it waits for ever"
            ),
        }
    }
}

/// The last eight bytes of an entry.
struct Entry {
    tail: CqeTail,
    qpn: u32,
    /// Nothing but what the queue pair's making wrote.
    untouched: bool,
    words: String,
}

impl Look<'_> {
    fn per_slot(&self, at: u64, wanted: impl Fn(Kind) -> bool) -> Option<Wrong> {
        let entry = self.read(at)?;
        let owner = (at / u64::from(self.entries.max(1))) as u8 & 1;
        let tail = entry.tail;
        // The owner bit of the lap before, and its index.
        let lap_before = tail.owner() != owner
            && tail.wqe_counter() == (at as u16).wrapping_sub(self.entries as u16)
            && !tail.is_invalid();
        let damage = match (entry.untouched || lap_before, tail.owner() != owner) {
            (true, _) => None,
            (false, true) if self.fits(at, &entry, &wanted) => {
                Some("its owner bit says that it is not written yet".to_owned())
            }
            (false, _) => Some(self.damage(at, &entry, &wanted)?),
        };
        let words = entry.words;
        Some(Wrong { words, damage })
    }

    /// Is all but the owner bit as it ought to be?
    fn fits(&self, at: u64, entry: &Entry, wanted: &impl Fn(Kind) -> bool) -> bool {
        entry.tail.wqe_counter() == at as u16
            && entry.qpn == self.qpn
            && entry.tail.signature() == 0
            && entry.tail.kind().is_some_and(wanted)
    }

    fn collapsed(&self, at: u64) -> Option<String> {
        let entry = self.read(0)?;
        let wanted = |kind| kind == Kind::Requester;
        let behind = (at as u16).wrapping_sub(entry.tail.wqe_counter());
        let earlier = at.saturating_sub(behind.into());
        let sane = self.fits(earlier, &entry, &wanted);
        if entry.untouched || (sane && (1..0x8000).contains(&behind)) {
            let shows = match entry.untouched {
                true => "nothing".to_owned(),
                false => format!("WQE {earlier}"),
            };
            return Some(format!(
                "WQE {at} was executed, but no CQE was written for it (the CQ shows {shows}): whoever waits for it waits for ever, unless a later one completes"
            ));
        }
        let damage = Some(self.damage(at, &entry, &wanted)?);
        let words = entry.words;
        Some(Wrong { words, damage }.text(&format!("WQE {at}"), "executed"))
    }

    fn read(&self, at: u64) -> Option<Entry> {
        let bytes = (self.entry)(at)?;
        let last = *bytes.last_chunk::<16>()?;
        let tail = CqeTail::of(Chunk::from_bytes(&last));
        let words: Vec<String> = last[8..].iter().map(|b| format!("{b:02x}")).collect();
        Some(Entry {
            tail,
            qpn: u32::from_be_bytes([0, last[9], last[10], last[11]]),
            untouched: last[8..12] == [0; 4] && tail.is_invalid() && tail.wqe_counter() == 0,
            words: words.join(" "),
        })
    }

    fn damage(&self, at: u64, entry: &Entry, wanted: &impl Fn(Kind) -> bool) -> Option<String> {
        let tail = entry.tail;
        let mut wrong = Vec::new();
        if tail.wqe_counter() != at as u16 {
            let is = tail.wqe_counter();
            wrong.push(format!("index {is} instead of {}", at as u16));
        }
        if entry.qpn != self.qpn {
            wrong.push(format!(
                "QP number {:#x} instead of {:#x}",
                entry.qpn, self.qpn
            ));
        }
        match tail.kind() {
            Some(Kind::Invalid) => {
                wrong.push("its opcode byte says that it is not written yet".to_owned());
            }
            Some(kind) if wanted(kind) => {}
            // A request or receive that failed says so, and its queue pair is in error.
            _ => wrong.push(format!("kind {:#x}, which is no completion", tail.code())),
        }
        if tail.signature() != 0 {
            wrong.push(format!("signature {:#04x} instead of 0", tail.signature()));
        }
        (!wrong.is_empty()).then(|| wrong.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(qpn: u32, at: u16, op_own: u8) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[56..60].copy_from_slice(&(8 << 24 | qpn).to_be_bytes());
        bytes[60..62].copy_from_slice(&at.to_be_bytes());
        bytes[63] = op_own;
        bytes
    }

    /// As a queue pair's making leaves it.
    fn untouched(op_own: u8) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[63] = op_own;
        bytes
    }

    fn per_slot(entry: [u8; 64], at: u64) -> Option<String> {
        let look = Look {
            qpn: 0x42,
            entries: 16,
            entry: &|i| (i == at).then_some(entry),
        };
        let engine = Seen {
            rung: at + 1,
            completed: at + 1,
        };
        lacking(&look, CqKind::PerSlot, engine, None, None).map(|(_, text)| text)
    }

    fn collapsed(entry: [u8; 64], at: u64) -> Option<String> {
        let look = Look {
            qpn: 0x42,
            entries: 1,
            entry: &|_| Some(entry),
        };
        let engine = Seen {
            rung: at + 1,
            completed: at + 1,
        };
        lacking(&look, CqKind::Collapsed, engine, None, Some(at + 1)).map(|(_, text)| text)
    }

    #[test]
    fn what_is_there_is_not_missed() {
        assert_eq!(per_slot(entry(0x42, 3, 0), 3), None);
        assert_eq!(per_slot(entry(0x42, 19, 1), 19), None);
        assert_eq!(collapsed(entry(0x42, 7, 0), 0x1_0007), None);
        // The initial entry of a per-slot CQ, and that of the lap before.
        let text = per_slot(entry(0x42, 19, 0), 19).expect("damaged");
        assert!(text.contains("owner bit"), "{text}");
        for bytes in [untouched(0xf1), entry(0x42, 3, 0)] {
            let text = per_slot(bytes, 19).expect("lacking");
            assert!(
                text.contains("WQE 19 was executed, but no CQE was written"),
                "{text}"
            );
        }
        let text = collapsed(entry(0x42, 5, 0), 7).expect("lacking");
        assert!(text.contains("the CQ shows WQE 5"), "{text}");
        let text = collapsed(untouched(0xf0), 0).expect("lacking");
        assert!(text.contains("shows nothing"), "{text}");
    }

    #[test]
    fn damage_is_named_also_if_it_looks_like_nothing() {
        for (bytes, part) in [
            (entry(0x42, 4, 0), "index 4 instead of 3"),
            (entry(0x43, 3, 0), "QP number 0x43 instead of 0x42"),
            (entry(0x42, 3, 0xd0), "kind 0xd"),
            (entry(0x42, 3, 0xf0), "its opcode byte says"),
            (entry(0x42, 3, 0xff), "its opcode byte says"),
        ] {
            let text = per_slot(bytes, 3).expect("damaged");
            assert!(text.contains("is damaged") && text.contains(part), "{text}");
        }
        let mut bytes = entry(0x42, 3, 0);
        bytes[62] = 0x40;
        let text = collapsed(bytes, 3).expect("damaged");
        assert!(text.contains("signature 0x40"), "{text}");
        let text = collapsed(entry(0x42, 3, 0xf0), 3).expect("damaged");
        assert!(text.contains("its opcode byte says"), "{text}");
    }

    #[test]
    fn receives_have_their_own_kinds() {
        let with = |op_own: u8| {
            let bytes = entry(0x42, 2, op_own);
            let look = Look {
                qpn: 0x42,
                entries: 16,
                entry: &|i| (i == 2).then_some(bytes),
            };
            let recv = Receives {
                posted: 16,
                done: 3,
            };
            lacking_receive(&look, recv)
        };
        for kind in [0x10, 0x20, 0x30] {
            assert_eq!(with(kind), None);
        }
        let (at, text) = with(0x00).expect("a send's");
        assert!(
            at == 2 && text.contains("the CQE of receive 2 is damaged"),
            "{text}"
        );
        assert!(with(0x21).expect("turned").1.contains("owner bit"));
    }
}
