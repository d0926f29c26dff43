//! Two guests on one wire.

use crate::guest::{SIDE, guests};

/// The server of two guests: what serves in the background, with words when it does; and the end of the test, when the other says so.
const SERVE: &str = "\
serve() { /mnt/doorbell serve --gpu host >/tmp/serve 2>&1 & serving=$!; until grep -q listening /tmp/serve; do kill -0 $serving || exit 9; sleep 1; done; }
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
    let server =
        format!("{SERVE}serve; meet 98; meet 99; kill $serving; cat /tmp/serve; {SIDE} sides::far");
    let client = format!(
        "{MEET}meet 98
for test in 'put-bw --size 1,8,4K,8M --iters 20' 'put-bw --size 64 --iters 100 --threads 4 --sharing gpu' \
    'put-bw --size 64 --iters 100 --threads 4 --sharing block' 'put-bw --size 64 --iters 50 --threads 3' \
    'get-bw --size 8,64K --iters 50' 'send-bw --size 1,4K --iters 50' 'atomic-rate --iters 100' 'signal-lat --size 8 --iters 20'
do run $test --check || exit 1; done
meet 99; {SIDE} sides::near"
    );
    let said = guests([&server, &client]);
    // What may go wrong comes after what goes well.
    for said in &said {
        assert!(said.contains("CMD-END rc=0"), "{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
    assert!(said[0].contains("over verbs"), "{said:?}");
    assert_eq!(said[1].matches("well: ").count(), 6, "{said:?}");
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
    let said = guests([&server, &client]);
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
    let [_, said] = guests([&server, &client]);
    assert!(said.contains("ended rc=1"), "{said}");
    assert!(said.contains("again rc=0"), "{said}");
}
