//! Sessions over real sockets within one process: two links, with engines that acknowledge when told to.

mod fuzz;
mod liar;

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use doorbell_wire::{Key, Opcode};

use super::*;
use crate::{
    fault::Fault,
    link::{Delivery, Incoming, RemoteQp},
    mem::{
        Access, Exporter, Memory, Place, Region, TableMemory,
        table::{MemoryKind, NewEntry},
    },
    raw::Shared,
};

const SOON: Duration = Duration::from_secs(20);

/// Engines that acknowledge grace periods when told to.
#[derive(Default)]
struct FakeEngines {
    begun: AtomicU64,
    passed: AtomicU64,
    hold: AtomicBool,
    down: Mutex<Vec<(PeerId, Gone)>>,
}

impl Hooks for FakeEngines {
    fn grace_begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn grace_passed(&self, epoch: u64) -> bool {
        !self.hold.load(Ordering::SeqCst) || self.passed.load(Ordering::SeqCst) >= epoch
    }

    fn peer_down(&self, peer: PeerId, why: &Gone) {
        self.down.lock().unwrap().push((peer, why.clone()));
    }
}

struct Side {
    shm: Shm,
    table: TableMemory,
    engines: Arc<FakeEngines>,
    slot: AtomicU32,
}

fn config() -> ShmConfig {
    ShmConfig {
        slot_bits: 4,
        ..ShmConfig::default()
    }
}

impl Side {
    fn new(config: ShmConfig) -> Self {
        let table = TableMemory::new(8).unwrap();
        let engines = Arc::new(FakeEngines::default());
        let export = TableExport {
            fd: Arc::new(table.fd().try_clone_to_owned().unwrap()),
            len: table.bytes() as u64,
        };
        let shm = Shm::new(config, export, engines.clone()).unwrap();
        Self {
            shm,
            table,
            engines,
            slot: AtomicU32::new(0),
        }
    }

    /// What `Hca::register` does.
    fn register(&self, region: &SharedRegion, access: Access) -> Key {
        let region = self.describe(region, access);
        let number = self.shm.registering(&region, &|| None).unwrap();
        let new = NewEntry {
            pd: 3,
            access,
            base: 0,
            len: region.memory.len() as u64,
            region: number,
            kind: MemoryKind::Shared,
            offset: 0,
        };
        let key = Key(self.table.view().publish(
            self.slot.fetch_add(1, Ordering::SeqCst),
            rand::random(),
            &new,
        ));
        self.shm.registered(key, &region);
        key
    }

    fn describe(&self, region: &SharedRegion, access: Access) -> Region {
        let memory = Memory::Shared {
            ptr: Shared::new(region.ptr()),
            len: region.len(),
            memfd: Arc::clone(region.memfd()),
            offset: 0,
            keep: Arc::new(()),
        };
        Region {
            devices: crate::verbs::Devices::default(),
            memory,
            access,
            base: 0,
            pd: 3,
        }
    }

    fn revoke(&self, key: Key) -> u64 {
        self.table.view().revoke(key.0);
        self.shm.revoked(key)
    }

    fn released(&self, ticket: u64) -> bool {
        eventually(|| self.shm.released(ticket))
    }
}

fn eventually(mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + SOON;
    while Instant::now() < deadline {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

fn address(name: &str) -> ShmAddress {
    ShmAddress::Abstract(format!("doorbell-test-{}-{name}", std::process::id()).into_bytes())
}

fn connected(name: &str) -> (Side, Side, Peer, Peer) {
    let (a, b) = (Side::new(config()), Side::new(config()));
    let listener = a.shm.listen(&address(name)).unwrap();
    let at_b = b.shm.connect(&address(name), SOON).unwrap();
    let at_a = listener.accept(SOON).unwrap();
    (a, b, at_a, at_b)
}

fn linked(a: &Peer, b: &Peer, qa: u32, qb: u32) -> (Arc<ShmLink>, Arc<ShmLink>) {
    let la = ShmLink::open(
        a,
        SlotQp {
            qpn: qa,
            pd: 3,
            peer_qpn: qb,
            receives: true,
        },
    )
    .unwrap();
    assert_eq!(
        la.ready(),
        Ok(false),
        "the other side has not connected yet"
    );
    let lb = ShmLink::open(
        b,
        SlotQp {
            qpn: qb,
            pd: 3,
            peer_qpn: qa,
            receives: true,
        },
    )
    .unwrap();
    assert_eq!((la.ready(), lb.ready()), (Ok(true), Ok(true)));
    (la, lb)
}

fn byte_behind(link: &ShmLink, key: Key, need: Access) -> Result<Shared<u8>, Fault> {
    match link.resolve(key, need)?.place {
        Place::Host(ptr) => Ok(ptr),
        Place::Device { .. } => panic!("host memory"),
    }
}

#[test]
fn two_processes_worth_of_link_talk_and_part() {
    let (a, b, at_a, at_b) = connected("talk");
    assert_eq!(at_a.credentials().pid, std::process::id() as i32);
    at_b.send(b"key 1", SOON).unwrap();
    at_a.send(b"qp 2", SOON).unwrap();
    assert_eq!(at_a.recv(SOON).unwrap(), b"key 1");
    assert_eq!(at_b.recv(SOON).unwrap(), b"qp 2");
    // More than the window: each message taken makes room for one more.
    std::thread::scope(|s| {
        s.spawn(|| (0..200u32).for_each(|i| at_b.send(&i.to_le_bytes(), SOON).unwrap()));
        for i in 0..200u32 {
            assert_eq!(at_a.recv(SOON).unwrap(), i.to_le_bytes());
        }
    });
    assert!(matches!(
        at_a.recv(Duration::from_millis(1)),
        Err(ShmError::Deadline { .. })
    ));
    assert!(matches!(
        at_a.send(&[0; MAX_APP + 1], SOON),
        Err(ShmError::Limit { .. })
    ));
    at_b.send(b"last words", SOON).unwrap();
    at_b.close(SOON).unwrap();
    assert_eq!(at_b.gone(), Some(Gone::ClosedHere));
    assert_eq!(at_a.recv(SOON).unwrap(), b"last words");
    assert!(matches!(at_a.recv(SOON), Err(ShmError::Gone(Gone::Closed))));
    assert_eq!(
        a.engines.down.lock().unwrap().as_slice(),
        [(at_a.id(), Gone::Closed)]
    );
    assert_eq!(
        b.engines.down.lock().unwrap().as_slice(),
        [(at_b.id(), Gone::ClosedHere)]
    );
}

#[test]
fn a_registered_region_is_reachable_at_once_and_gone_after_deregistration() {
    let (a, b, at_a, at_b) = connected("register");
    let (_la, lb) = linked(&at_a, &at_b, 10, 20);
    let region = SharedRegion::new(8192).unwrap();
    let key = a.register(&region, Access::ALL);
    let ptr = byte_behind(&lb, key, Access::REMOTE_WRITE).unwrap();
    // SAFETY: mapped until the revocation below has been released; nobody else writes.
    unsafe {
        ptr.store(42);
        assert_eq!(region.ptr().as_ptr().read_volatile(), 42);
    }
    let reader = a.register(&region, Access::REMOTE_READ);
    assert_eq!(
        byte_behind(&lb, reader, Access::REMOTE_WRITE).unwrap_err(),
        Fault::RkeyAccess
    );
    byte_behind(&lb, reader, Access::REMOTE_READ).unwrap();

    b.engines.hold.store(true, Ordering::SeqCst);
    let stamp = lb.stamp();
    let ticket = a.revoke(key);
    assert_ne!(lb.stamp(), stamp);
    assert_eq!(
        byte_behind(&lb, key, Access::REMOTE_WRITE).unwrap_err(),
        Fault::RkeyRevoked
    );
    assert!(
        eventually(|| b.engines.begun.load(Ordering::SeqCst) > 0),
        "the peer begins a grace period"
    );
    assert!(
        !a.shm.released(ticket),
        "the peer's engine may still be copying"
    );
    b.engines.hold.store(false, Ordering::SeqCst);
    assert!(a.released(ticket));
    byte_behind(&lb, reader, Access::REMOTE_READ).unwrap();
    // The number is free again, and the next region gets it on both sides.
    let other = SharedRegion::new(4096).unwrap();
    let again = a.register(&other, Access::ALL);
    // SAFETY: as above.
    unsafe {
        byte_behind(&lb, again, Access::REMOTE_WRITE)
            .unwrap()
            .store(7);
        assert_eq!(other.ptr().as_ptr().read_volatile(), 7);
    }
}

#[test]
fn regions_that_are_older_than_the_session_are_mapped_when_it_comes_up() {
    let (a, b) = (Side::new(config()), Side::new(config()));
    let regions: Vec<_> = (0..100).map(|_| SharedRegion::new(4096).unwrap()).collect();
    let keys: Vec<_> = regions.iter().map(|r| a.register(r, Access::ALL)).collect();
    let listener = a.shm.listen(&address("older")).unwrap();
    let at_b = b.shm.connect(&address("older"), SOON).unwrap();
    let at_a = listener.accept(SOON).unwrap();
    let (_la, lb) = linked(&at_a, &at_b, 1, 2);
    for (i, (key, region)) in keys.iter().zip(&regions).enumerate() {
        // SAFETY: mapped as long as the session lives.
        unsafe {
            byte_behind(&lb, *key, Access::REMOTE_WRITE)
                .unwrap()
                .store(i as u8);
            assert_eq!(region.ptr().as_ptr().read_volatile(), i as u8);
        }
    }
}

#[test]
fn memory_that_no_peer_can_map_is_not_offered() {
    let (a, _b, at_a, at_b) = connected("unmappable");
    let (_la, lb) = linked(&at_a, &at_b, 1, 2);
    let region = SharedRegion::new(4096).unwrap();
    let local = a.describe(&region, Access::LOCAL_WRITE);
    assert_eq!(
        a.shm.registering(&local, &|| None).unwrap(),
        0,
        "no remote right"
    );
    let open = std::fs::File::open("/dev/zero").unwrap();
    let mut bad = a.describe(&region, Access::ALL);
    if let Memory::Shared { memfd, .. } = &mut bad.memory {
        *memfd = Arc::new(OwnedFd::from(open));
    }
    let why = a.shm.registering(&bad, &|| None).unwrap_err();
    assert!(why.contains("memfd"), "{why}");
    let mut beyond = a.describe(&region, Access::ALL);
    if let Memory::Shared { offset, .. } = &mut beyond.memory {
        *offset = 4096;
    }
    assert!(
        a.shm
            .registering(&beyond, &|| None)
            .unwrap_err()
            .contains("not inside")
    );
    assert_eq!(
        byte_behind(&lb, Key(5), Access::REMOTE_READ).unwrap_err(),
        Fault::BadRkey
    );
}

#[test]
fn immediates_reach_the_target_and_their_answers_come_back() {
    let (_a, _b, at_a, at_b) = connected("imm");
    let (la, lb) = linked(&at_a, &at_b, 10, 20);
    assert_eq!(lb.incoming(), None);
    for position in 0..100u64 {
        assert_eq!(la.deliver_imm(position, 7, 64), Delivery::Pending);
        assert_eq!(
            la.deliver_imm(position, 7, 64),
            Delivery::Pending,
            "asked again, not sent again"
        );
        assert_eq!(
            lb.incoming(),
            Some(Incoming::Immediate { imm: 7, bytes: 64 })
        );
        lb.no_receive();
        assert_eq!(la.deliver_imm(position, 7, 64), Delivery::NoReceive);
        assert_eq!(
            lb.incoming(),
            Some(Incoming::Immediate { imm: 7, bytes: 64 }),
            "it stays until answered"
        );
        lb.accept();
        lb.reply(Ok(()));
        assert_eq!(lb.incoming(), None);
        assert_eq!(la.deliver_imm(position, 7, 64), Delivery::Delivered);
    }
    assert_eq!(la.deliver_imm(100, 1, 1), Delivery::Pending);
    assert!(lb.incoming().is_some());
    lb.accept();
    lb.reply(Err(Fault::NoReceive));
    assert_eq!(
        la.deliver_imm(100, 1, 1),
        Delivery::Failed(Fault::NoReceive)
    );
    // The target leaves: the initiator learns it at once, and a new life is another connection.
    lb.detach();
    assert_eq!(la.ready(), Err(Fault::PeerDead));
    assert_eq!(la.deliver_imm(101, 1, 1), Delivery::Failed(Fault::PeerDead));
    let again = ShmLink::open(
        &at_b,
        SlotQp {
            qpn: 20,
            pd: 3,
            peer_qpn: 10,
            receives: true,
        },
    )
    .unwrap();
    assert_eq!(la.ready(), Err(Fault::PeerDead));
    assert_eq!(again.ready(), Ok(true));
}

#[test]
fn a_qp_that_is_connected_to_another_is_not_a_target() {
    let (_a, _b, at_a, at_b) = connected("other-qp");
    let la = ShmLink::open(
        &at_a,
        SlotQp {
            qpn: 10,
            pd: 3,
            peer_qpn: 20,
            receives: true,
        },
    )
    .unwrap();
    let _lb = ShmLink::open(
        &at_b,
        SlotQp {
            qpn: 20,
            pd: 3,
            peer_qpn: 11,
            receives: true,
        },
    )
    .unwrap();
    assert_eq!(la.ready(), Ok(false));
    assert!(
        ShmLink::open(
            &at_a,
            SlotQp {
                qpn: 1,
                pd: 3,
                peer_qpn: 1 << 24,
                receives: true
            }
        )
        .is_err()
    );
}

#[test]
fn a_peer_that_never_lets_go_is_cut_off_and_the_memory_stays_unreleased() {
    let quick = ShmConfig {
        step: Duration::from_millis(50),
        ..config()
    };
    let (a, b) = (Side::new(quick), Side::new(config()));
    let listener = a.shm.listen(&address("stubborn")).unwrap();
    let _at_b = b.shm.connect(&address("stubborn"), SOON).unwrap();
    let at_a = listener.accept(SOON).unwrap();
    let region = SharedRegion::new(4096).unwrap();
    let key = a.register(&region, Access::ALL);
    b.engines.hold.store(true, Ordering::SeqCst);
    let ticket = a.revoke(key);
    assert!(eventually(|| at_a.gone().is_some()));
    assert!(
        matches!(
            at_a.gone(),
            Some(Gone::Late {
                step: "a revocation",
                ..
            })
        ),
        "{:?}",
        at_a.gone()
    );
    // Its process (this one) lives, so it may still write: the owner must not reuse the memory.
    assert!(!a.shm.released(ticket));
    b.engines.hold.store(false, Ordering::SeqCst);
}

#[test]
fn another_user_is_refused_and_told_so() {
    let nobody = ShmConfig {
        trust: Trust::Users(vec![u32::MAX - 1]),
        ..config()
    };
    let (a, b) = (Side::new(nobody), Side::new(config()));
    let _listener = a.shm.listen(&address("trust")).unwrap();
    match b.shm.connect(&address("trust"), SOON) {
        Err(ShmError::Gone(Gone::RefusedByPeer(refusal))) => {
            assert_eq!(refusal.code, RefusalCode::Credentials);
            assert!(refusal.text.contains("is not admitted"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_are_checked_and_socket_files_are_tidy() {
    use std::os::unix::fs::PermissionsExt;
    let a = Side::new(config());
    let dir = std::env::temp_dir().join(format!("doorbell-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = ShmAddress::Path(dir.join("sock"));
    let listener = a.shm.listen(&path).unwrap();
    let mode = std::fs::metadata(dir.join("sock"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(a.shm.listen(&path), Err(ShmError::InUse { .. })));
    drop(listener);
    assert!(eventually(|| !dir.join("sock").exists()));
    // A file left by a process that was killed is replaced; a file that is no socket is not.
    drop(std::os::unix::net::UnixListener::bind(dir.join("stale")));
    std::fs::write(dir.join("file"), b"precious").unwrap();
    assert!(matches!(
        a.shm.listen(&ShmAddress::Path(dir.join("file"))),
        Err(ShmError::InUse { .. })
    ));
    assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"precious");
    std::fs::remove_dir_all(&dir).unwrap();
    assert!("".parse::<ShmAddress>().is_err());
    assert!("@".parse::<ShmAddress>().is_err());
    assert!("x".repeat(200).parse::<ShmAddress>().is_err());
    assert_eq!(
        "@name".parse::<ShmAddress>().unwrap(),
        ShmAddress::Abstract(b"name".to_vec())
    );
    let nobody = a.shm.connect(&address("nobody"), Duration::from_millis(20));
    assert!(nobody.is_err());
}

#[test]
fn dropping_the_link_says_goodbye_and_drops_nothing_else() {
    let (a, b, at_a, at_b) = connected("drop");
    let (la, _lb) = linked(&at_a, &at_b, 1, 2);
    drop(b);
    assert!(eventually(|| at_a.gone().is_some()));
    assert_eq!(at_a.gone(), Some(Gone::Closed));
    assert_eq!(la.ready(), Err(Fault::PeerDead));
    assert_eq!(
        la.deliver_imm(0, u32::from(Opcode::Nop as u8), 0),
        Delivery::Failed(Fault::PeerDead)
    );
    // The other side's handle outlives its link.
    assert!(at_b.gone().is_some());
    assert!(matches!(at_b.send(b"x", SOON), Err(ShmError::Gone(_))));
    drop(a);
}
