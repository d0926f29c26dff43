//! Queue pairs of a case: made, connected over its link, exported to its kernel.

use anyhow::Result;
use doorbell::{CqKind, Endpoint, Export, ExportLayout, LinkKind, Qp, Reset, export_array};

use super::bench::Bench;
use super::far::{Order, Over};
use super::pipe::Partner;
use super::plan::Case;
use crate::args::{CqMode, Handler, Link};

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
                None => (LinkKind::Roce, Over::Roce),
            };
            let endpoints = qps
                .iter()
                .map(|qp| Ok(qp.endpoint(kind, &[])?.to_bytes()))
                .collect::<Result<_>>()?;
            let order = Order::Connect {
                over,
                depth: case.depth,
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

/// The table of handles that a kernel takes.
pub(crate) fn export(qps: &[Qp]) -> Result<Export> {
    let all: Vec<&Qp> = qps.iter().collect();
    Ok(export_array(&all, ExportLayout::Spread)?)
}
