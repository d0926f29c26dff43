//! Doorbell over an RDMA device that nobody here wrote: soft-RoCE in a Linux guest, in which the command itself runs over `verbs:rxe0`. Every operation
//! and every way to fail are `hwtest`'s steps; here are the sizes, sharing modes and tests of `perf`, a device that is deleted in
//! mid-transfer, two guests on one wire, and unmodified perftest as the peer.
//!
//! Needs QEMU and the guest: `peers/rxe/setup.sh target/rxe`, then
//! `DOORBELL_RXE=$PWD/target/rxe cargo test -p doorbell-cli --test peer_verbs -- --ignored`.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A guest boots in some eight seconds; what runs in it is a hundred times slower than here.
const PATIENCE: Duration = Duration::from_secs(280);
/// Two guests on two CPUs, and all that `hwtest` measures.
const LONG: Duration = Duration::from_secs(560);

/// A guest that runs a script, and has the command as `/mnt/doorbell`.
struct Guest {
    child: Child,
    said: mpsc::Receiver<String>,
    started: Instant,
    _share: tempfile::TempDir,
}

impl Guest {
    /// `place`: which of two on one wire it is, and the wire's two ports; a guest alone has a wire to nowhere.
    fn boot(script: &str, place: Option<(usize, [u16; 2])>) -> Self {
        let folder =
            std::env::var("DOORBELL_RXE").expect("DOORBELL_RXE names the folder of setup.sh");
        let share = tempfile::tempdir().expect("a folder");
        let command = share.path().join("doorbell");
        std::fs::copy(env!("CARGO_BIN_EXE_doorbell"), command).expect("a copy of the command");
        let file = share.path().join("script");
        std::fs::write(&file, script).expect("the script");
        let all = |path: PathBuf, mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, mode).expect("permissions");
        };
        all(file, 0o644);
        all(share.path().to_owned(), 0o755);
        let vm = concat!(env!("CARGO_MANIFEST_DIR"), "/../../peers/rxe/vm.sh");
        let mut command = Command::new(vm);
        command
            .args([folder.as_str(), "sh /mnt/script"])
            .env("SHARE", share.path())
            .env("SMP", "2")
            .env("MEM", "512");
        if let Some((side, ports)) = place {
            command
                .env("LOCAL", ports[side].to_string())
                .env("PEER", ports[1 - side].to_string())
                .env("IP", format!("192.168.77.{}/24", side + 2))
                .env("MAC", format!("52:54:00:00:00:0{}", side + 2));
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("QEMU");
        let output = child.stdout.take().expect("piped");
        let (tell, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            said,
            started: Instant::now(),
            _share: share,
        }
    }

    /// Everything that it said, once it has ended.
    fn end(self, patience: Duration) -> String {
        let mut all = String::new();
        loop {
            let rest = patience.saturating_sub(self.started.elapsed());
            match self.said.recv_timeout(rest) {
                Ok(line) => {
                    all.push_str(&line);
                    all.push('\n');
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the guest did not end:\n{all}"),
            }
        }
        all
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a script in a guest of its own; returns what was said.
fn guest(script: &str) -> String {
    Guest::boot(script, None).end(PATIENCE)
}

/// Runs two scripts in two guests on one wire: the first is 192.168.77.2, the second 192.168.77.3.
fn guests(scripts: [&str; 2], patience: Duration) -> [String; 2] {
    let ports = [(); 2].map(|()| {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        socket.local_addr().expect("its number").port()
    });
    let [first, second] = [0, 1].map(|i| Guest::boot(scripts[i], Some((i, ports))));
    // The second is where the test is: what it said is worth more if one does not end.
    let second = second.end(patience);
    [first.end(patience), second]
}

/// Runs it, and expects its end with status 0.
fn well(script: &str) -> String {
    let said = guest(script);
    assert!(said.contains("CMD-END rc=0"), "{said}");
    said
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_every_operation_and_every_way_to_fail() {
    for device in ["rxe0", "rxe0?post=list"] {
        let said = well(&format!(
            "/mnt/doorbell hwtest --no-perf --device '{device}' --signals 20000 --timeout 60 --json /tmp/h.json --page /tmp/h.txt && cat /tmp/h.txt"
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
    let said = guest(
        "/mnt/doorbell perf put-bw --link verbs:nosuch --gpu host\n\
         ip link set eth0 down; sleep 1\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host\n\
         ip link set eth0 up; sleep 1\n\
         /mnt/doorbell perf put-bw --link 'verbs:rxe0?gid=77' --gpu host\n\
         /mnt/doorbell perf put-bw --link verbs:rxe0:9 --gpu host\n\
         DOORBELL_IBVERBS=/no/such.so /mnt/doorbell perf put-bw --link verbs:rxe0 --gpu host\n",
    );
    for words in [
        "no RDMA device \"nosuch\"; there is rxe0",
        "is down, not active",
        "no GID at index 77",
        "ports 1 to 1, port 9 was asked for",
        "install rdma-core",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// The server of two guests: what serves in the background, with words when it does; and the end of the test, when the other says so.
const SERVE: &str = "\
serve() { /mnt/doorbell serve --gpu host >/tmp/serve 2>&1 & serving=$!; until grep -q listening /tmp/serve; do sleep 1; done; }
meet() { nc -l -p $1 >/dev/null; }
";
/// The other guest's way to meet it.
const MEET: &str = "\
meet() { until echo | nc 192.168.77.2 $1 2>/dev/null; do sleep 1; done; }
run() { /mnt/doorbell perf \"$@\" --link verbs --connect 192.168.77.2 --gpu host --hca-cores 0 --timeout 60; }
";

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_between_two_guests() {
    let server = format!("{SERVE}serve; meet 98; meet 99; kill $serving; cat /tmp/serve");
    let client = format!(
        "{MEET}meet 98
for test in 'put-bw --size 1,8,4K,8M --iters 20' 'put-bw --size 64 --iters 100 --threads 4 --sharing gpu' \
    'put-bw --size 64 --iters 100 --threads 4 --sharing block' 'put-bw --size 64 --iters 50 --threads 3' \
    'get-bw --size 8,64K --iters 50' 'send-bw --size 1,4K --iters 50' 'atomic-rate --iters 100' 'signal-lat --size 8 --iters 20'
do run $test --check || exit 1; done
meet 99"
    );
    let said = guests([&server, &client], PATIENCE);
    assert!(said[1].contains("CMD-END rc=0"), "{said:?}");
    assert!(said[0].contains("over verbs"), "{said:?}");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_hwtest_with_a_second_host() {
    let server = format!("{SERVE}serve; meet 98; meet 99; kill $serving; cat /tmp/serve");
    let client = format!(
        "{MEET}meet 98
/mnt/doorbell hwtest --peer 192.168.77.2 --signals 500 --timeout 60 --json /tmp/h.json --page /tmp/h.txt; status=$?
cat /tmp/h.txt; echo \"to the second host: $(grep -c '\"to\": \"192.168.77.2\"' /tmp/h.json)\"
meet 99; exit $status"
    );
    let said = guests([&server, &client], LONG);
    assert!(said[1].contains("CMD-END rc=0"), "{said:?}");
    assert!(!said[1].contains("FAILED"), "{said:?}");
    // Each case that was measured to there says so.
    assert!(said[1].contains("to the second host: 9"), "{said:?}");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_verbs_a_second_host_that_dies_ends_the_transfer_and_can_come_back() {
    let server = format!(
        "{SERVE}serve; meet 98
until [ \"$(rdma resource show qp | grep -c doorbell)\" -ge 1 ]; do sleep 1; done
sleep 2; kill -9 $serving; wait $serving; serve; meet 97; meet 99; kill $serving"
    );
    let client = format!(
        "{MEET}meet 98
run put-bw --size 64K --secs 60; echo \"ended rc=$?\"
meet 97; run put-bw --size 64 --iters 100 --check; echo \"again rc=$?\"; meet 99"
    );
    let [_, said] = guests([&server, &client], PATIENCE);
    assert!(said.contains("ended rc=1"), "{said}");
    assert!(said.contains("again rc=0"), "{said}");
}
