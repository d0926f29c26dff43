//! What exists: devices, regions, queues, by number, behind one lock.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use doorbell_verbs::abi::*;

use crate::{Config, Counts};

/// Everything.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) devices: BTreeMap<u32, Device>,
    pub(crate) regions: HashMap<u32, Region>,
    pub(crate) qps: HashMap<u32, Queue>,
    pub(crate) cqs: HashMap<u32, Completions>,
    /// Address handles of EFA devices.
    pub(crate) addresses: HashMap<u32, Address>,
    next: u32,
}

/// A device.
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) config: Config,
    pub(crate) listed: bool,
    pub(crate) removed: bool,
    pub(crate) counts: Counts,
    pub(crate) refuse_post: Option<(u64, i32)>,
    pub(crate) fail_request: Option<(u64, u32, u32)>,
    pub(crate) refuse_memory: Option<i32>,
    pub(crate) refuse_rtr: Option<i32>,
    pub(crate) reverse: bool,
    pub(crate) lose: bool,
    pub(crate) stall: bool,
    pub(crate) down_after: Option<u32>,
    pub(crate) events: VecDeque<(u32, usize)>,
    /// What is drawn next.
    pub(crate) random: u64,
}

/// An address handle: of which device, and for which port.
pub(crate) struct Address {
    pub(crate) device: u32,
    pub(crate) gid: Gid,
}

impl Device {
    /// The failure that a test wants of the request of that number; only once.
    pub(crate) fn planned(&mut self, number: u64) -> Option<(u32, u32)> {
        let planned = self.fail_request.take_if(|(n, ..)| *n == number);
        planned.map(|(_, status, vendor)| (status, vendor))
    }

    /// Whether the port is up, to who asks now.
    pub(crate) fn is_active(&mut self) -> bool {
        match &mut self.down_after {
            Some(0) => (self.config.active, self.down_after) = (false, None),
            Some(times) => *times -= 1,
            None => {}
        }
        self.config.active
    }

    pub(crate) fn remove(&mut self) {
        self.removed = true;
        self.raise(event_type::DEVICE_FATAL, 0);
    }

    pub(crate) fn raise(&mut self, event: u32, element: usize) {
        self.events.push_back((event, element));
    }
}

/// A memory region.
pub(crate) struct Region {
    pub(crate) device: u32,
    pub(crate) pd: u32,
    /// Where it is in this process.
    pub(crate) at: u64,
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
    /// Its memory, if it is a dma-buf's.
    pub(crate) _mapped: Option<Mapped>,
}

/// A mapping of the mock's own, which goes with its region.
pub(crate) struct Mapped {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped for the region, which is gone: nothing finds the address any more.
        unsafe { libc::munmap(core::ptr::with_exposed_provenance_mut(self.at), self.len) };
    }
}

/// A request that was posted.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) id: u64,
    /// Its number on the device.
    pub(crate) number: u64,
    pub(crate) flags: u32,
    pub(crate) opcode: u32,
    pub(crate) imm: u32,
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
    pub(crate) operands: [u64; 2],
    pub(crate) pieces: Vec<Sge>,
    pub(crate) inline: Option<Vec<u8>>,
    /// Address handle, queue pair and its key, of a request that names its peer.
    pub(crate) to: Option<(u32, u32, u32)>,
    /// Not as the device wants it.
    pub(crate) broken: bool,
    /// Looks at a peer without a receive.
    pub(crate) looks: u32,
}

/// A receive that was posted.
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) pieces: Vec<Sge>,
}

/// A queue pair.
pub(crate) struct Queue {
    pub(crate) device: u32,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) cap: QpCap,
    pub(crate) state: u32,
    pub(crate) access: u32,
    pub(crate) dest: u32,
    pub(crate) path: Path,
    /// Requests not carried out yet.
    pub(crate) sends: VecDeque<Request>,
    /// Requests whose place in the queue no completion has given back yet.
    pub(crate) held: u64,
    /// Of those, how many the next signalled completion gives back.
    pub(crate) unsignalled: u64,
    pub(crate) receives: VecDeque<Receive>,
    /// It is an SRD queue pair, with this key.
    pub(crate) srd: bool,
    pub(crate) qkey: u32,
    /// Outcomes that are not told yet.
    pub(crate) finished: Vec<Wc>,
    /// Address of its `RawQp`.
    pub(crate) handle: usize,
    /// Requests that are being built by calls.
    pub(crate) building: Vec<Request>,
}

/// What a queue pair was told of the way to its peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// Code of the path MTU: 256 bytes are 1, each next is twice as many.
    pub mtu: u32,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
}

/// A completion queue.
pub(crate) struct Completions {
    pub(crate) entries: u32,
    pub(crate) ready: VecDeque<(Wc, u64)>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// The lock on everything.
pub(crate) struct Guard(MutexGuard<'static, Option<World>>);

impl core::ops::Deref for Guard {
    type Target = World;
    fn deref(&self) -> &World {
        self.0.as_ref().expect("made by `world`")
    }
}

impl core::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().expect("made by `world`")
    }
}

pub(crate) fn world() -> Guard {
    let mut guard = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(World::default);
    Guard(guard)
}

impl World {
    pub(crate) fn add(&mut self, id: u32, name: &str, config: Config) {
        let device = Device {
            name: name.to_owned(),
            config,
            listed: true,
            removed: false,
            counts: Counts::default(),
            refuse_post: None,
            fail_request: None,
            refuse_memory: None,
            refuse_rtr: None,
            reverse: false,
            lose: false,
            stall: false,
            down_after: None,
            events: VecDeque::new(),
            // Never zero, which would stay zero.
            random: config.srd.map_or(0, |s| s.seed).wrapping_mul(2) + 1,
        };
        self.devices.insert(id, device);
    }

    /// A number that nothing has had: keys and queue pair numbers.
    pub(crate) fn number(&mut self) -> u32 {
        self.next += 1;
        self.next + 0x100
    }

    pub(crate) fn owned(&self, device: u32) -> (u64, u64) {
        let regions = self.regions.values().filter(|r| r.device == device).count();
        let qps = self.qps.values().filter(|q| q.device == device).count();
        (regions as u64, qps as u64)
    }

    /// Nothing is under way on a queue pair any more.
    pub(crate) fn empty(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return;
        };
        qp.sends.clear();
        qp.receives.clear();
        qp.finished.clear();
        (qp.held, qp.unsignalled) = (0, 0);
        for cq in [qp.send_cq, qp.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(&cq) {
                cq.ready.retain(|(wc, _)| wc.qp_num != qpn);
            }
        }
    }

    pub(crate) fn handle_of(&self, qpn: u32) -> usize {
        self.qps.get(&qpn).map_or(0, |q| q.handle)
    }

    /// Where a range of a key is in this process.
    pub(crate) fn find(
        &self,
        device: u32,
        pd: u32,
        key: u32,
        addr: u64,
        len: u64,
        need: u32,
    ) -> Option<u64> {
        let region = self.regions.get(&key)?;
        let offset = addr.wrapping_sub(region.base);
        let inside = len <= region.len && offset <= region.len - len;
        let fits = region.device == device && region.pd == pd && region.access & need == need;
        (inside && fits).then(|| region.at + offset)
    }
}
