//! `on_error=release` from above: a waiter that plays foreign device code (it polls CQEs and signals and never looks at errors) is let go,
//! and the host was told before.
#![cfg(all(target_os = "linux", not(miri)))]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell::cpu::{self, Post};
use doorbell::{Access, AsyncError, CpuQp, CqKind, Device, GpuSelect, Memory, OnError, Place, Qp};

const PATIENCE: Duration = Duration::from_secs(20);

fn word(memory: &Memory, at: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.read(at, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Index and owner of the CQE of slot `at`: what foreign loops look at.
fn is_complete(qp: &Qp, kind: CqKind, at: u64) -> bool {
    let cqe = qp.cq().peek(at as u32).unwrap();
    let (index, op_own) = (u16::from_be_bytes([cqe[60], cqe[61]]), cqe[63]);
    match kind {
        CqKind::PerSlot => op_own & 1 == (at >> qp.depth().ilog2()) as u8 & 1 && op_own >> 4 != 0xf,
        CqKind::Collapsed => index.wrapping_sub(at as u16) < 0x8000 && op_own >> 4 != 0xf,
    }
}

#[test]
fn whoever_ignores_errors_is_let_go_after_the_host_was_told() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let device = Device::builder()
            .gpu(GpuSelect::Host)
            .hca_cores(1)
            .on_error(OnError::Release)
            .open()
            .unwrap();
        let pd = device.pd().unwrap();
        let memory = device.alloc(Place::Host, 4096).unwrap();
        let signals = device.alloc(Place::Host, 64).unwrap();
        let mr = pd.register(&memory, Access::ALL).unwrap();
        let builder = pd.qp().depth(64).cq(kind);
        let qp = builder
            .release_signals(&signals, 8..24)
            .build()
            .unwrap()
            .connect_to_self()
            .unwrap();
        let mut cpu = CpuQp::new(&qp).unwrap();
        let how = Post::by(cpu::deadline(PATIENCE));
        let (good, bad) = (
            cpu::remote(&mr.remote(), 2048),
            cpu::remote(&mr.remote(), 4096),
        );
        let mut last = 0;
        {
            let queue = cpu.queue().unwrap();
            for to in [good, good, bad, good, good] {
                last += 1;
                queue
                    .put(to, cpu::local(&mr, 0, 64), how.without_ringing())
                    .unwrap();
            }
            last -= 1;
        }
        let (stop, freed) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !(is_complete(&qp, kind, last) && word(&signals, 16) >= 1000) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    std::hint::spin_loop();
                }
                // Let go: by now the host must be able to know.
                let told = device.next_error(Duration::ZERO);
                assert!(
                    matches!(told, Some(AsyncError::Qp { qpn, .. }) if qpn == qp.qpn()),
                    "{told:?}"
                );
                freed.store(true, Ordering::Release);
            });
            cpu.queue()
                .unwrap()
                .put(good, cpu::local(&mr, 0, 64), how)
                .unwrap();
            let until = Instant::now() + PATIENCE;
            while !freed.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(
            freed.load(Ordering::Acquire),
            "{kind:?}: the loop did not end"
        );
        let fault = qp.error().expect("in error");
        assert_eq!(fault.wqe_index(), 2);
        // Those that were not named stay as they are.
        assert_eq!([word(&signals, 0), word(&signals, 24)], [0, 0]);
        // Bit 62, and the lower half moved on: zero is past anything awaited either way.
        assert_eq!(word(&signals, 8), 1 << 62 | 1 << 30);
    }
}

#[test]
fn without_being_asked_nothing_is_let_go() {
    let device = Device::builder()
        .gpu(GpuSelect::Host)
        .caller_driven()
        .open()
        .unwrap();
    let pd = device.pd().unwrap();
    let signals = device.alloc(Place::Host, 64).unwrap();
    let qp = pd
        .qp()
        .depth(64)
        .release_signals(&signals, 0..64)
        .build()
        .unwrap();
    let qp = qp.connect_to_self().unwrap();
    qp.fail().unwrap();
    while device.poll() {}
    assert!((0..8).all(|i| word(&signals, 8 * i) == 0));
    let error = pd
        .qp()
        .release_signals(&signals, 4..12)
        .build()
        .unwrap_err()
        .to_string();
    assert!(error.contains("aligned"), "{error}");
}
