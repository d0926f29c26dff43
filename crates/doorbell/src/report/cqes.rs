//! Completions that the engine has written, or says that it has, against what lies in the CQ. The engine moves its index when the work is
//! done; if the CQE of a slot below it is missing or damaged, whoever polls for it waits for ever, or reads nonsense.

use doorbell_device::layout::CqKind;
use doorbell_wire::Chunk;
use doorbell_wire::cqe::{CqeTail, Kind};

use super::{Poster, Seen};
use crate::qp::QpCore;

/// What the engine knows of a CQ, and where its entries are.
struct Look<'a> {
    qpn: u32,
    /// Base-two logarithm of the entries of a per-slot CQ.
    log: u32,
    entry: &'a dyn Fn(u64) -> Option<[u8; 64]>,
}

/// The first CQE that whoever polls lacks, in words; nothing if all are there.
pub(super) fn lacking(qp: &QpCore, engine: Seen, poster: Option<Poster>) -> Option<String> {
    let look = Look {
        qpn: qp.qpn(),
        log: qp.depth().ilog2(),
        entry: &|at| qp.cq().peek(at as u32).ok(),
    };
    match qp.cq().kind() {
        CqKind::PerSlot => {
            let from = engine.completed.saturating_sub(qp.depth().into());
            let from = poster.map_or(from, |p| p.consumed.max(from));
            (from..engine.completed).find_map(|at| look.per_slot(at))
        }
        // Nothing signalled yet: nothing to show.
        CqKind::Collapsed => look.collapsed(qp.inner.newest_cqe()?.checked_sub(1)?),
    }
}

impl Look<'_> {
    fn per_slot(&self, at: u64) -> Option<String> {
        let (tail, qpn, words) = self.read(at)?;
        let owner = (at >> self.log) as u8 & 1;
        let turned = tail.owner() != owner;
        if turned && !tail.is_invalid() && tail.wqe_counter() == at as u16 && qpn == self.qpn {
            return Some(format!(
                "the CQE of WQE {at} is damaged ({words}): its owner bit says that it is not written yet; the engine executed the WQE"
            ));
        }
        if tail.is_invalid() || turned {
            return Some(format!(
                "WQE {at} was executed, but no CQE was written for it (its entry holds {words}): whoever waits for it waits for ever"
            ));
        }
        self.damage(at, tail, qpn, &words)
    }

    fn collapsed(&self, at: u64) -> Option<String> {
        let (tail, qpn, words) = self.read(0)?;
        let behind = (at as u16).wrapping_sub(tail.wqe_counter());
        let sane = tail.kind() == Some(Kind::Requester) && qpn == self.qpn;
        if tail.is_invalid() || (sane && (1..0x8000).contains(&behind)) {
            let shows = match tail.is_invalid() {
                true => "nothing".to_owned(),
                false => format!("WQE {}", at - u64::from(behind).min(at)),
            };
            return Some(format!(
                "WQE {at} was executed, but no CQE was written for it (the CQ shows {shows}): whoever waits for it waits for ever, unless a later one completes"
            ));
        }
        self.damage(at, tail, qpn, &words)
    }

    /// Its last eight bytes: counter and owner, QP number, and as they lie in memory.
    fn read(&self, at: u64) -> Option<(CqeTail, u32, String)> {
        let bytes = (self.entry)(at)?;
        let last = *bytes.last_chunk::<16>()?;
        let qpn = u32::from_be_bytes([0, last[9], last[10], last[11]]);
        let words: Vec<String> = last[8..].iter().map(|b| format!("{b:02x}")).collect();
        Some((CqeTail::of(Chunk::from_bytes(&last)), qpn, words.join(" ")))
    }

    fn damage(&self, at: u64, tail: CqeTail, qpn: u32, words: &str) -> Option<String> {
        let mut wrong = Vec::new();
        if tail.wqe_counter() != at as u16 {
            wrong.push(format!(
                "index {} instead of {}",
                tail.wqe_counter(),
                at as u16
            ));
        }
        if qpn != self.qpn {
            wrong.push(format!("QP number {qpn:#x} instead of {:#x}", self.qpn));
        }
        if tail.kind() != Some(Kind::Requester) {
            wrong.push(format!(
                "kind {:#x}, which is no completed send",
                tail.code()
            ));
        }
        if tail.signature() != 0 {
            wrong.push(format!("signature {:#04x} instead of 0", tail.signature()));
        }
        (!wrong.is_empty()).then(|| {
            format!(
                "the CQE of WQE {at} is damaged ({words}): {}; the engine executed the WQE",
                wrong.join(", ")
            )
        })
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

    fn look(entry: [u8; 64], ask: impl Fn(&Look<'_>) -> Option<String>) -> Option<String> {
        ask(&Look {
            qpn: 0x42,
            log: 4,
            entry: &|_| Some(entry),
        })
    }

    #[test]
    fn what_is_there_is_not_missed() {
        assert_eq!(look(entry(0x42, 3, 0), |l| l.per_slot(3)), None);
        assert_eq!(look(entry(0x42, 19, 1), |l| l.per_slot(19)), None);
        assert_eq!(look(entry(0x42, 7, 0), |l| l.collapsed(0x1_0007)), None);
        // The initial entry of a per-slot CQ, and that of the lap before.
        let text = look(entry(0x42, 19, 0), |l| l.per_slot(19)).expect("damaged");
        assert!(text.contains("owner bit"), "{text}");
        for bytes in [entry(0, 0, 0xf1), entry(0x42, 3, 0)] {
            let text = look(bytes, |l| l.per_slot(19)).expect("lacking");
            assert!(
                text.contains("WQE 19 was executed, but no CQE was written"),
                "{text}"
            );
        }
        let text = look(entry(0x42, 5, 0), |l| l.collapsed(7)).expect("lacking");
        assert!(text.contains("the CQ shows WQE 5"), "{text}");
        let text = look(entry(0, 0, 0xf0), |l| l.collapsed(0)).expect("lacking");
        assert!(text.contains("shows nothing"), "{text}");
    }

    #[test]
    fn damage_is_named() {
        for (bytes, part) in [
            (entry(0x42, 4, 0), "index 4 instead of 3"),
            (entry(0x43, 3, 0), "QP number 0x43 instead of 0x42"),
            (entry(0x42, 3, 0xd0), "kind 0xd"),
        ] {
            let text = look(bytes, |l| l.per_slot(3)).expect("damaged");
            assert!(text.contains("is damaged") && text.contains(part), "{text}");
        }
        let mut bytes = entry(0x42, 3, 0);
        bytes[62] = 0x40;
        let text = look(bytes, |l| l.collapsed(3)).expect("damaged");
        assert!(text.contains("signature 0x40"), "{text}");
    }
}
