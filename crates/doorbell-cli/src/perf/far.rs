//! The far side of a case: target memory in this process (loopback) or in a peer process (shm, roce).
//!
//! Both do the same four things: make windows, fill them, compare them, and account for CPU time.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::bench::Bench;
use super::check::{Picture, Verdict};
use super::pipe::Partner;
use super::side::{Reach, Side, SideSpec};
use crate::cputime::{CpuClock, CpuUse};

/// What a peer process can be told to do. Each has one answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Make windows: answered with a [`Reach`].
    Side(SideSpec),
    /// Connect to a listener of the initiator, as this session.
    Dial { session: u32, address: String },
    /// Make and connect queue pairs to those that the bytes describe: answered with their own.
    Connect {
        over: Over,
        depth: u32,
        /// Receives of each; 0: no receive queue.
        receives: u32,
        endpoints: Vec<Vec<u8>>,
    },
    /// Fill the windows.
    Paint(Picture),
    /// Compare the windows: answered with a [`Verdict`].
    Verify(Picture),
    /// Flip the first window's first byte.
    Sabotage,
    /// Read from the windows: answered with the bytes.
    Read { offset: u64, len: u64 },
    /// Start counting CPU time.
    ClockStart,
    /// Stop: answered with CPU and wall nanoseconds.
    ClockStop,
    /// Make the second end of a ping-pong: answered with a [`Reach`].
    End(super::end::EndSpec),
    /// Play the second end of a ping-pong.
    Play(Box<super::latency::PlayOrder>),
    /// Wait for its end: answered with its [`super::end::Faults`].
    Played,
    /// Receive messages into the windows, and answer them.
    Echo(super::messages::EchoOrder),
    /// Wait for its end.
    Echoed,
    /// Answered with the UUID of the GPU that it uses, if that is one.
    Gpu,
    /// Forget windows and queue pairs.
    Clear,
    /// Answered with what RoCE connections and ports have counted since the queue pairs were made, by name.
    Counters,
    /// This was all; `well` says whether the initiator is content.
    Goodbye { well: bool },
}

/// Over which link queue pairs are connected.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Over {
    /// Shared memory, in this session.
    Shm(u32),
    /// Packets.
    Roce,
    /// An RDMA device.
    Verbs,
}

/// Target memory.
pub(crate) enum Far<'a> {
    Here(Side),
    /// Where it is, and its bytes.
    There(Reach, u64, &'a mut Partner),
}

impl<'a> Far<'a> {
    pub(crate) fn new(
        bench: &Bench,
        partner: Option<&'a mut Partner>,
        spec: &SideSpec,
    ) -> Result<Self> {
        Ok(match partner {
            None => Self::Here(Side::new(&bench.pd, &bench.device, spec)?),
            Some(partner) => {
                let reach: Reach = partner.ask("make its memory", &Order::Side(*spec))?;
                let total = spec.layout.total();
                Self::There(reach.of(total)?, total, partner)
            }
        })
    }

    pub(crate) fn reach(&self) -> Reach {
        match self {
            Self::Here(side) => side.reach(),
            Self::There(reach, ..) => *reach,
        }
    }

    pub(crate) fn paint(&mut self, picture: &Picture) -> Result<()> {
        match self {
            Self::Here(side) => side.paint(picture),
            Self::There(.., partner) => partner.ask("fill its memory", &Order::Paint(*picture)),
        }
    }

    pub(crate) fn verify(&mut self, picture: &Picture) -> Result<Verdict> {
        match self {
            Self::Here(side) => side.verify(picture),
            Self::There(_, total, partner) => {
                let verdict: Verdict =
                    partner.ask("compare its memory", &Order::Verify(*picture))?;
                whole(verdict.bytes, *total)?;
                Ok(verdict)
            }
        }
    }

    /// Flips a byte, so that comparing must find it.
    pub(crate) fn sabotage(&mut self) -> Result<()> {
        match self {
            Self::Here(side) => side.sabotage(),
            Self::There(.., partner) => partner.ask("flip a byte", &Order::Sabotage),
        }
    }

    pub(crate) fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>> {
        match self {
            Self::Here(side) => side.read(offset, len),
            Self::There(.., partner) => {
                let bytes: Vec<u8> =
                    partner.ask("read its memory", &Order::Read { offset, len })?;
                ensure!(
                    bytes.len() as u64 == len,
                    "the second process answered {} bytes of its memory where {len} were asked for",
                    bytes.len()
                );
                Ok(bytes)
            }
        }
    }

    pub(crate) fn partner(&mut self) -> Option<&mut Partner> {
        match self {
            Self::Here(_) => None,
            Self::There(.., partner) => Some(partner),
        }
    }
}

/// What the second process says that it compared has to be all of it.
pub(crate) fn whole(compared: u64, total: u64) -> Result<()> {
    ensure!(
        compared == total,
        "the second process compared {compared} bytes of its memory, which has {total}"
    );
    Ok(())
}

/// CPU time of both processes over a stretch of a run.
pub(crate) struct Meter {
    clock: CpuClock,
}

impl Meter {
    pub(crate) fn start(partner: Option<&mut Partner>) -> Result<Self> {
        if let Some(partner) = partner {
            let () = partner.ask("count its CPU time", &Order::ClockStart)?;
        }
        Ok(Self {
            clock: CpuClock::start(),
        })
    }

    /// Adds the stretch to `total`.
    pub(crate) fn stop(self, partner: Option<&mut Partner>, total: &mut CpuUse) -> Result<()> {
        let (mut cpu, wall) = self.clock.elapsed();
        if let Some(partner) = partner {
            let theirs: u64 = partner.ask("say its CPU time", &Order::ClockStop)?;
            cpu += Duration::from_nanos(theirs);
        }
        total.add((cpu, wall));
        Ok(())
    }
}
