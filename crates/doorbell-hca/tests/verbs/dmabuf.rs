//! GPU memory: registered by its dma-buf where the device can, by its address otherwise, and never both unknown to the poster.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use doorbell_hca::dma::{Dma, DmaOp};
use doorbell_hca::{Access, Addressing, Memory, Mr, MrConfig};
use doorbell_verbs_mock::Config;
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
    let config = MrConfig {
        memory: Memory::Device {
            addr: BASE + from,
            len,
            dma: Arc::<Gpu>::clone(gpu),
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
