//! GPU memory of another process: put, get, signal and count in it, with a copy engine that works late.
//! The "GPU" is a memfd that only the engine of each process touches, at addresses that mean nothing to the CPU.
#![cfg(not(miri))]

mod common;
mod process;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use common::{Options, PATIENCE};
use doorbell_hca::dma::{DeviceHandle, Dma, DmaOp};
use doorbell_hca::shm::{DeviceImporter, DeviceRegion, Peer, SharedRegion, ShmConfig};
use doorbell_hca::{Access, Addressing, Memory, Mr, MrConfig};
use doorbell_wire::{Remote, Vendor, Wqe};
use process::{Other, Side, at, role};

const BYTES: usize = 1 << 16;
const COUNTS: u64 = 10_000;

/// A piece of "GPU memory" and the engine that reaches it.
struct Gpu {
    base: u64,
    memory: Memfd,
    /// The last ticket, and the batches under way.
    batches: Mutex<(u64, VecDeque<Batch>)>,
}

/// Ticket, polls that it still takes, copies.
type Batch = (u64, u32, Vec<DmaOp>);

enum Memfd {
    Own(SharedRegion),
    /// A peer's, mapped again.
    Theirs(*mut u8),
}

// SAFETY: the mapping is touched only under the lock of `batches` (in this process).
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    fn new(base: u64, memory: Memfd) -> Arc<Self> {
        Arc::new(Self {
            base,
            memory,
            batches: Mutex::default(),
        })
    }

    fn byte(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let first = match &self.memory {
            Memfd::Own(region) => region.ptr().as_ptr(),
            Memfd::Theirs(ptr) => *ptr,
        };
        let offset = addr
            .checked_sub(self.base)
            .filter(|&o| o + len <= BYTES as u64)?;
        // SAFETY: inside the mapping.
        Some(unsafe { first.add(offset as usize) })
    }
}

impl Dma for Gpu {
    fn submit(&self, ops: &[DmaOp], _: &[usize]) -> Result<u64, String> {
        // Copied one after the other, so every step has its order.
        for op in ops {
            if self.byte(op.src, op.len).is_some() == self.byte(op.dst, op.len).is_some() {
                return Err(format!("{op:?} has not exactly one end in device memory"));
            }
        }
        let (next, batches) = &mut *self.batches.lock().unwrap();
        *next += 1;
        batches.push_back((*next, 3, ops.to_vec()));
        Ok(*next)
    }

    fn poll(&self, ticket: u64) -> Result<bool, String> {
        let (_, batches) = &mut *self.batches.lock().unwrap();
        let Some((first, polls, ops)) = batches.front_mut() else {
            return Ok(true);
        };
        if *first > ticket {
            return Ok(true);
        }
        if *first < ticket || *polls > 0 {
            *polls = polls.saturating_sub(u32::from(*first == ticket));
            return Ok(false);
        }
        for op in ops {
            let host = |addr: u64| std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
            let src = self.byte(op.src, op.len).unwrap_or(host(op.src));
            let dst = self.byte(op.dst, op.len).unwrap_or(host(op.dst));
            // SAFETY: checked ranges of the HCA on the host side, our mapping on the other.
            unsafe { std::ptr::copy_nonoverlapping(src, dst, op.len as usize) };
        }
        batches.pop_front();
        Ok(true)
    }

    fn ordered(&self) -> bool {
        true
    }

    fn export(&self, addr: u64, len: u64) -> Result<DeviceHandle, String> {
        assert_eq!((addr, len), (self.base, BYTES as u64));
        match &self.memory {
            Memfd::Own(region) => Ok(DeviceHandle {
                bytes: b"whole".to_vec(),
                fd: Some(region.memfd().clone()),
            }),
            Memfd::Theirs(_) => Err("not ours".into()),
        }
    }
}

struct Importer {
    /// Where it "maps" what it imports.
    base: u64,
}

impl DeviceImporter for Importer {
    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        assert_eq!((handle, len), (&b"whole"[..], BYTES as u64));
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, never unmapped: what a test may do.
        let ptr = unsafe {
            mmap(
                std::ptr::null_mut(),
                BYTES,
                flags,
                MapFlags::SHARED,
                fd.unwrap(),
                0,
            )
        };
        let gpu = Gpu::new(
            self.base,
            Memfd::Theirs(ptr.map_err(|e| e.to_string())?.cast()),
        );
        Ok(DeviceRegion {
            addr: self.base,
            len,
            dma: gpu,
            keep: Arc::new(()),
        })
    }
}

/// A side with GPU memory, and the other's importable.
fn side(imports_at: u64) -> Side {
    Side::with(
        ShmConfig::default(),
        Some(Arc::new(Importer { base: imports_at })),
    )
}

fn register(side: &Side, base: u64) -> (Arc<Gpu>, Mr) {
    let gpu = Gpu::new(base, Memfd::Own(SharedRegion::new(BYTES).unwrap()));
    let config = MrConfig {
        memory: Memory::Device {
            addr: base,
            len: BYTES,
            dma: gpu.clone(),
            keep: Arc::new(()),
        },
        access: Access::ALL,
        addressing: Addressing::Zero,
        pd: side.rig.pd,
    };
    // SAFETY: the engine owns the memory.
    let mr = unsafe { side.rig.hca.register(config) }.expect("register");
    (gpu, mr)
}

const WORD: usize = 512;

/// Owns the GPU memory, and counts in a word of it over loopback while the other counts over the link.
fn owner(side: &Side, peer: &Peer) {
    let (_gpu, mr) = register(side, 0x7f00_0000_0000);
    let sink = side.region(64);
    let qp = side.rig.qp_with(Options::default());
    let (_remote, _link) = side.connect(peer, &qp, mr.key());
    let mut own = side.rig.loopback(Options::default());
    peer.send(b"ready", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("recv"), b"count");
    let word = at(
        Remote {
            addr: mr.addr(),
            key: mr.key(),
        },
        WORD,
    );
    for _ in 0..COUNTS {
        own.run(
            &side.rig,
            Wqe::fetch_add(word, sink.local(0, 1), 1).unwrap(),
        );
    }
    peer.send(b"counted", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("recv"), b"end");
    own.run(&side.rig, Wqe::read(word, sink.local(1, 1)).unwrap());
    assert_eq!(
        sink.word(1).load(Ordering::Acquire),
        2 * COUNTS,
        "nothing is lost between processes"
    );
    mr.deregister(PATIENCE).expect("the peer lets go");
    peer.send(b"gone", PATIENCE).expect("send");
    let _ = peer.recv(PATIENCE);
}

#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let (_, address) = role();
    let side = side(0);
    let peer = side.shm.connect(&address, PATIENCE).expect("connect");
    owner(&side, &peer);
}

#[test]
fn gpu_memory_of_another_process_is_written_read_and_counted_in() {
    // Another address than the owner's, with the same low bits.
    let side = side(0x6600_0000_0000);
    let address = side.address("device");
    let listener = side.shm.listen(&address).unwrap();
    let other = Other::start("owner", &address);
    let peer = listener.accept(PATIENCE).unwrap();
    let host = side.region(1024);
    let mut qp = side.rig.qp_with(Options {
        log_depth: 6,
        ..Options::default()
    });
    let (remote, _link) = side.connect(&peer, &qp, host.key);
    assert_eq!(peer.recv(PATIENCE).expect("ready"), b"ready");
    let rig = &side.rig;

    // Payload, then an inline signal, then back.
    (0..256).for_each(|i| host.word(i).store(i as u64 * 3 + 1, Ordering::Relaxed));
    qp.post(&Wqe::write(remote, host.local(0, 256)).unwrap());
    qp.run(
        rig,
        Wqe::write_inline(at(remote, 300), &77u64.to_le_bytes()).unwrap(),
    );
    qp.run(rig, Wqe::read(remote, host.local(512, 301)).unwrap());
    assert!((0..256).all(|i| host.word(512 + i).load(Ordering::Relaxed) == i as u64 * 3 + 1));
    assert_eq!(host.word(512 + 300).load(Ordering::Relaxed), 77);

    // Both processes count in one word.
    peer.send(b"count", PATIENCE).expect("send");
    let mut last = None;
    for _ in 0..COUNTS {
        qp.run(
            rig,
            Wqe::fetch_add(at(remote, WORD), host.local(900, 1), 1).unwrap(),
        );
        let old = host.word(900).load(Ordering::Relaxed);
        assert!(last.is_none_or(|last| last < old), "old values grow");
        last = Some(old);
    }
    assert_eq!(peer.recv(PATIENCE).expect("counted"), b"counted");
    peer.send(b"end", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("gone"), b"gone");
    let at = qp.go(Wqe::write(remote, host.local(0, 1)).unwrap());
    qp.wait_any(rig, at);
    assert_eq!(Vendor(qp.error_word().vendor()), Vendor::REVOKED);
    peer.send(b"end", PATIENCE).expect("send");
    other.ended_well();
}
