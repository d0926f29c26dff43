//! The verbs link as its user sees it: an opened RDMA device, and queue pairs that it carries out.
//!
//! [`Hca::open_verbs`](crate::Hca::open_verbs) opens a port of a device; [`HcaQp::prepare`](crate::HcaQp::prepare) gives a queue pair one of the
//! device's, whose number and address the peer needs; [`Destination::Verbs`](crate::Destination) connects it. The engine then reads what the
//! GPU posts, and posts it to the device: payloads move between the device and registered memory without the engine.
//!
//! **Keys.** Local keys are Doorbell's, as everywhere: the engine checks rights and bounds and then uses the device's key of the region, which is
//! registered there when it is first used. Remote keys and addresses are the *device's* of the other side, as with any verbs program:
//! [`Mr::on_port`](crate::Mr::on_port) says what they are, for the peer.

mod config;
mod places;
mod srd;

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use doorbell_verbs as library;
use doorbell_verbs::efa::EfaAttr;
use doorbell_verbs::{
    AsyncEvent, Connection, Context, Cq, DeviceAttr, GidEntry, Mr, Pd, PortAttr, Qp, QpConfig,
    Source, Verbs, VerbsError, abi,
};

pub use config::VerbsConfig;
pub(crate) use srd::{CONTROLS, HEAD, Half, SrdNic, WINDOW};

use crate::events::Event;
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::{Access, Memory, Region};
use places::Places;

/// How long after its first failures a port may say that it is up.
const GOING_DOWN: Duration = Duration::from_millis(100);

/// An opened port of a device.
pub struct VerbsPort {
    context: Context,
    config: VerbsConfig,
    device: DeviceAttr,
    port: PortAttr,
    gid: GidEntry,
    /// It is an EFA device: SRD instead of RC.
    efa: Option<EfaAttr>,
    /// Our keys and the device's addresses, by the device's remote keys: for requests that this side's engine carries out.
    exported: Mutex<HashMap<u32, Exported>>,
    /// Names it among the keys of regions.
    id: u64,
    /// The device's protection domains, by ours.
    pds: Mutex<Vec<(u32, Pd)>>,
    /// Where the device's queue pairs are told of events, by their numbers.
    alarms: Mutex<Vec<(u32, Weak<Alarm>)>>,
    gone: AtomicBool,
    /// A port that had failed a request was waited for, and did not go down.
    stays_up: AtomicBool,
}

/// What the device has said of one of its queue pairs and that one's engine has not looked at: 0 is nothing.
#[derive(Debug, Default)]
pub(crate) struct Alarm(AtomicU8);

impl Alarm {
    const ACCESS: u8 = 1;
    const FATAL: u8 = 2;

    /// What was said since this was last asked, as a fault.
    pub(crate) fn take(&self) -> Option<Fault> {
        if self.0.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(match self.0.swap(0, Ordering::Relaxed) {
            Self::FATAL => Fault::PortDown,
            _ => Fault::PeerRefused,
        })
    }
}

impl fmt::Debug for VerbsPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (GID index {})", self.config, self.gid.index)
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

impl VerbsPort {
    /// Opens it.
    pub(crate) fn open(verbs: &Verbs, config: &VerbsConfig) -> Result<Self, VerbsError> {
        let context = Context::open(verbs, &config.device)?;
        context.connectable()?;
        let device = context.attributes()?;
        let port = context.active_port(config.port)?;
        let gid = context.choose_gid(config.port, config.gid, config.ip)?;
        let efa = context.efa()?;
        let plain = (0, 0, 0);
        let asked = (
            config.service_level,
            config.traffic_class,
            config.pkey_index,
        );
        let opened = Self {
            efa,
            exported: Mutex::default(),
            context,
            config: config.clone(),
            device,
            port,
            gid,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            pds: Mutex::default(),
            alarms: Mutex::default(),
            gone: AtomicBool::new(false),
            stays_up: AtomicBool::new(false),
        };
        if opened.efa.is_some() && asked != plain {
            return Err(opened.unsupported(
                "an EFA has no service level, traffic class or partition keys: leave out sl, tc and pkey",
            ));
        }
        if opened.efa.is_none() && config.relaxed {
            return Err(
                opened.unsupported("order=inline is of an EFA, and it is none: leave it out")
            );
        }
        Ok(opened)
    }

    /// How it was opened.
    pub fn config(&self) -> &VerbsConfig {
        &self.config
    }

    /// What the device can do.
    pub fn device(&self) -> &DeviceAttr {
        &self.device
    }

    /// What the port is.
    pub fn port(&self) -> &PortAttr {
        &self.port
    }

    /// This side's address.
    pub fn gid(&self) -> &GidEntry {
        &self.gid
    }

    /// What it can do as an EFA device, if it is one.
    pub fn efa(&self) -> Option<&EfaAttr> {
        self.efa.as_ref()
    }

    /// What it is, in a line.
    pub fn describe(&self) -> String {
        let gone = match self.is_gone() {
            true => "; the device is gone",
            false => "",
        };
        if let Some(efa) = &self.efa {
            return format!(
                "{}: EFA, SRD through libefa (untested on hardware), GID {}, remote writes{} up to {} bytes, messages and atomics by the peer's engine{gone}",
                self.config,
                std::net::Ipv6Addr::from(self.gid.gid),
                if efa.reads {
                    " and reads"
                } else {
                    ", no remote reads,"
                },
                efa.max_rdma
            );
        }
        let kind = match (self.port.is_ethernet(), self.gid.kind) {
            (true, doorbell_verbs::GidKind::RoceV1) => "RoCE v1",
            (true, _) => "RoCE v2",
            (false, _) => "InfiniBand",
        };
        let at = match (self.gid.ip(), self.port.is_ethernet()) {
            (Some(ip), true) => format!("{ip} (GID index {})", self.gid.index),
            _ => format!("LID {}", self.port.lid),
        };
        format!(
            "{}: {kind}, {at}, path MTU {}, messages up to {} bytes, {} pieces, {}{gone}",
            self.config,
            self.mtu(),
            self.port.max_message,
            self.device.max_sge,
            match self.device.atomics {
                true => "atomics of 8 bytes",
                false => "no atomics",
            }
        )
    }

    /// Bytes of the path MTU that this side would use.
    fn mtu(&self) -> u16 {
        self.port.mtu.min(self.config.mtu)
    }

    /// The device was removed or failed.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// The device says that its port is down; told in the log, with what to do. It may fail requests a moment before it says so (soft-RoCE has no route any
    /// more by then), which is waited for; once in vain and not again, since the caller has other queue pairs to serve.
    pub(crate) fn is_down(&self) -> bool {
        let until = Instant::now() + GOING_DOWN;
        loop {
            match self.context.active_port(self.config.port) {
                Err(e @ VerbsError::PortDown { .. }) => {
                    tracing::error!("{e}");
                    return true;
                }
                Err(_) => return false,
                Ok(_) if self.stays_up.load(Ordering::Relaxed) => return false,
                Ok(_) => self
                    .stays_up
                    .store(Instant::now() >= until, Ordering::Relaxed),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Tells the user that the device refuses something.
    pub(crate) fn tell_refusal(&self, inner: &Inner, reason: String) {
        let device = self.config.to_string();
        inner.events.push(Event::DeviceRefused { device, reason });
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// A queue pair of the device is to be told of its events.
    pub(crate) fn watch(&self, qpn: u32) -> Arc<Alarm> {
        let alarm = Arc::new(Alarm::default());
        let mut alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|(_, a)| a.strong_count() != 0);
        alarms.push((qpn, Arc::downgrade(&alarm)));
        alarm
    }

    fn alarm(&self, qpn: u32, what: u8) {
        let alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        // Numbers come again: of two, the older is gone or going.
        let found = alarms.iter().rev().find(|(q, _)| *q == qpn);
        if let Some(alarm) = found.and_then(|(_, a)| a.upgrade()) {
            alarm.0.store(what, Ordering::Relaxed);
        }
    }

    /// Reads what the device has to say. Any engine core may: it passes on what is about a queue pair of another.
    pub(crate) fn hear(&self) {
        while let Some(event) = self.context.next_event() {
            tracing::debug!("{self:?}: {event:?}");
            match event {
                AsyncEvent::DeviceFatal => {
                    tracing::error!("{}: the device was removed or has failed", self.config);
                    self.set_gone();
                }
                AsyncEvent::PortDown(number) => {
                    tracing::warn!("{}: port {number} went down", self.config);
                }
                AsyncEvent::PortActive(number) => {
                    tracing::warn!("{}: port {number} is up", self.config);
                }
                AsyncEvent::QpAccess(qpn) => self.alarm(qpn, Alarm::ACCESS),
                AsyncEvent::QpFatal(qpn) => self.alarm(qpn, Alarm::FATAL),
                _ => {}
            }
        }
    }

    /// An RC queue pair of that number, for its peer.
    fn end(&self, qpn: u32) -> VerbsEnd {
        VerbsEnd {
            qpn,
            gid: self.gid.gid,
            lid: self.port.lid,
            mtu: self.mtu(),
            reads_open: self.device.reads_open.clamp(1, 16),
            reads_answered: self.device.reads_answered.clamp(1, 16),
            ethernet: self.port.is_ethernet(),
            srd: None,
        }
    }

    fn unsupported(&self, what: impl Into<String>) -> VerbsError {
        VerbsError::Unsupported {
            device: self.config.device.clone(),
            what: what.into(),
        }
    }

    fn pd(&self, number: u32) -> Result<Pd, VerbsError> {
        let mut pds = self.pds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pd)) = pds.iter().find(|(n, _)| *n == number) {
            return Ok(pd.clone());
        }
        let pd = Pd::new(&self.context)?;
        pds.push((number, pd.clone()));
        Ok(pd)
    }

    /// The region as the device knows it; registers it there if it was not.
    pub(crate) fn keys(&self, region: &Region) -> Result<DeviceKeys, VerbsError> {
        let mut known = region
            .devices
            .known
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, mr)) = known.iter().find(|(id, _)| *id == self.id) {
            return Ok(DeviceKeys::of(mr));
        }
        let pd = self.pd(region.pd)?;
        let mut access = region.access;
        if !self.device.atomics {
            access = Access::from_bits(access.bits() & !Access::REMOTE_ATOMIC.bits());
        }
        if self.efa.is_some_and(|e| !e.reads) {
            access = Access::from_bits(access.bits() & !Access::REMOTE_READ.bits());
        }
        // Those of verbs; ours may have more.
        let rights = access.bits() & Access::ALL.bits();
        let (len, base) = (region.memory.len(), region.base);
        let mr = match &region.memory {
            Memory::Host { ptr, .. } | Memory::Shared { ptr, .. } => {
                let at = ptr.as_ptr().expose_provenance() as u64;
                // SAFETY: the region keeps its memory, and drops the device's registration first.
                unsafe { pd.register(Source::Host(at), len, base, rights)? }
            }
            Memory::Device { addr, dma, .. } => {
                let fd = dma.dmabuf(*addr, len);
                let by_fd = fd.as_ref().map(|(fd, offset)| {
                    let fd = std::os::fd::AsFd::as_fd(fd);
                    let source = Source::Dmabuf {
                        fd,
                        offset: *offset,
                    };
                    // SAFETY: as above.
                    unsafe { pd.register(source, len, base, rights) }
                });
                match by_fd {
                    Some(Ok(mr)) => mr,
                    other => {
                        if let Some(Err(e)) = other {
                            tracing::debug!("{e}; by its address, then");
                        }
                        // The older way: a kernel module that knows the GPU's addresses.
                        // SAFETY: as above.
                        unsafe { pd.register(Source::Gpu(*addr), len, base, rights)? }
                    }
                }
            }
        };
        let keys = DeviceKeys::of(&mr);
        known.push((self.id, mr));
        if self.efa.is_some() {
            let exported = Exported {
                key: region.devices.key.load(Ordering::Relaxed),
                base: keys.base,
            };
            let mut all = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
            // One that is gone stays until its number comes again: its key says that it is revoked.
            all.insert(keys.rkey, exported);
        }
        Ok(keys)
    }

    /// What the device's remote key is of.
    pub(crate) fn exported(&self, rkey: u32) -> Option<Exported> {
        let all = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&rkey).copied()
    }
}

/// A region as a device knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceKeys {
    /// The address of the first byte.
    pub base: u64,
    /// The key for local use.
    pub lkey: u32,
    /// The key for peers.
    pub rkey: u32,
}

impl DeviceKeys {
    fn of(mr: &Mr) -> Self {
        Self {
            base: mr.base(),
            lkey: mr.lkey(),
            rkey: mr.rkey(),
        }
    }
}

/// A region by a device's remote key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exported {
    /// Our key.
    pub(crate) key: u32,
    /// The device's address of the first byte.
    pub(crate) base: u64,
}

/// What devices know a region as. Dropped before the region's memory is let go of.
#[derive(Debug, Default)]
pub struct Devices {
    known: Mutex<Vec<(u64, Mr)>>,
    /// Our own key of the region.
    key: AtomicU32,
}

impl Devices {
    /// The region has got its key.
    pub(crate) fn set_key(&self, key: doorbell_wire::Key) {
        self.key.store(key.0, Ordering::Relaxed);
    }

    /// Takes the region from all of them: nothing of it is read or written by them afterwards.
    pub(crate) fn clear(&self) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = core::mem::take(&mut *known);
        drop(known);
    }
}

/// What the peer needs to know of a queue pair's end on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsEnd {
    /// Number of the device's queue pair.
    pub qpn: u32,
    /// This port's address.
    pub gid: [u8; 16],
    /// This port's LID, on InfiniBand.
    pub lid: u16,
    /// Bytes of the path MTU at most: what the port has, or less if its user says so.
    pub mtu: u16,
    /// READs and atomics that it wants to have open.
    pub reads_open: u8,
    /// READs and atomics that it answers at a time.
    pub reads_answered: u8,
    /// Its port is Ethernet.
    pub ethernet: bool,
    /// The key of its queue pair if that is an SRD one of an EFA device; `None`: RC.
    pub srd: Option<u32>,
}

/// The other end, and what both have agreed on.
#[derive(Clone, Copy, Debug)]
pub struct VerbsTarget {
    /// The other end.
    pub peer: VerbsEnd,
    /// Number of the first packet sent.
    pub sq_psn: u32,
    /// Number of the first packet expected.
    pub rq_psn: u32,
    /// Code of the time without acknowledgement.
    pub timeout: u8,
    /// How often the device repeats.
    pub retry: u8,
    /// How often it repeats where no receive is posted; 7: without end.
    pub rnr_retry: u8,
    /// Code of the time that the peer is to wait where no receive is posted.
    pub min_rnr_timer: u8,
}

/// The bit of a request's number that says that it is a receive.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// Bytes of a WQE's inline data at most.
pub(crate) const INLINE: usize = 1024;

/// Bytes of inline data asked of a device: more is copied to memory that it knows.
const DEVICE_INLINE: u32 = 256;

/// A device's queue pair that belongs to one of ours.
pub(crate) struct Nic {
    // In this order: nothing is used after it was dropped.
    pub(crate) qp: Qp,
    pub(crate) cq: Cq,
    pub(crate) port: Arc<VerbsPort>,
    pub(crate) alarm: Arc<Alarm>,
    /// For inline data that the device does not take: a place for each request, a power of two of them.
    bounce: Places,
    peer: AtomicU32,
    pub(crate) send: u32,
    pub(crate) recv: u32,
    pub(crate) pieces: u32,
    pub(crate) recv_pieces: u32,
    pub(crate) inline: u32,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, QP {:#08x}", self.port, self.qp.qpn())
    }
}

impl Nic {
    /// One in INIT, for a queue of so many slots and so many receives of so many pieces.
    pub(crate) fn new(
        port: &Arc<VerbsPort>,
        pd: u32,
        slots: u32,
        (receives, recv_pieces): (u32, u32),
    ) -> Result<Self, VerbsError> {
        let most = |n: u32| n.min(port.device.max_work).max(1);
        let send = most(slots.clamp(64, 512));
        let recv = most(receives.min(4096));
        let entries = (send + recv + 16).min(port.device.max_cqe);
        let cq = Cq::new(&port.context, entries)?;
        let pd = port.pd(pd)?;
        let config = QpConfig {
            send,
            recv,
            send_pieces: port.device.max_sge.clamp(1, 8),
            recv_pieces: recv_pieces.min(port.device.max_sge).max(1),
            inline: DEVICE_INLINE,
            calls: port.config.calls,
        };
        let qp = Qp::new(&pd, &cq, &cq, &config)?;
        qp.init(port.config.port, port.config.pkey_index, Access::ALL.bits())?;
        let inline = qp.capacity().max_inline_data.min(INLINE as u32);
        let bounce = Places::new(&pd, send.next_power_of_two() as usize, INLINE, 0)?;
        Ok(Self {
            peer: AtomicU32::new(0),
            alarm: port.watch(qp.qpn()),
            send,
            recv,
            pieces: config.send_pieces,
            recv_pieces: config.recv_pieces,
            inline,
            qp,
            cq,
            port: Arc::clone(port),
            bounce,
        })
    }

    /// This end, for the peer.
    pub(crate) fn end(&self) -> VerbsEnd {
        self.port.end(self.qp.qpn())
    }

    /// The number of the peer's queue pair; 0 before it is connected.
    pub(crate) fn peer_qpn(&self) -> u32 {
        self.peer.load(Ordering::Relaxed)
    }

    /// Connects it to its peer; may take as long as resolving the peer's address does.
    pub(crate) fn connect(&self, to: &VerbsTarget) -> Result<(), VerbsError> {
        let own = self.end();
        if to.peer.srd.is_some() {
            return Err(self
                .port
                .unsupported("the peer's is an EFA device, whose SRD reaches EFA devices only"));
        }
        if own.ethernet != to.peer.ethernet {
            return Err(self.port.unsupported(
                "this port and the peer's are not of one kind (InfiniBand, Ethernet): choose others",
            ));
        }
        self.peer.store(to.peer.qpn, Ordering::Relaxed);
        self.qp.connect(&Connection {
            port: self.port.config.port,
            gid_index: self.port.gid.index,
            own: own.gid,
            remote: doorbell_verbs::Remote {
                qpn: to.peer.qpn,
                gid: to.peer.gid,
                lid: to.peer.lid,
            },
            // On InfiniBand a GRH is for peers of another subnet, whose GIDs begin otherwise.
            global: own.ethernet || own.gid[..8] != to.peer.gid[..8],
            mtu: own.mtu.min(to.peer.mtu),
            sq_psn: to.sq_psn,
            rq_psn: to.rq_psn,
            reads_open: own.reads_open.min(to.peer.reads_answered),
            reads_answered: own.reads_answered,
            timeout: to.timeout,
            retry: to.retry,
            rnr_retry: to.rnr_retry,
            min_rnr_timer: to.min_rnr_timer,
            hop_limit: 64,
            traffic_class: self.port.config.traffic_class,
            service_level: self.port.config.service_level,
        })
    }

    /// Where inline data of request `number` goes, and the piece that names it.
    pub(crate) fn bounce(&self, number: u64, len: usize) -> Option<(*mut u8, abi::Sge)> {
        let places = self.send.next_power_of_two() as usize;
        self.bounce.place(number as usize & (places - 1), len)
    }
}
