#!/usr/bin/env bash
# One boot of a guest with soft-RoCE: perftest's ib_write_bw over rxe0, then this project's verbs link over the same device, in turn, two processes each, on
# the guest's two CPUs. The device's work is the same; what differs is who posts. The ratio is what counts, because the guest is emulated.
#
#   [DOORBELL=COMMAND] [DOORBELL_RXE=FOLDER] bench/host/verbs_guest.sh [OUT]     (needs QEMU; OUT defaults to target/bench/verbs)
#
# FOLDER is what peers/rxe/setup.sh made (default target/rxe, made if it is not there). Path MTU 4096 on both sides. ROUNDS rounds (default 3) of SECS
# seconds (default 8: an emulator is slow at what it sees for the first time) each; the ratio is taken within a round. perftest twice: as it comes (a
# call of the library for each request), and posting lists of 32 (-l 32), beside one doorbell for 32 requests. Needs a quiet machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
. bench/host/guest.sh
prepare verbs 8 "${1:-}"
measure <<'GUEST'
link="verbs:rxe0 --mtu 4096"
for round in $(seq "$rounds"); do
    theirs perftest 8
    ours batch1 8 --batch 1
    theirs perftest32 8 -l 32
    ours batch32 8 --batch 32
    theirs perftest 65536
    ours batch4 65536 --batch 4
done
GUEST
table "one guest, two emulated CPUs, over rxe0" "verbs link" perftest \
    "8-byte puts, one doorbell each:batch1:perftest:8:k/s" \
    "8-byte puts, 32 a doorbell, beside lists of 32:batch32:perftest32:8:k/s" \
    "64 KiB puts:batch4:perftest:65536:MB/s"
