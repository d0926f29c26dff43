//! Counters of RoCE connections and ports, by the names of the rdma tool.

use std::collections::BTreeMap;

use anyhow::Result;
use doorbell::{Device, Qp, QpCore};

use super::far::Order;
use super::pipe::Partner;
use super::tally::Tally;
use crate::args::Link;
use crate::schema::Roce;

/// Name and value.
pub(crate) type Counters = BTreeMap<String, u64>;

/// Counters that say how much was done, not that something was amiss.
const TRAFFIC: [&str; 11] = [
    "sent_packets",
    "sent_bytes",
    "sent_calls",
    "sent_trains",
    "sent_full",
    "received_packets",
    "received_bytes",
    "received_calls",
    "received_empty",
    "received_trains",
    "icrc_explained",
];

fn is_traffic(name: &str) -> bool {
    TRAFFIC.contains(&name) || name.starts_with("tx_") || name.starts_with("rx_")
}

/// Those of the device's port and of these connections, summed.
pub(crate) fn read<Q: AsRef<QpCore>>(device: &Device, qps: &[Q]) -> Counters {
    let mut all = Counters::new();
    let of_qps = qps.iter().flat_map(|qp| qp.as_ref().roce_counters());
    for (name, count) in device.roce_counters().into_iter().chain(of_qps) {
        *all.entry(name.to_owned()).or_default() += count;
    }
    all
}

/// Both sides' counters at the start of a case.
pub(crate) struct Watch(Option<Roce>);

impl Watch {
    /// Once the queue pairs are connected.
    pub(crate) fn start(
        device: &Device,
        qps: &[Qp],
        link: Link,
        partner: Option<&mut Partner>,
    ) -> Result<Self> {
        match (link, partner) {
            (Link::Roce, Some(partner)) => Ok(Self(Some(both(device, qps, partner)?))),
            _ => Ok(Self(None)),
        }
    }

    /// Before they go: into the result, and a line if something was amiss.
    pub(crate) fn end(
        self,
        device: &Device,
        qps: &[Qp],
        partner: Option<&mut Partner>,
        tally: &mut Tally,
    ) -> Result<()> {
        let (Some(before), Some(partner)) = (self.0, partner) else {
            return Ok(());
        };
        let now = both(device, qps, partner)?;
        let roce = Roce {
            initiator: since(&now.initiator, &before.initiator),
            target: since(&now.target, &before.target),
        };
        for (side, counters) in [("initiator", &roce.initiator), ("target", &roce.target)] {
            if let Some(line) = line(counters) {
                tally.notes.push(format!("RoCE at the {side}: {line}"));
            }
        }
        tally.roce = Some(roce);
        Ok(())
    }
}

fn both(device: &Device, qps: &[Qp], partner: &mut Partner) -> Result<Roce> {
    let initiator = read(device, qps);
    let mut target: Counters = partner.ask("say what it counted", &Order::Counters)?;
    // Names go to a terminal and into results: those of the other process may be anything.
    target.retain(|name, _| is_name(name));
    Ok(Roce { initiator, target })
}

fn is_name(name: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(word)
}

/// What came since `before`.
pub(crate) fn since(now: &Counters, before: &Counters) -> Counters {
    now.iter()
        .map(|(name, count)| {
            let before = before.get(name).copied().unwrap_or(0);
            (name.clone(), count.saturating_sub(before))
        })
        .collect()
}

/// One line that names what was retried, dropped or refused; `None` if nothing was.
pub(crate) fn line(counters: &Counters) -> Option<String> {
    let amiss: Vec<String> = counters
        .iter()
        .filter(|(name, count)| **count > 0 && !is_traffic(name))
        .map(|(name, count)| format!("{name} {}", crate::units::grouped(*count)))
        .collect();
    (!amiss.is_empty()).then(|| amiss.join(", "))
}

/// What the kernel refused to send and what to do about it, for errors of a link; `None` if it refused nothing.
pub(crate) fn refused(counters: &Counters) -> Option<String> {
    let count = |name: &str| counters.get(name).copied().filter(|&n| n > 0);
    let said = [
        (
            "sent_too_long",
            "longer than the MTU of the way has become: lower --mtu, or raise the interface's",
        ),
        (
            "sent_refused",
            "by the kernel: look at the route, the link and the firewall",
        ),
    ];
    said.iter().find_map(|(name, why)| {
        count(name).map(|n| {
            let n = crate::units::grouped(n);
            format!("{n} packets were refused here ({name}), {why}")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_refused_is_said_with_its_remedy() {
        let of = |name: &str, n| refused(&Counters::from([(name.to_owned(), n)]));
        assert_eq!(of("sent_too_long", 0), None);
        assert_eq!(of("icrc_errors", 7), None);
        let text = of("sent_too_long", 1234).unwrap();
        assert!(
            text.starts_with("1,234 packets were refused here (sent_too_long)"),
            "{text}"
        );
        assert!(text.contains("lower --mtu"), "{text}");
        assert!(of("sent_refused", 1).unwrap().contains("firewall"));
    }

    #[test]
    fn names_of_another_process_are_names() {
        assert!(is_name("tx_packets") && TRAFFIC.iter().all(|name| is_name(name)));
        for odd in ["", "a b", "\u{1b}[2J", "x\n", &"x".repeat(65)] {
            assert!(!is_name(odd), "{odd:?}");
        }
    }

    #[test]
    fn only_what_was_amiss_is_named() {
        let of = |list: &[(&str, u64)]| -> Counters {
            list.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect()
        };
        let quiet = of(&[("sent_packets", 9), ("duplicate_request", 0)]);
        assert_eq!(line(&quiet), None);
        let loud = of(&[
            ("sent_packets", 12),
            ("duplicate_request", 2),
            ("out_of_sequence", 1),
        ]);
        assert_eq!(
            line(&loud).as_deref(),
            Some("duplicate_request 2, out_of_sequence 1")
        );
        assert_eq!(since(&loud, &quiet)["sent_packets"], 3);
        assert_eq!(since(&loud, &quiet)["out_of_sequence"], 1);
    }
}
