//! GPU memory: registered by its dma-buf where the device can, by its address otherwise, and never both unknown to the poster.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use doorbell_hca::dma::{Dma, DmaOp};
use doorbell_hca::{Access, Addressing, Memory, Mr, MrConfig};
use doorbell_verbs_mock::{Config, Srd};
use doorbell_wire::{Key, Local, Remote, Syndrome, Vendor, Wqe};

use crate::pair::*;

/// Where device memory is, to kernels: nothing of this process.
const BASE: u64 = 0x00d0_0000_0000_0000;
/// Where it begins in its dma-buf: not at a page.
const OFFSET: u64 = 4096 + 256;

/// A device whose memory is a file's, which the mock takes for a dma-buf, since it can map it. No copy engine may be asked to move anything.
struct Gpu(File);

impl Gpu {
    fn new(len: u64) -> Arc<Self> {
        let fd = rustix::fs::memfd_create("gpu", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(fd);
        file.set_len(OFFSET + len).expect("a size");
        Arc::new(Self(file))
    }

    fn bytes(&self, from: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0
            .read_exact_at(&mut bytes, OFFSET + from)
            .expect("inside");
        bytes
    }
}

impl Dma for Gpu {
    fn submit(&self, _: &[DmaOp], _: &[usize]) -> Result<u64, String> {
        Err("the NIC reaches this memory by itself".into())
    }

    fn poll(&self, _: u64) -> Result<bool, String> {
        Err("nothing was submitted".into())
    }

    fn dmabuf(&self, addr: u64, _: usize) -> Option<(OwnedFd, u64)> {
        let fd = self.0.try_clone().expect("a descriptor").into();
        Some((fd, OFFSET + addr - BASE))
    }
}

fn register(p: &Pair, gpu: &Arc<Gpu>, from: u64, len: usize) -> Mr {
    register_with(p, gpu, Arc::<Gpu>::clone(gpu), from, len)
}

fn register_with(p: &Pair, gpu: &Arc<Gpu>, dma: Arc<dyn Dma>, from: u64, len: usize) -> Mr {
    let config = MrConfig {
        memory: Memory::Device {
            addr: BASE + from,
            len,
            dma,
            keep: Arc::<Gpu>::clone(gpu),
        },
        access: Access::ALL,
        addressing: Addressing::Address,
        pd: p.rig.pd,
    };
    // SAFETY: nothing reaches the memory but by its descriptor.
    unsafe { p.rig.hca.register(config) }.expect("registers")
}

#[test]
fn the_device_reaches_gpu_memory_by_its_dma_buf() {
    both(|config| {
        let mut p = Pair::new(config);
        let gpu = Gpu::new(16_384);
        // The second begins in the middle of a page of it.
        let (near, far) = (
            register(&p, &gpu, 0, 4096),
            register(&p, &gpu, 8192 + 40, 4096),
        );
        let keys = far.on_port(&p.port).expect("registers");
        assert_eq!(keys.base, far.addr(), "kernels and peers use one address");
        let to = Remote {
            addr: keys.base + 8,
            key: Key(keys.rkey),
        };
        let sent = pattern(300, 5);
        gpu.0.write_all_at(&sent, OFFSET + 16).expect("inside");
        let from = Local {
            addr: near.addr() + 16,
            key: near.key(),
            len: 300,
        };
        p.run(Wqe::write(to, from).expect("a length"));
        assert_eq!(gpu.bytes(8192 + 48, 300), sent);
        let back = Local {
            addr: near.addr() + 1000,
            ..from
        };
        p.run(Wqe::read(to, back).expect("a length"));
        assert_eq!(gpu.bytes(1000, 300), sent);
        let before = p.mock.counts().regions;
        drop(near);
        assert_eq!(p.mock.counts().regions, before - 1);
    });
}

#[test]
fn gpu_memory_that_the_device_reaches_in_no_way_is_explained() {
    let mut p = Pair::new(Config {
        dmabuf: false,
        ..Config::default()
    });
    let gpu = Gpu::new(4096);
    let near = register(&p, &gpu, 0, 4096);
    let dst = p.rig.region(64);
    let from = Local {
        addr: near.addr(),
        key: near.key(),
        len: 8,
    };
    let fault = p.fails(Wqe::write(p.there(&dst, 0), from).expect("a length"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED));
    let reasons = p.refusals();
    let both = |r: &String| r.contains("dma-buf") && r.contains("nvidia-peermem");
    assert!(reasons.iter().any(both), "{reasons:?}");
}

/// A copy engine for such a device, which takes some looks for each batch.
struct Engine {
    gpu: Arc<Gpu>,
    /// Batches so far, and looks at them.
    batches: AtomicU64,
    looks: AtomicU64,
    stuck: AtomicBool,
    broken: AtomicBool,
}

impl Engine {
    fn new(gpu: &Arc<Gpu>) -> Arc<Self> {
        Arc::new(Self {
            gpu: Arc::clone(gpu),
            batches: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            stuck: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })
    }
}

impl Dma for Engine {
    fn submit(&self, ops: &[DmaOp], _: &[usize]) -> Result<u64, String> {
        if self.broken.load(Ordering::Relaxed) {
            return Err("broken on purpose".into());
        }
        for op in ops {
            let (len, place) = (op.len as usize, |addr: u64| OFFSET + addr - BASE);
            if op.dst >= BASE {
                // SAFETY: the engine's own memory, which it keeps until the copy has ended.
                let bytes = unsafe { std::slice::from_raw_parts(op.src as *const u8, len) };
                let written = self.gpu.0.write_all_at(bytes, place(op.dst));
                written.map_err(|e| e.to_string())?;
            } else {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts_mut(op.dst as *mut u8, len) };
                let read = self.gpu.0.read_exact_at(bytes, place(op.src));
                read.map_err(|e| e.to_string())?;
            }
        }
        Ok(self.batches.fetch_add(1, Ordering::Relaxed))
    }

    fn poll(&self, _: u64) -> Result<bool, String> {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        Ok(looks % 3 == 2 && !self.stuck.load(Ordering::Relaxed))
    }

    fn dmabuf(&self, addr: u64, len: usize) -> Option<(OwnedFd, u64)> {
        self.gpu.dmabuf(addr, len)
    }
}

/// Two queue pairs over SRD, and GPU memory on both sides: a word there, and where its old values go here.
struct Words {
    p: Pair,
    gpu: Arc<Gpu>,
    engine: Arc<Engine>,
    near: Mr,
    _far: Mr,
    word: Remote,
}

impl Words {
    fn new(seed: u64) -> Self {
        let srd = Some(Srd {
            seed,
            ..Srd::default()
        });
        let p = Pair::new(Config {
            srd,
            ..Config::default()
        });
        let gpu = Gpu::new(8192);
        let engine = Engine::new(&gpu);
        let register = |from| register_with(&p, &gpu, Arc::<Engine>::clone(&engine), from, 4096);
        let (near, far) = (register(0), register(4096));
        let keys = far.on_port(&p.port).expect("registers");
        let word = Remote {
            addr: keys.base + 64,
            key: Key(keys.rkey),
        };
        Self {
            p,
            gpu,
            engine,
            near,
            _far: far,
            word,
        }
    }

    fn near(&self, at: u64, len: u32) -> Local {
        Local {
            addr: self.near.addr() + at,
            key: self.near.key(),
            len,
        }
    }

    /// Words here and there.
    fn get(&self, at: u64) -> u64 {
        u64::from_ne_bytes(self.gpu.bytes(at, 8).try_into().expect("eight"))
    }

    fn there(&self) -> u64 {
        self.get(4096 + 64)
    }
}

#[test]
fn over_srd_atomics_reach_gpu_memory_by_its_copy_engine() {
    for seed in [1, 7, 99] {
        let mut w = Words::new(seed);
        let (word, old) = (w.word, w.near(8, 8));
        w.p.run(Wqe::fetch_add(word, old, 40).expect("eight bytes"));
        w.p.run(Wqe::fetch_add(word, old, 2).expect("eight bytes"));
        assert_eq!((w.there(), w.get(8)), (42, 40));
        w.p.run(Wqe::compare_swap(word, old, 42, 7).expect("eight bytes"));
        assert_eq!((w.there(), w.get(8)), (7, 42));
        w.p.run(Wqe::compare_swap(word, old, 42, 9).expect("eight bytes"));
        assert_eq!((w.there(), w.get(8)), (7, 7));
        let old = w.near(16, 4);
        w.p.run(Wqe::masked_fetch_add4(word, old, 5, 0).expect("four bytes"));
        assert_eq!((w.there(), w.gpu.bytes(16, 4)), (12, vec![0, 0, 0, 7]));
        // The word or the old value alone, and many behind each other, with puts between them that each announces.
        let host = w.p.rig.region(64);
        w.p.run(Wqe::fetch_add(word, host.local(0, 8), 0).expect("eight bytes"));
        assert_eq!(host.u64(0), 12);
        let (there, old) = (w.p.there(&host, 8), w.near(24, 8));
        w.p.run(Wqe::fetch_add(there, old, 3).expect("eight bytes"));
        assert_eq!((host.u64(8), w.get(24)), (3, 0));
        let put = Remote {
            addr: word.addr + 64,
            ..word
        };
        let mut last = 0;
        for i in 0..100 {
            host.set_u64(16, i);
            let wqe = Wqe::write_inline(put, &i.to_ne_bytes()).expect("fits");
            w.p.a.post(&wqe.signalled(false));
            last =
                w.p.a
                    .go(Wqe::fetch_add(word, host.local(24, 8), 1).expect("eight bytes"));
            if i % 8 == 7 {
                w.p.a.wait(&w.p.rig, last);
                assert_eq!((w.there(), w.get(4096 + 128)), (13 + i, i));
                assert_eq!(host.u64(24), 12 + i);
            }
        }
        w.p.a.wait(&w.p.rig, last);
        assert_eq!(w.there(), 112);
        // Behind the region.
        let beyond = Remote {
            addr: word.addr + 4096 - 64,
            ..word
        };
        let wqe = Wqe::fetch_add(beyond, host.local(24, 8), 1).expect("eight bytes");
        let fault = w.p.fails(wqe);
        assert_eq!(fault, (Syndrome::REMOTE_ACCESS, Vendor::RKEY_RANGE));
    }
}

#[test]
fn over_srd_a_copy_engine_that_fails_or_hangs_fails_what_needs_it() {
    let mut w = Words::new(1);
    let word = w.word;
    let host = w.p.rig.region(64);
    let (there, here) = (host.local(0, 8), w.near(8, 8));
    w.engine.broken.store(true, Ordering::Relaxed);
    let fault =
        w.p.fails(Wqe::fetch_add(word, there, 1).expect("eight bytes"));
    assert_eq!(fault, (Syndrome::REMOTE_OP, Vendor::NONE));
    w.p.again();
    let at = w.p.there(&host, 8);
    let fault = w.p.fails(Wqe::fetch_add(at, here, 1).expect("eight bytes"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::DMA_FAILED));
    w.engine.broken.store(false, Ordering::Relaxed);
    // One that hangs holds back a reset of nobody, and what ends later is told to nobody.
    for wqe in [
        Wqe::fetch_add(word, there, 1).expect("eight bytes"),
        Wqe::fetch_add(at, here, 1).expect("eight bytes"),
    ] {
        w.p.again();
        w.engine.stuck.store(true, Ordering::Relaxed);
        let posted = w.p.a.go(wqe);
        for _ in 0..300 {
            w.p.rig.driver.poll();
        }
        assert!(w.p.a.completion(posted).is_none(), "it cannot be over");
        w.p.again();
        w.engine.stuck.store(false, Ordering::Relaxed);
        // What was under way may still end; what begins now comes behind it, with results of its own.
        w.p.run(Wqe::fetch_add(word, here, 1 << 32).expect("eight bytes"));
        for i in 1..10 {
            let before = w.there();
            w.p.run(Wqe::fetch_add(word, here, i).expect("eight bytes"));
            assert_eq!((w.get(8), w.there()), (before, before + i));
        }
    }
}
