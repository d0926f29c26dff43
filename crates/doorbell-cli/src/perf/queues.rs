//! Queue pairs of a case: made, connected over its link, exported to its kernel.

use anyhow::Result;
use doorbell::{
    CqKind, Endpoint, Export, ExportLayout, LinkKind, Qp, Reset, connect_pair, export_array,
};

use super::bench::Bench;
use super::far::{Order, Over};
use super::pipe::Partner;
use super::plan::Case;
use crate::args::{CqMode, Handler, Link, Test};

/// The handler in the host library's words.
fn handler(handler: Handler) -> doorbell::Handler {
    match handler {
        Handler::Record => doorbell::Handler::Record,
        Handler::Doorbell => doorbell::Handler::Only,
        Handler::Producer => doorbell::Handler::Producer,
    }
}

/// Queue pairs that are not connected yet.
pub(crate) fn build(bench: &Bench, case: &Case, count: u32) -> Result<Vec<Qp<Reset>>> {
    let cq = match case.cq {
        CqMode::PerSlot => CqKind::PerSlot,
        CqMode::Collapsed => CqKind::Collapsed,
    };
    let builder = bench
        .pd
        .qp()
        .receive_queue(receives(case))
        .depth(case.depth)
        .cq(cq)
        .handler(handler(case.handler));
    Ok((0..count)
        .map(|_| builder.clone().build())
        .collect::<Result<_, _>>()?)
}

/// `count` queue pairs, connected to themselves (their requests act on this process's regions) or
/// to as many in the peer process.
pub(crate) fn make(
    bench: &Bench,
    case: &Case,
    count: u32,
    partner: Option<&mut Partner>,
) -> Result<Vec<Qp>> {
    let qps = build(bench, case, count)?;
    match partner {
        None => Ok(qps
            .into_iter()
            .map(Qp::connect_to_self)
            .collect::<Result<_, _>>()?),
        Some(partner) => {
            let shm = match case.link {
                Link::Shm => Some(partner.session(&bench.device)?),
                _ => None,
            };
            let (kind, over) = match &shm {
                Some((_, session)) => (LinkKind::Shm, Over::Shm(*session)),
                None if case.link == Link::Verbs => (LinkKind::Verbs, Over::Verbs),
                None => (LinkKind::Roce, Over::Roce),
            };
            let endpoints = qps
                .iter()
                .map(|qp| Ok(qp.endpoint(kind, &[])?.to_bytes()))
                .collect::<Result<_>>()?;
            let order = Order::Connect {
                over,
                depth: case.depth,
                receives: receives(case),
                endpoints,
            };
            let theirs: Vec<Vec<u8>> = partner.ask("connect its queue pairs", &order)?;
            anyhow::ensure!(
                theirs.len() == qps.len(),
                "the peer made {} queue pairs for {}",
                theirs.len(),
                qps.len()
            );
            qps.into_iter()
                .zip(theirs)
                .map(|(qp, bytes)| {
                    let endpoint = Endpoint::from_bytes(&bytes)?;
                    let to = match &shm {
                        Some((peer, _)) => peer.destination(&endpoint)?,
                        None => bench.device.destination(&endpoint)?,
                    };
                    Ok(qp.connect(&to)?)
                })
                .collect()
        }
    }
}

/// Receives of each queue pair of a case.
fn receives(case: &Case) -> u32 {
    match case.test {
        Test::SendBw | Test::SendLat => super::messages::RECEIVES,
        _ => 0,
    }
}

/// A queue pair for messages to the peer process; or two, connected to each other.
pub(crate) fn messages(
    bench: &Bench,
    case: &Case,
    partner: Option<&mut Partner>,
) -> Result<Vec<Qp>> {
    if partner.is_some() {
        return make(bench, case, 1, partner);
    }
    let mut two = build(bench, case, 2)?;
    match (two.pop(), two.pop()) {
        (Some(b), Some(a)) => {
            let (a, b) = connect_pair(a, b)?;
            Ok(vec![a, b])
        }
        _ => anyhow::bail!("two queue pairs were to be made"),
    }
}

/// The table of handles that a kernel takes.
pub(crate) fn export(qps: &[Qp]) -> Result<Export> {
    let all: Vec<&Qp> = qps.iter().collect();
    Ok(export_array(&all, ExportLayout::Spread)?)
}
