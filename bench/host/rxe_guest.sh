#!/usr/bin/env bash
# One boot of a guest with soft-RoCE: perftest over rxe's own loopback, then this project's RoCE link over the guest's UDP loopback, in turn, on
# the guest's two CPUs. Both are Linux software, one in the kernel and one in a process; the ratio is what counts, because the guest is emulated.
#
#   [DOORBELL=COMMAND] [DOORBELL_RXE=FOLDER] bench/host/rxe_guest.sh [OUT]     (needs QEMU; OUT defaults to target/bench/rxe)
#
# FOLDER is what peers/rxe/setup.sh made (default target/rxe, made if it is not there). Path MTU 4096 on both sides. ROUNDS rounds (default 3) of
# SECS seconds (default 3) each; the ratio is taken within a round.
set -euo pipefail
cd "$(dirname "$0")/../.."
. bench/host/guest.sh
prepare rxe 3 "${1:-}"
measure <<'GUEST'
link="roce:udp://127.0.0.1 --mtu 4096"
ip addr add 192.168.77.3/24 dev eth0
for round in $(seq "$rounds"); do
    theirs rxe 8
    ours batch32 8 --batch 32
    ours batch1 8 --batch 1
    theirs rxe 65536
    ours batch4 65536 --batch 4
done
GUEST
table "one guest, two emulated CPUs" "RoCE link" rxe \
    "8-byte puts, one doorbell per 32:batch32:rxe:8:k/s" \
    "8-byte puts, one doorbell each:batch1:rxe:8:k/s" \
    "64 KiB puts:batch4:rxe:65536:MB/s"
