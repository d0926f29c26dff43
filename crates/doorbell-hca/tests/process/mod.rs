//! Two processes over shared memory: a test binary starts itself as the peer (its ignored test `peer_process`).
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of each test file, which uses a part of it"
)]

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use doorbell_hca::shm::{
    DeviceImporter, Peer, SharedRegion, Shm, ShmAddress, ShmConfig, ShmLink, SlotQp,
};
use doorbell_hca::{Access, Addressing, Destination, Hca, HcaConfig, Memory, Mr, MrConfig, Shared};
use doorbell_wire::{Key, Local, Remote};

use crate::common::{MockQp, PATIENCE, Rig};

/// Tells the peer process what it is.
pub const ROLE: &str = "DOORBELL_TEST_ROLE";

/// Role and address of this process, which is a peer.
pub fn role() -> (String, ShmAddress) {
    let role = env::var(ROLE).expect("started by a test");
    let (name, address) = role.split_once(' ').expect("role and address");
    (name.into(), address.parse().expect("address"))
}

/// Ends the other process whatever happens to the test.
pub struct Other(pub Child);

impl Other {
    pub fn start(role: &str, address: &ShmAddress) -> Self {
        let child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "peer_process",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, format!("{role} {address}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: our own child, not yet waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }

    /// Stops it, and waits until all of its threads stand still.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: our own child; it is reported as stopped, not as ended, so it can be waited for again.
        let pid = unsafe { libc::waitpid(self.0.id() as i32, &raw mut status, libc::WUNTRACED) };
        assert!(
            pid == self.0.id() as i32 && libc::WIFSTOPPED(status),
            "{pid} {status:#x}"
        );
    }

    pub fn ended_well(mut self) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success(), "{status:?}");
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the other process does not end");
    }

    pub fn ended_by(mut self, signal: i32) {
        assert_eq!(self.0.wait().unwrap().signal(), Some(signal));
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One process: its HCA (driven by whoever waits) and its link.
pub struct Side {
    pub rig: Rig,
    pub shm: Arc<Shm>,
}

impl Side {
    pub fn new(config: ShmConfig) -> Self {
        Self::with(config, None)
    }

    pub fn with(config: ShmConfig, importer: Option<Arc<dyn DeviceImporter>>) -> Self {
        let rig = Rig::with(HcaConfig {
            rnr_limit: Duration::from_secs(10),
            ..HcaConfig::caller_driven()
        });
        let shm = Shm::attach(&rig.hca, config, importer).expect("attach");
        Self { rig, shm }
    }

    /// An address that no other test of this process has.
    pub fn address(&self, name: &str) -> ShmAddress {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        ShmAddress::Abstract(format!("doorbell-process-{pid}-{n}-{name}").into_bytes())
    }

    pub fn region(&self, words: usize) -> SharedMr {
        SharedMr::new(&self.rig.hca, self.rig.pd, words)
    }

    /// Exchanges keys and QP numbers, and connects.
    pub fn connect(&self, peer: &Peer, qp: &MockQp, key: Key) -> (Remote, Arc<ShmLink>) {
        let qpn = qp.hca_qp().qpn().get();
        peer.send(&[qpn.to_le_bytes(), key.0.to_le_bytes()].concat(), PATIENCE)
            .expect("send");
        let theirs = peer.recv(PATIENCE).expect("recv");
        let word = |i: usize| u32::from_le_bytes(theirs[i * 4..i * 4 + 4].try_into().unwrap());
        let link = ShmLink::open(
            peer,
            SlotQp {
                qpn,
                pd: self.rig.pd,
                peer_qpn: word(0),
                receives: true,
            },
        )
        .expect("link");
        qp.hca_qp()
            .connect(Destination::Peer(link.clone()), PATIENCE)
            .expect("connect");
        (
            Remote {
                addr: 0,
                key: Key(word(1)),
            },
            link,
        )
    }
}

/// A registered region of words in a sealed memfd.
pub struct SharedMr {
    pub mr: Option<Mr>,
    pub memory: Arc<SharedRegion>,
    pub key: Key,
}

impl SharedMr {
    pub fn new(hca: &Hca, pd: u32, words: usize) -> Self {
        let memory = Arc::new(SharedRegion::new(words * 8).unwrap());
        let config = MrConfig {
            memory: Memory::Shared {
                ptr: Shared::new(memory.ptr()),
                len: words * 8,
                memfd: memory.memfd().clone(),
                offset: 0,
                keep: memory.clone(),
            },
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd,
        };
        // SAFETY: `keep` owns the mapping, which is used through atomics only.
        let mr = unsafe { hca.register(config) }.expect("register");
        let key = mr.key();
        Self {
            mr: Some(mr),
            memory,
            key,
        }
    }

    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!((index + 1) * 8 <= self.memory.len());
        // SAFETY: inside the mapping, which lives as long as `self`; words are only used as atomics.
        unsafe { AtomicU64::from_ptr(self.memory.ptr().as_ptr().cast::<u64>().add(index)) }
    }

    pub fn local(&self, word: usize, words: usize) -> Local {
        Local {
            addr: word as u64 * 8,
            key: self.key,
            len: words as u32 * 8,
        }
    }
}

pub fn at(remote: Remote, word: usize) -> Remote {
    Remote {
        addr: remote.addr + word as u64 * 8,
        ..remote
    }
}
