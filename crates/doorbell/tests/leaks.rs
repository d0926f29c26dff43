//! Devices come and go and leave nothing: threads, descriptors, mappings. One test, so that no other one is counted.
#![cfg(all(target_os = "linux", not(miri)))]

mod common;

use common::{Bench, LONG, caller_driven, device};
use doorbell::{CqKind, Dims, Place, Proxy, ProxyConfig};

fn count(of: &str) -> usize {
    std::fs::read_dir(of).expect("procfs").count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .expect("procfs")
        .lines()
        .count()
}

fn once(caller: bool) {
    let b = Bench::new(
        if caller { caller_driven() } else { device() },
        Place::Shared,
        1 << 16,
    );
    let qps: Vec<_> = (0..20)
        .map(|_| {
            b.pd.qp()
                .depth(64)
                .cq(CqKind::PerSlot)
                .companion(64)
                .build()
                .unwrap()
                .connect_to_self()
                .unwrap()
        })
        .collect();
    let export = doorbell::export_array(&qps, doorbell::ExportLayout::Packed).unwrap();
    let mut put = b.rate(&export, 64);
    put.iters = 100;
    assert_eq!(b.run("put_bw", Dims::new(1, 1), &put)[0].error, 0);
    drop(export);
    let listener = b.device.listen("@doorbell-leak-test").unwrap();
    let other = device();
    let peer = other.dial("@doorbell-leak-test", LONG).unwrap();
    let mine = listener.accept(LONG).unwrap();
    drop((listener, other, mine, peer));
    let config = ProxyConfig {
        depth: 64,
        threads: 2,
        cpus: Vec::new(),
        local_key: b.source.key(),
        remote_key: b.target.key(),
    };
    drop(Proxy::start(&b.device, &qps, &config).unwrap());
}

#[test]
fn nothing_is_left_behind() {
    // The first round makes what stays for good: thread-local and allocator memory, the fork hook.
    once(false);
    once(true);
    let before = (count("/proc/self/task"), count("/proc/self/fd"));
    let maps = mappings();
    for i in 0..20 {
        once(i % 2 == 0);
    }
    assert_eq!((count("/proc/self/task"), count("/proc/self/fd")), before);
    // The allocator may keep an arena or a stack more; a leak of one mapping a device would show as 20 and more.
    assert!(
        mappings() < maps + 15,
        "{} mappings, {maps} before",
        mappings()
    );
}
