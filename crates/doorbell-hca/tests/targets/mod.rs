//! Fuzz targets of the engine, shared with the stable tests: any bytes as a send ring, its doorbells included.
//! One process keeps one HCA: an input that leaves it in a bad state is found by the next one.

#[path = "../common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::time::Duration;

use common::{Options, Region, Rig};
pub use common::{Replay, seed};
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::{Access, Addressing, HcaConfig};
use doorbell_wire::{Chunk, Wqe, seg};

/// Bytes of each region.
const LEN: usize = 128;

struct World {
    rig: Rig,
    open: Vec<Region>,
    closed: Region,
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new());
}

impl World {
    fn new() -> Self {
        let rig = Rig::with(HcaConfig {
            stale_limit: Duration::ZERO,
            rnr_limit: Duration::ZERO,
            ..HcaConfig::caller_driven()
        });
        let open = vec![
            rig.region(LEN),
            rig.region_with(LEN, Access::ALL, Addressing::At(0x100), rig.pd),
        ];
        let closed = rig.region_with(LEN, Access::NONE, Addressing::Zero, rig.pd);
        closed.fill(0, &[0x33; LEN]);
        Self { rig, open, closed }
    }
}

/// The first byte chooses the kind of QP; then come 64-byte slots whose first byte says which fields are made right (index and QP
/// number, keys), and between them doorbells.
pub fn ring(data: &[u8]) {
    let [shape, slots @ ..] = data else { return };
    WORLD.with_borrow_mut(|world| {
        let handlers = [
            NicHandler::ProducerWord,
            NicHandler::DoorbellRecord,
            NicHandler::DoorbellOnly,
        ];
        let mut qp = world.rig.loopback(Options {
            log_depth: shape & 3,
            kind: if shape & 4 == 0 {
                CqKind::Collapsed
            } else {
                CqKind::PerSlot
            },
            handler: handlers[usize::from(shape >> 3) % 3],
            receive: shape & 32 != 0,
            ..Options::default()
        });
        let keys: Vec<_> = world
            .open
            .iter()
            .chain([&world.closed])
            .map(Region::key)
            .collect();
        for slot in slots.chunks_exact(64) {
            let fix = slot[0];
            let at = qp.pi;
            let mut chunks: Vec<Chunk> = slot
                .as_chunks::<16>()
                .0
                .iter()
                .map(Chunk::from_bytes)
                .collect();
            if fix & 1 != 0 {
                // Opcode, ds and flags stay the input's own; opmod is 0, 8 or 9.
                let (first, second) = (chunks[0].be32(0), chunks[0].be32(1));
                let opmod = [0, 0, 8, 9][usize::from(fix >> 6)];
                let word = qp.hca_qp().qpn().get() << 8 | (second & 0xff);
                let flags = chunks[0].byte(11);
                chunks[0] =
                    seg::ctrl_raw(at as u16, first as u8, opmod, word.swap_bytes(), flags, 9);
            }
            for (i, chunk) in chunks.iter_mut().enumerate().skip(1) {
                if fix & (2 << i) != 0 {
                    let key = keys[usize::from(slot[16 * i]) % keys.len()];
                    *chunk = if i == 1 {
                        seg::raddr(chunk.be64(0) & 0x1ff, key)
                    } else {
                        seg::data(chunk.be32(0) & 0x8000_00ff, key, chunk.be64(1) & 0x1ff)
                    };
                }
            }
            qp.post_chunks(&chunks, 1);
            if slot[63] & 1 != 0 || qp.pi % qp.depth() == 0 {
                qp.ring();
                world.rig.driver.poll();
                world.rig.driver.poll();
            }
            if slot[63] & 0x1e == 0x1e {
                qp.ring_raw(u64::from_le_bytes([
                    slot[1], slot[2], slot[3], slot[4], slot[5], 0, 0, 0,
                ]));
            }
        }
        qp.ring();
        for _ in 0..4 {
            world.rig.driver.poll();
        }
        assert!(world.open.iter().all(Region::canaries_intact));
        assert!(world.closed.canaries_intact());
        assert_eq!(world.closed.bytes(0, LEN), [0x33; LEN]);
        assert!(world.rig.hca.health()[0].dead.is_none());
        let mut control = world.rig.loopback(Options::default());
        control.run(&world.rig, Wqe::nop());
    });
}
