//! Copies: in batches of either call, one by one, refused, stalled.

use super::*;

fn copy_all_ways(mock: &Mock, gpu: &Gpu) {
    let copier = gpu.copier().unwrap();
    // All by the engine: a driver that does not take the kernel's PTX is no reason to fail.
    let notes = gpu.info().notes.join("; ");
    assert!(notes.contains("kernel cannot be loaded"), "{notes}");
    let host = gpu.alloc(MemKind::PinnedHost, 1 << 16).unwrap();
    let device = gpu.alloc(MemKind::Device, 1 << 16).unwrap();
    let data: Vec<u8> = (0..1 << 16).map(|i| (i * 13 + i / 251) as u8).collect();
    host.write(0, &data).unwrap();
    let (h, d) = (host.device_addr(), device.device_addr());
    // 1000 copies of 64 bytes in, then back to other places.
    let inward: Vec<_> = (0..1000)
        .map(|i| CopyOp {
            dst: d + i * 64,
            src: h + (999 - i) * 64,
            len: 64,
        })
        .collect();
    // SAFETY: (here and below) ranges of buffers that outlive the copies.
    let first = unsafe { copier.submit(&inward) }.unwrap();
    copier.wait(first, LONG).unwrap();
    let mut back = vec![0; 1 << 16];
    device.read(0, &mut back).unwrap();
    for i in 0..1000 {
        assert_eq!(back[i * 64..][..64], data[(999 - i) * 64..][..64]);
    }
    // Within the GPU: refused, or by way of host memory.
    let within = [CopyOp {
        dst: d + 32768,
        src: d,
        len: 32768,
    }];
    // SAFETY: as above.
    let error = unsafe { copier.submit(&within) }.unwrap_err();
    assert!(
        matches!(error, GpuError::SameGpuCopy { len: 32768, .. }),
        "{error}"
    );
    // SAFETY: as above.
    let second = unsafe { copier.submit_via_host(&within) }.unwrap();
    assert_eq!(second, first + 1);
    copier.wait(second, LONG).unwrap();
    let mut whole = vec![0; 1 << 16];
    device.read(0, &mut whole).unwrap();
    assert!(whole[..32768] == back[..32768] && whole[32768..] == back[..32768]);
    // In steps: a thousand words to one place, each after the one before, for four events; and a step of several, which is a batch.
    let (events, calls, lone) = (
        copier.stats().batches,
        mock.get("batches"),
        mock.get("copies"),
    );
    let mut words: Vec<_> = (0..1000)
        .map(|i| CopyOp {
            dst: d,
            src: h + i * 8,
            len: 8,
        })
        .collect();
    words.extend((1..=24).map(|i| CopyOp {
        dst: d + i * 8,
        src: h + i * 8,
        len: 8,
    }));
    let steps: Vec<usize> = (1..=1000).collect();
    // SAFETY: as above.
    let stepped = unsafe { copier.submit_in_steps(&words, &steps) }.unwrap();
    copier.wait(stepped, LONG).unwrap();
    device.read(0, &mut whole).unwrap();
    assert_eq!(whole[..8], data[999 * 8..1000 * 8], "the last step is last");
    assert_eq!(whole[8..200], data[8..200]);
    assert_eq!(copier.stats().batches - events, 4);
    assert_eq!(mock.get("batches") - calls, u64::from(copier.batched()));
    // Two of them by the reads of this test.
    assert!((1024..=1026).contains(&(mock.get("copies") - lone)));
    // To the other GPU.
    let peer = mock.foreign(64, 1);
    // SAFETY: as above.
    let third = unsafe {
        copier.submit(&[CopyOp {
            dst: peer,
            src: d,
            len: 64,
        }])
    }
    .unwrap();
    copier.wait(third, LONG).unwrap();
    assert!(copier.poll(first).unwrap());
    let stats = copier.stats();
    assert_eq!(
        (stats.copies, stats.via_host, stats.bytes),
        (2026, 1, 64_000 + 32_768 + 1024 * 8 + 64)
    );
    assert!(copier.oldest().is_none());
    mock.clean();
}

#[test]
fn copies_go_in_batches_of_the_new_call() {
    let mock = Mock::build("batch2", &["-DBATCH=2", "-DWITHOUT_COPIES"]);
    let gpu = mock.open();
    assert!(gpu.copier().unwrap().batched());
    copy_all_ways(&mock, &gpu);
    assert_eq!((mock.get("batches"), mock.get("batched_copies")), (5, 1024));
}

#[test]
fn copies_go_in_batches_of_the_old_call() {
    let mock = Mock::build("batch1", &["-DBATCH=1", "-DWITHOUT_COPIES"]);
    let gpu = mock.open();
    assert!(gpu.copier().unwrap().batched());
    copy_all_ways(&mock, &gpu);
    assert_eq!((mock.get("batches"), mock.get("batched_copies")), (5, 1024));
}

#[test]
fn copies_go_one_by_one_without_batches() {
    let mock = Mock::build("batch0", &["-DBATCH=0", "-DWITHOUT_COPIES"]);
    let gpu = mock.open();
    assert!(!gpu.info().can.batch_copy && !gpu.copier().unwrap().batched());
    copy_all_ways(&mock, &gpu);
    assert_eq!(mock.get("batches"), 0);
}

#[test]
fn copies_that_cannot_be_are_refused_whole() {
    let mock = Mock::build("refused", &[]);
    let gpu = mock.open();
    let copier = gpu.copier().unwrap();
    let host = gpu.alloc(MemKind::PinnedHost, 4096).unwrap();
    let device = gpu.alloc(MemKind::Device, 4096).unwrap();
    let (h, d) = (host.device_addr(), device.device_addr());
    let copies = mock.get("copies");
    let stack = 0u64;
    let stack = std::ptr::from_ref(&stack).addr() as u64;
    let good = CopyOp {
        dst: d,
        src: h,
        len: 8,
    };
    for bad in [
        CopyOp {
            dst: d,
            src: stack,
            len: 8,
        },
        CopyOp {
            dst: d + 4090,
            src: h,
            len: 8,
        },
        CopyOp {
            dst: d,
            src: h + 4096,
            len: 1,
        },
        CopyOp {
            dst: d,
            src: h,
            len: u64::MAX,
        },
    ] {
        // SAFETY: refused.
        let error = unsafe { copier.submit(&[good, bad]) }.unwrap_err();
        assert!(matches!(error, GpuError::UnknownMemory { .. }), "{error}");
    }
    // SAFETY: refused.
    let error = unsafe {
        copier.submit(&[CopyOp {
            dst: h,
            src: h,
            len: 8,
        }])
    }
    .unwrap_err();
    assert!(matches!(error, GpuError::Unsupported { .. }), "{error}");
    let error = copier.poll(1).unwrap_err();
    assert!(
        matches!(
            error,
            GpuError::UnknownTicket {
                ticket: 1,
                newest: 0
            }
        ),
        "{error}"
    );
    assert_eq!(
        mock.get("copies"),
        copies,
        "part of a refused call was copied"
    );
    // Freed memory is forgotten.
    // SAFETY: buffers that live.
    let ticket = unsafe { copier.submit(&[good]) }.unwrap();
    copier.wait(ticket, LONG).unwrap();
    drop(device);
    // SAFETY: refused.
    let error = unsafe { copier.submit(&[good]) }.unwrap_err();
    assert!(matches!(error, GpuError::UnknownMemory { .. }), "{error}");
    mock.clean();
}

#[test]
fn a_stalled_copy_is_told_and_submitting_does_not_pile_up_in_the_driver() {
    let mock = Mock::build("stall", &[]);
    let gpu = mock.open();
    let copier = gpu.copier().unwrap();
    let host = gpu.alloc(MemKind::PinnedHost, 4096).unwrap();
    let device = gpu.alloc(MemKind::Device, 4096).unwrap();
    let op = CopyOp {
        dst: device.device_addr(),
        src: host.device_addr(),
        len: 8,
    };
    let before = mock.get("copies");
    mock.call_int("mock_hold_copies", 1);
    // SAFETY: buffers that outlive the copies.
    let tickets: Vec<_> = (0..40)
        .map(|_| unsafe { copier.submit(&[op; 100]) }.unwrap())
        .collect();
    assert_eq!(tickets, (1..=40).collect::<Vec<_>>());
    assert!(
        mock.get("copies") - before <= 512,
        "more in the driver than it takes without blocking"
    );
    assert!(!copier.poll(1).unwrap());
    assert_eq!(copier.oldest().unwrap().0, 1);
    let error = copier.wait(40, Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, GpuError::TimedOut { .. }), "{error}");
    copier.set_stall_limit(Duration::ZERO);
    let error = copier.poll(1).unwrap_err();
    assert!(
        matches!(error, GpuError::CopyStalled { ticket: 1, .. }),
        "{error}"
    );
    assert!(
        error.to_string().contains("CUDA_DEVICE_MAX_CONNECTIONS"),
        "{error}"
    );
    copier.set_stall_limit(LONG);
    mock.call_int("mock_hold_copies", 0);
    copier.wait(40, LONG).unwrap();
    assert!(tickets.iter().all(|&t| copier.poll(t).unwrap()));
    assert_eq!(mock.get("copies") - before, 4000);
    mock.clean();
}
