//! What an explanation runs on: two queue pairs of one process, connected, each with memory in a protection domain of its own.
//!
//! Nobody executes the queues by himself here: the engine is run by [`Lab::execute`], one round at a time, so that what a
//! thread wrote can be looked at before anything happens to it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use doorbell::cpu::{self, CpuQueue, Post, Ticket};
use doorbell::{
    Access, Addressing, AsyncError, CpuQp, Device, GpuSelect, Handler, Mr, Pd, Place, Qp,
    connect_pair,
};
use doorbell_device::{Error as DeviceError, Fetch, Local, Received};
use doorbell_wire::{Key, Remote};

use super::checks::{Queue, Region};
use crate::args::{Bad, Operation};

/// Nothing here takes longer, on however slow a machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a thread waits for under a fault: much longer than anything takes that does come.
const SHORT: Duration = Duration::from_millis(200);
/// Bytes of a region, and the addresses that were chosen for them: short ones, to be read.
const LEN: usize = 4096;
const SOURCE: u64 = 0x1_0000;
const TARGET: u64 = 0x2_0000;
const LOCKED: u64 = 0x3_0000;
/// Where in the regions the operation acts.
const FROM: u64 = 0x40;
const TO: u64 = 0x100;
/// The word that signals and atomics add to.
const WORD: u64 = 0x200;
/// Where old values go.
const OLD: u64 = 0x300;
/// What is sent, and what `get` finds.
pub(super) const MESSAGE: &[u8] = b"a GPU thread rang this doorbell";
pub(super) const FOUND: &[u8] = b"what the other side left there.";
/// What the word holds at first, and what is added.
pub(super) const WAS: u64 = 40;
pub(super) const ADD: u64 = 2;

/// One side: where it lies and what it may be used for.
pub(super) struct Lab {
    pub(super) device: Device,
    pub(super) near: Qp,
    pub(super) far: Qp,
    pub(super) source: Mr,
    pub(super) target: Mr,
    /// A region of the target that grants its peers nothing.
    locked: Mr,
    /// Slots executed since the last reset.
    pub(super) at: u64,
    /// Faults are played: what does not come is waited for so long, and its not coming is shown.
    short: Option<Duration>,
    /// The receive that the target has posted and no message has taken.
    waiting: Option<Ticket>,
}

/// What was posted, and how it ended.
pub(super) struct Acted {
    pub(super) first: u64,
    pub(super) wqes: Vec<[u8; 64]>,
    pub(super) record: [u8; 4],
    pub(super) doorbell: [u8; 8],
    pub(super) queue: Queue,
    pub(super) cqe_before: [u8; 64],
    pub(super) cqe: [u8; 64],
    pub(super) ticket: Ticket,
    pub(super) outcome: Result<(), DeviceError>,
    /// What the target's receive got, and its CQE.
    pub(super) received: Option<(Received, [u8; 64])>,
}

/// Bytes of the receive that the target posts for a SEND.
const RECEIVE: u32 = 64;

impl Lab {
    pub(super) fn open() -> Result<Self> {
        // What is shown is how it goes, whatever the environment asks for.
        Self::with("none", None)
    }

    /// The same with a fault script.
    pub(super) fn with_fault(script: &str) -> Result<Self> {
        Self::with(script, Some(SHORT))
    }

    fn with(script: &str, short: Option<Duration>) -> Result<Self> {
        let device = Device::builder()
            .gpu(GpuSelect::Host)
            .caller_driven()
            .handler(Handler::Record)
            .fault(script)
            .open()?;
        let (here, there) = (device.pd()?, device.pd()?);
        let region = |pd: &Pd, base, access| -> Result<Mr> {
            let memory = device.alloc(Place::Host, LEN)?;
            Ok(pd.register_with(&memory, access, Addressing::At(base))?)
        };
        let source = region(&here, SOURCE, Access::LOCAL_WRITE)?;
        let target = region(&there, TARGET, Access::ALL)?;
        let locked = region(&there, LOCKED, Access::LOCAL_WRITE)?;
        let near = here.qp().depth(64).build()?;
        let far = there.qp().depth(64).receive_queue(8).build()?;
        let (near, far) = connect_pair(near, far)?;
        let lab = Self {
            device,
            near,
            far,
            source,
            target,
            locked,
            at: 0,
            short,
            waiting: None,
        };
        lab.source.write(FROM as usize, MESSAGE)?;
        lab.target.write(WORD as usize, &WAS.to_ne_bytes())?;
        Ok(lab)
    }

    /// Every region that a key could name.
    pub(super) fn regions(&self) -> Vec<Region> {
        let all = [
            ("source", &self.source),
            ("target", &self.target),
            ("locked", &self.locked),
        ];
        all.map(|(name, mr)| Region {
            name,
            key: mr.key(),
            base: mr.addr(),
            len: mr.len() as u64,
            access: mr.access(),
            pd: mr.pd().number(),
        })
        .to_vec()
    }

    /// Bytes at the place of the target that `operation` changes, or, of a `get`, of the source.
    pub(super) fn changed(&self, operation: Operation) -> Result<Vec<u8>> {
        let (mr, at, len) = match operation {
            Operation::Put | Operation::Send => (&self.target, TO, MESSAGE.len()),
            Operation::Get => (&self.source, OLD, FOUND.len()),
            Operation::Signal | Operation::Atomic => (&self.target, WORD, 8),
        };
        let mut bytes = vec![0; len];
        mr.read(at as usize, &mut bytes)?;
        Ok(bytes)
    }

    /// Wipes what the first run left, so that a change would be seen.
    pub(super) fn clear(&self) -> Result<()> {
        self.target.write(TO as usize, &vec![0; MESSAGE.len()])?;
        Ok(self.source.write(OLD as usize, &vec![0; FOUND.len()])?)
    }

    /// The old value that an atomic brought back.
    pub(super) fn old(&self) -> Result<u64> {
        let mut old = [0; 8];
        self.source.read(OLD as usize, &mut old)?;
        Ok(u64::from_ne_bytes(old))
    }

    /// Posts the operation from one thread of the host GPU, looks at what it wrote, lets the engine execute it, and waits.
    pub(super) fn act(&mut self, operation: Operation, bad: Option<Bad>) -> Result<Acted> {
        if operation == Operation::Get {
            self.target.write(TO as usize, FOUND)?;
        }
        let mut target = CpuQp::new(&self.far)?;
        let (_, receives) = target.queues()?;
        if operation == Operation::Send && self.waiting.is_none() {
            let memory = Local {
                addr: TARGET + TO,
                key: Key(self.target.key()),
                len: u64::from(RECEIVE),
            };
            let posted = receives.recv_post(memory, cpu::deadline(PATIENCE));
            self.waiting = Some(posted.map_err(|e| anyhow!("posting the receive: {e}"))?);
        }
        let mut cpu = CpuQp::new(&self.near)?;
        let queue = cpu
            .queue()?
            .with_sink(SOURCE + OLD, self.lkey(bad == Some(Bad::Lkey)));
        let cqe_before = self.near.cq().peek(0)?;
        let seen = self.at;
        let ticket = match self.post(&queue, operation, bad) {
            Ok(ticket) => ticket,
            Err(error) => bail!("posting: {error}"),
        };
        let wqes = (seen..=ticket.0)
            .map(|at| Ok(self.near.peek_wqe(at)?))
            .collect::<Result<Vec<_>>>()?;
        let (record, doorbell) = (self.near.peek_record()?, self.near.peek_doorbell()?);
        let patience = self.short.unwrap_or(PATIENCE);
        let until = Instant::now() + patience;
        let cqe = loop {
            self.device.poll();
            let cqe = self.near.cq().peek(0)?;
            if cqe != cqe_before {
                break cqe;
            }
            if Instant::now() > until {
                if self.short.is_some() {
                    break cqe;
                }
                bail!(
                    "the engine wrote no CQE within {PATIENCE:?}: this is a bug, please report it"
                );
            }
        };
        let outcome = queue.wait(ticket, cpu::deadline(patience));
        self.at = ticket.0 + 1;
        let receive = self.waiting.map(|_| doorbell_wire::Local {
            addr: TARGET + TO,
            key: Key(self.target.key()),
            len: RECEIVE,
        });
        let mut received = None;
        if let Some(waiting) = self.waiting {
            let got = receives.recv_poll(waiting);
            received = match got {
                // A fault may have taken the engine of both.
                Err(_) if self.short.is_some() => None,
                Err(e) => bail!("the target's receive: {e}"),
                Ok(Some(got)) => {
                    self.waiting = None;
                    let cq = self.far.recv_cq().context("the target has a receive CQ")?;
                    Some((got, cq.peek(waiting.0 as u32)?))
                }
                Ok(None) => None,
            };
        }
        Ok(Acted {
            received,
            first: seen,
            wqes,
            record,
            doorbell,
            queue: Queue {
                qpn: self.near.qpn(),
                depth: self.near.depth(),
                pd: self.near.pd().number(),
                far_pd: self.far.pd().number(),
                seen,
                receive,
            },
            cqe_before,
            cqe,
            ticket,
            outcome,
        })
    }

    fn lkey(&self, bad: bool) -> Key {
        wrong(self.source.key(), bad)
    }

    /// Whether another post is refused, and with which words.
    pub(super) fn refusal(&self) -> Result<Option<DeviceError>> {
        let mut cpu = CpuQp::new(&self.near)?;
        let queue = cpu.queue()?;
        Ok(self.post(&queue, Operation::Put, None).err())
    }

    fn post(
        &self,
        queue: &CpuQueue<'_>,
        operation: Operation,
        bad: Option<Bad>,
    ) -> Result<Ticket, DeviceError> {
        let how = Post::by(cpu::deadline(PATIENCE));
        let there = |at: u64, len: u64| {
            let (region, at) = match bad {
                Some(Bad::Access) => (&self.locked, at),
                // Its last byte, or word, lies behind the end.
                Some(Bad::Range) => (&self.target, LEN as u64 - len / 16 * 8),
                _ => (&self.target, at),
            };
            Remote {
                addr: region.addr() + at,
                key: wrong(region.key(), bad == Some(Bad::Rkey)),
            }
        };
        let lkey = self.lkey(bad == Some(Bad::Lkey));
        let here = |at: u64, len: usize| Local {
            addr: SOURCE + at,
            key: lkey,
            len: len as u64,
        };
        let old = Fetch {
            addr: SOURCE + OLD,
            key: lkey,
        };
        let len = MESSAGE.len();
        match operation {
            Operation::Put => queue.put(there(TO, len as u64), here(FROM, len), how),
            Operation::Get => queue.get(there(TO, len as u64), here(OLD, len), how),
            Operation::Signal => {
                let good = Remote {
                    addr: TARGET + TO,
                    key: Key(self.target.key()),
                };
                let source = Local {
                    addr: SOURCE + FROM,
                    key: Key(self.source.key()),
                    len: len as u64,
                };
                queue.put_signal(good, source, there(WORD, 8), ADD, how)
            }
            Operation::Send => queue.send(here(FROM, len), how),
            Operation::Atomic => queue.fetch_add(there(WORD, 8), ADD, old, how),
        }
    }

    /// The device's next asynchronous error, if one is there.
    pub(super) fn next_error(&self) -> Option<AsyncError> {
        self.device.next_error(Duration::ZERO)
    }

    /// Resets the queue pair and connects it to the target again.
    pub(super) fn again(mut self) -> Result<Self> {
        let far = doorbell::Destination::Loopback {
            qpn: self.far.qpn(),
        };
        self.near = self.near.reset(PATIENCE)?.connect(&far)?;
        self.at = 0;
        Ok(self)
    }
}

/// A key that the table never gave out, if `yes`: that of a region with one bit changed.
fn wrong(key: u32, yes: bool) -> Key {
    Key(if yes { key ^ 1 << 31 } else { key })
}
