//! The queue pairs of a context object: how they are made, told to the other ranks, connected and ended.

use std::sync::Arc;

use doorbell::{AnyQp, CqKind, Destination, Endpoint};

use crate::comm::Comm;
use crate::{Error, Result, log};

/// What queue pairs there are to be.
pub(crate) struct Shape {
    pub(crate) contexts: usize,
    /// With a companion each.
    pub(crate) companions: bool,
    pub(crate) depth: u32,
    pub(crate) cq: CqKind,
}

/// Queue pairs by context, then rank; their watch knows them. They end when dropped.
pub(crate) struct Qps {
    pub(crate) main: Vec<AnyQp>,
    pub(crate) companions: Vec<AnyQp>,
    comm: Arc<Comm>,
}

impl Qps {
    pub(crate) fn build(comm: &Arc<Comm>, shape: &Shape) -> Result<Self> {
        let mut qps = Self {
            main: Vec::new(),
            companions: Vec::new(),
            comm: Arc::clone(comm),
        };
        let cores = comm
            .node
            .device
            .soft()
            .map(|soft| soft.hca().health().len());
        for context in 0..shape.contexts {
            for rank in 0..comm.ranks {
                // A companion waits for the main queue's CQ, which is cheapest on the same core.
                let builder = || {
                    let plain = comm.pd.qp().depth(shape.depth).cq(shape.cq);
                    let plain = plain.handler(comm.settings.handler);
                    match cores {
                        Some(cores) => plain.core(core_of(context, rank, cores)),
                        None => plain,
                    }
                };
                let main = AnyQp::from(builder().build()?);
                comm.node.watch.add_qp(&comm.health, rank, &main);
                qps.main.push(main);
                if shape.companions {
                    let companion = AnyQp::from(builder().build()?);
                    comm.node.watch.add_qp(&comm.health, comm.rank, &companion);
                    qps.companions.push(companion);
                }
            }
        }
        Ok(qps)
    }

    /// For each rank: this rank's queue pairs to it, one a context.
    pub(crate) fn endpoints(&self) -> Result<Vec<Vec<u8>>> {
        let ranks = self.comm.ranks;
        (0..ranks)
            .map(|rank| {
                let mut bytes = Vec::new();
                for qp in self.main.iter().skip(rank).step_by(ranks) {
                    let one = self.comm.endpoint(rank, qp)?.to_bytes();
                    bytes.extend_from_slice(&(one.len() as u32).to_le_bytes());
                    bytes.extend_from_slice(&one);
                }
                Ok(bytes)
            })
            .collect()
    }

    /// Connects each to what its peer showed.
    pub(crate) fn connect(&self, theirs: &[Vec<u8>]) -> Result<()> {
        let ranks = self.comm.ranks;
        for (rank, bytes) in theirs.iter().enumerate() {
            let mut rest = &bytes[..];
            for qp in self.main.iter().skip(rank).step_by(ranks) {
                let endpoint = split(&mut rest).ok_or_else(|| Error::Peer {
                    step: "createContext",
                    rank,
                    reason: "it has another number of contexts".to_owned(),
                })?;
                let endpoint = Endpoint::from_bytes(endpoint).map_err(doorbell::Error::from)?;
                qp.connect(&self.comm.destination(rank, &endpoint)?)?;
            }
            if !rest.is_empty() {
                return Err(Error::Peer {
                    step: "createContext",
                    rank,
                    reason: "it has more contexts".to_owned(),
                });
            }
        }
        for qp in &self.companions {
            qp.connect(&Destination::Loopback { qpn: qp.qpn() })?;
        }
        Ok(())
    }

    fn end(&self) {
        let all = self.companions.iter().chain(&self.main);
        let early: u64 = all.map(|qp| qp.counters().stale_reads).sum();
        if early > 0 {
            // The posters' fence is one for the GPU alone: that it orders what the host sees is the hardware's doing, and was so far.
            log::info(format_args!(
                "rank {}: {early} time(s) a request was rung before it could be read, and was looked for again",
                self.comm.rank
            ));
        }
        let time = self.comm.node.device.settings().quiesce;
        for qp in self.companions.iter().chain(&self.main) {
            self.comm.node.watch.remove_qp(qp.qpn());
            if let Err(error) = qp.destroy(time) {
                log::warn(format_args!("QP {:#08x} stays: {error}", qp.qpn()));
            }
        }
    }
}

impl Drop for Qps {
    fn drop(&mut self) {
        self.end();
    }
}

/// The engine core of a queue pair. Contexts towards one rank are spread, and so are the ranks of one context: cores that took queue pairs in the order in
/// which they are made would, two of them for two ranks, have one rank each, and a rank that talks to the other would have one core for all.
fn core_of(context: usize, rank: usize, cores: usize) -> usize {
    (context + rank) % cores.max(1)
}

/// The next length and so many bytes.
fn split<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, tail) = rest.split_first_chunk::<4>()?;
    let (one, tail) = tail.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    *rest = tail;
    Some(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_core_has_its_part_of_what_goes_to_one_rank_and_of_one_context() {
        for (cores, ranks, contexts) in [(1, 2, 16), (2, 2, 16), (2, 1, 2), (3, 8, 6), (4, 4, 4)] {
            let share = |all: &mut dyn Iterator<Item = usize>| {
                let mut count = vec![0usize; cores];
                all.for_each(|core| count[core] += 1);
                count.iter().max().unwrap() - count.iter().min().unwrap()
            };
            for rank in 0..ranks {
                assert!(share(&mut (0..contexts).map(|c| core_of(c, rank, cores))) <= 1);
            }
            for context in 0..contexts {
                assert!(share(&mut (0..ranks).map(|r| core_of(context, r, cores))) <= 1);
            }
        }
    }
}
