//! Doorbell over an RDMA device that nobody here wrote: soft-RoCE in a Linux guest, in which the command itself runs over `verbs:rxe0`. Every operation
//! and every way to fail are `hwtest`'s steps; here are the sizes, sharing modes and tests of `perf`, a device that is deleted in
//! mid-transfer, two guests on one wire, and unmodified perftest as the peer.
//!
//! Needs QEMU and the guest: `peers/rxe/setup.sh target/rxe`, then
//! `DOORBELL_RXE=$PWD/target/rxe cargo test -p doorbell-cli --test peer_verbs -- --ignored peer_verbs_`.

mod guest;
mod sides;
mod two;

use guest::{guest, well};

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_every_operation_and_every_way_to_fail() {
    for (device, signals) in [("rxe0", 1_000_000), ("rxe0?post=list", 20_000)] {
        let said = well(&format!(
            "/mnt/doorbell hwtest --no-perf --device '{device}' --signals {signals} --timeout 60 --json /tmp/h.json --page /tmp/h.txt && cat /tmp/h.txt"
        ));
        let page = said
            .split("Doorbell hardware test")
            .nth(1)
            .expect("the page");
        assert_eq!(page.matches("  ok  ").count(), 10, "{said}");
        assert!(!page.contains("FAILED"), "{said}");
    }
}

/// Runs of `perf` one after the other, each checked.
fn perf(runs: &[&str]) {
    let script: String = runs
        .iter()
        .map(|rest| {
            // Two processes on two CPUs: who waits drives the engine.
            format!("/mnt/doorbell perf {rest} --link verbs:rxe0 --gpu host --hca-cores 0 --check --timeout 60 || exit 1\n")
        })
        .collect();
    well(&script);
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_perf_checks_every_byte_in_every_sharing_mode() {
    perf(&[
        "put-bw --size 1,8,4K,256K --iters 100",
        "put-bw --size 64 --iters 200 --threads 4 --sharing gpu",
        "put-bw --size 64 --iters 200 --threads 4 --sharing block",
        "put-bw --size 64 --iters 100 --threads 3",
        "get-bw --size 8,64K --iters 100",
    ]);
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_perf_checks_messages_atomics_and_latencies() {
    perf(&[
        "send-bw --size 1,4K --iters 100",
        "atomic-rate --iters 300",
        "put-lat --size 8 --iters 50",
        "signal-lat --size 8 --iters 50",
        "get-lat --size 8 --iters 50",
        "send-lat --size 8 --iters 50",
    ]);
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_serve_and_connect_find_the_device_by_address() {
    well(
        "/mnt/doorbell serve --once --gpu host --listen 192.168.77.2 >/tmp/serve 2>&1 &\n\
         until grep -q listening /tmp/serve; do sleep 1; done\n\
         /mnt/doorbell perf put-bw --link verbs --connect 192.168.77.2 --gpu host --size 4K --iters 300 --check --timeout 60 || exit 1\n\
         wait $! || exit 2\n\
         cat /tmp/serve; grep -q 'over verbs' /tmp/serve",
    );
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_unmodified_perftest_in_both_roles() {
    let said = well(
        "ib_write_bw -d rxe0 -x 1 -m 1024 -F -n 1000 -s 4096 --report_gbits >/tmp/their 2>&1 &\n\
         sleep 3\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --peer perftest --connect 127.0.0.1 --mtu 1024 --gpu host --size 4K --iters 1000 --timeout 60 || exit 1\n\
         wait $! || exit 2\n\
         cat /tmp/their\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --peer perftest --mtu 1024 --gpu host --size 4K --iters 1000 --timeout 60 >/tmp/ours 2>&1 &\n\
         until grep -q waiting /tmp/ours; do sleep 1; done\n\
         ib_write_bw -d rxe0 -x 1 -m 1024 -F -n 1000 -s 4096 127.0.0.1 || exit 3\n\
         wait $! || { cat /tmp/ours; exit 4; }\n\
         cat /tmp/ours",
    );
    assert!(said.contains("BW average"), "{said}");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_a_device_that_is_deleted_in_mid_transfer_hangs_nobody() {
    // The kernel's soft-RoCE keeps a deleted device alive for those who have it open; the mock's tests have devices that are really gone.
    let said = guest(
        "/mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host --size 64K --secs 10 --timeout 20 >/tmp/out 2>&1 &\n\
         run=$!\n\
         until [ \"$(rdma resource show qp | grep -c doorbell)\" -ge 2 ]; do sleep 1; done\n\
         rdma link delete rxe0\n\
         wait $run; echo \"ended rc=$?\"\n\
         cat /tmp/out\n\
         /mnt/doorbell info 2>&1 | grep -A3 '  verbs'\n\
         rdma link add rxe0 type rxe netdev eth0\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host --size 64 --iters 200 --check --timeout 60; echo \"again rc=$?\"",
    );
    let removed = said.contains("the device was removed or has failed");
    let ended = said.contains("ended rc=0") || said.contains("ended rc=1") && removed;
    assert!(ended, "{said}");
    assert!(said.contains("there is no RDMA device"), "{said}");
    assert!(said.contains("again rc=0"), "{said}");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_mistakes_of_a_site_are_explained() {
    // Of a port that goes down, soft-RoCE of Linux 6.1 sometimes repeats twice and then neither goes on nor gives up (its queue pair stays in RTS, its counters
    // stand): that is tried again.
    let said = guest(
        "/mnt/doorbell perf put-bw --link verbs:nosuch --gpu host\n\
         ip link set eth0 down; sleep 1\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host\n\
         ip link set eth0 up; sleep 1\n\
         /mnt/doorbell perf put-bw --link 'verbs:rxe0?gid=77' --gpu host\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0:9 --gpu host\n\
         DOORBELL_IBVERBS=/no/such.so /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host\n\
         chmod 755 /; mkdir -m 777 /tmp/own; echo 'user:x:1000:1000::/tmp:/bin/sh' >/etc/passwd; echo 'rdma:x:77:' >/etc/group\n\
         as_user() { su -s /bin/sh user -c \"cd /tmp/own; /mnt/doorbell hwtest --no-perf --signals 100\"; echo \"hwtest rc=$?\"; }\n\
         chown 0:77 /dev/infiniband/uverbs0; chmod 660 /dev/infiniband/uverbs0; as_user\n\
         chmod 666 /dev/infiniband/uverbs0; ulimit -l 4096; as_user\n\
         for again in 1 2 3; do\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host --hca-cores 0 --size 4K --secs 60 --timeout 20 >/tmp/went 2>&1 & run=$!\n\
         until [ \"$(rdma resource show qp | grep -c doorbell)\" -ge 2 ]; do sleep 1; done\n\
         sleep 1; ip link set eth0 down; wait $run; echo \"went down rc=$?\"; cat /tmp/went\n\
         grep -q 'nothing completed' /tmp/went || break\n\
         ip link set eth0 up; sleep 1; done\n",
    );
    for words in [
        // libibverbs itself says that there is no such file.
        "opening it (/dev/infiniband/uverbs0): Permission denied (os error 13): /dev/infiniband/uverbs0 has group rdma and mode 0660",
        "hwtest rc=1",
        "memory that may be locked: 4 MiB, which is TOO LITTLE",
        "FAILED  opening, memory, queue pairs: software HCA: RDMA device rxe0: registering host memory",
        "hwtest rc=3",
        "or its port went down",
        "went down rc=1",
        "no RDMA device \"nosuch\"; there is rxe0",
        "is down, not active",
        "no GID at index 77",
        "ports 1 to 1, port 9 was asked for",
        "install rdma-core",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}
