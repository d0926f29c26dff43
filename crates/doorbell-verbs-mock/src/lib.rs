//! An RDMA device that is only memory: it executes verbs between queue pairs of this process, and does what no real device does on demand.
//!
//! [`Mock::new`] makes a device with a name of its own; [`Mock::verbs`] is the library that lists it. Both ways to post are there (see
//! [`Config::calls`]). Faults are injected with the [`Mock`]'s methods: partial post failures, completions out of order, missing ones, with
//! vendor errors, a device that is removed.
//!
//! [`Config::srd`] makes it an EFA device, with queue pairs of that kind. Otherwise semantics are those of RC: messages in order, keys with bounds and rights, receives consumed in order, RNR with a bounded number of
//! looks, a queue pair in error flushes. Everything happens in `post` and `poll` calls; there are no threads. The mock finds its objects by
//! number, so a handle that was destroyed is found out instead of followed.

mod calls;
mod efa;
mod exec;
mod memory;
mod post;
mod world;

use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_verbs::{Api, Verbs};

pub use efa::Srd;
pub use world::Path;

use world::{World, world};

/// What the device is like.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// It has the calls of `ibv_wr_*`.
    pub calls: bool,
    /// Bytes of inline data.
    pub inline: u32,
    /// Work requests of a queue.
    pub max_work: u32,
    /// Pieces of a request.
    pub max_sge: u32,
    /// Bytes of a message.
    pub max_message: u32,
    /// It has atomics.
    pub atomics: bool,
    /// It registers dma-bufs.
    pub dmabuf: bool,
    /// Looks at a peer without a receive before it gives up; `None`: for ever.
    pub rnr_looks: Option<u32>,
    /// Its port is InfiniBand: LIDs instead of IP addresses.
    pub infiniband: bool,
    /// It speaks iWARP.
    pub iwarp: bool,
    /// Opening it fails with this `errno`; 0: it opens.
    pub refuse_open: i32,
    /// Its port is up.
    pub active: bool,
    /// It moves no bytes and completes at once: for counting what its user costs.
    pub hollow: bool,
    /// It is an EFA device: SRD instead of RC.
    pub srd: Option<Srd>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            calls: true,
            inline: 256,
            max_work: 1024,
            max_sge: 16,
            max_message: 1 << 30,
            atomics: true,
            dmabuf: true,
            rnr_looks: None,
            infiniband: false,
            iwarp: false,
            refuse_open: 0,
            active: true,
            hollow: false,
            srd: None,
        }
    }
}

/// A device. It leaves the list of devices when this is dropped.
#[derive(Debug)]
pub struct Mock {
    name: String,
    id: u32,
}

/// What the device counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls that post sends.
    pub posts: u64,
    /// Requests posted.
    pub requests: u64,
    /// Those that were signalled.
    pub signalled: u64,
    /// Those that were inline.
    pub inline: u64,
    /// Those that were fenced.
    pub fenced: u64,
    /// Most that were under way on one queue pair.
    pub deepest: u64,
    /// Pieces of memory in the receives that were posted.
    pub receive_pieces: u64,
    /// Regions registered now.
    pub regions: u64,
    /// Queue pairs that exist now.
    pub qps: u64,
    /// Requests that were carried out before older ones of their queue.
    pub overtaken: u64,
    /// Times a queue would have run over.
    pub overruns: u64,
}

static NEXT: AtomicU32 = AtomicU32::new(1);

impl Mock {
    /// A device like that.
    pub fn new(config: Config) -> Self {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("mock{id}");
        world().add(id, &name, config);
        Self { name, id }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library with this device (and those of other tests).
    pub fn verbs(&self) -> Verbs {
        // SAFETY: the mock's functions behave as libibverbs'.
        unsafe { Verbs::with_efa("mock", api(), efa::table()) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut world::Device) -> T) -> T {
        let mut world = world();
        let World { devices, .. } = &mut *world;
        f(devices.get_mut(&self.id).expect("the device of this mock"))
    }

    /// What it counted.
    pub fn counts(&self) -> Counts {
        let mut world = world();
        let (regions, qps) = world.owned(self.id);
        let device = world.devices.get_mut(&self.id).expect("this device");
        Counts {
            regions,
            qps,
            ..device.counts
        }
    }

    /// The `nth` request from now (0: the next) is refused by the post with this `errno`, and so is what follows it in the same call.
    pub fn refuse_post(&self, nth: u64, errno: i32) {
        self.with(|d| d.refuse_post = Some((d.counts.requests + nth, errno)));
    }

    /// The `nth` request from now completes with this status and vendor error instead of being carried out.
    pub fn fail_request(&self, nth: u64, status: u32, vendor: u32) {
        self.with(|d| d.fail_request = Some((d.counts.requests + nth, status, vendor)));
    }

    /// Successful completions of a poll come in reverse.
    pub fn reverse_completions(&self, on: bool) {
        self.with(|d| d.reverse = on);
    }

    /// Requests are carried out, and their completions are lost.
    pub fn lose_completions(&self, on: bool) {
        self.with(|d| d.lose = on);
    }

    /// Nothing is carried out until this ends.
    pub fn stall(&self, on: bool) {
        self.with(|d| d.stall = on);
    }

    /// What a queue pair was told of the way to its peer.
    pub fn path(&self, qpn: u32) -> Option<Path> {
        world().qps.get(&qpn).map(|qp| qp.path)
    }

    /// A queue pair goes to ERR without a word.
    pub fn stop(&self, qpn: u32) {
        let mut world = world();
        if let Some(qp) = world.qps.get_mut(&qpn) {
            qp.state = doorbell_verbs::abi::qp_state::ERR;
            qp.sends.clear();
        }
    }

    /// Registering memory is refused with this `errno` from now on.
    pub fn refuse_memory(&self, errno: Option<i32>) {
        self.with(|d| d.refuse_memory = errno);
    }

    /// Bringing a queue pair to RTR is refused with this `errno` from now on.
    pub fn refuse_connection(&self, errno: Option<i32>) {
        self.with(|d| d.refuse_rtr = errno);
    }

    /// The device is pulled: an event says so, and every call fails from now on.
    pub fn remove(&self) {
        self.with(world::Device::remove);
    }

    /// The port goes down, or comes up; without a word.
    pub fn set_active(&self, active: bool) {
        self.with(|d| d.config.active = active);
    }

    /// The port is said to be up `times` more, and then to be down.
    pub fn go_down_after(&self, times: u32) {
        self.with(|d| d.down_after = Some(times));
    }

    /// The port goes down with the event for it: nothing is carried out, and no way leads anywhere.
    pub fn pull_cable(&self) {
        self.with(|d| {
            d.config.active = false;
            d.stall = true;
            d.refuse_rtr = Some(libc::ENETUNREACH);
            d.raise(doorbell_verbs::abi::event_type::PORT_ERR, 1);
        });
    }

    /// An event about a queue pair ([`doorbell_verbs::abi::event_type`]).
    pub fn raise(&self, event: u32, qpn: u32) {
        let mut world = world();
        let element = world.handle_of(qpn);
        let device = world.devices.get_mut(&self.id).expect("this device");
        device.raise(event, element);
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.with(|d| d.listed = false);
    }
}

/// libefa's functions, for who makes a library of them.
pub fn efa_api() -> doorbell_verbs::efa::EfaApi {
    efa::table()
}

fn api() -> Api {
    calls::table()
}
