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
out=$(realpath -m "${1:-target/bench/verbs}") rounds=${ROUNDS:-3} secs=${SECS:-8}
rxe=$(realpath -m "${DOORBELL_RXE:-target/rxe}")
[ -s "$rxe/vmlinux" ] || peers/rxe/setup.sh "$rxe"
doorbell=${DOORBELL:-target/release/doorbell}
if [ -z "${DOORBELL:-}" ]; then cargo build --release -q -p doorbell-cli; fi
mkdir -p "$out/share"
cp -L "$doorbell" "$out/share/doorbell"

cat >"$out/share/measure.sh" <<'GUEST'
# Runs in the guest: words "ROUND NAME SIZE BYTES_PER_S MESSAGES_PER_S" after a mark, for the host to read.
rounds=$1 secs=$2
cp /mnt/doorbell /tmp/doorbell
theirs() { # name size round options...: perftest's columns are size, iterations, peak, average (MB/s of 2^20), messages (M/s)
    name=$1 size=$2 round=$3
    shift 3
    ib_write_bw -d rxe0 -F -s "$size" -D "$secs" -m 4096 "$@" >/tmp/server 2>&1 &
    server=$!
    sleep 1
    if ! ib_write_bw -d rxe0 -F -s "$size" -D "$secs" -m 4096 "$@" 127.0.0.1 >/tmp/client 2>&1; then cat /tmp/client /tmp/server; fi
    wait $server
    awk -v s="$size" -v r="$round" -v n="$name" '$1 == s && NF >= 5 { printf "@@ %s %s %s %.0f %.0f\n", r, n, s, $4 * 1048576, $5 * 1e6 }' /tmp/client
}
ours() { # name size round options...
    name=$1 size=$2 round=$3
    shift 3
    /tmp/doorbell perf put-bw --link verbs:rxe0 --mtu 4096 --gpu host --hca-cores 0 --size "$size" --secs "$secs" --json /tmp/j "$@" >/tmp/ours 2>&1 || { cat /tmp/ours; return; }
    echo "@@ $round $name $size $(tr ',{}' '\n\n\n' </tmp/j | awk -F: '/"bytes_per_s"/ { b = $2 } /"messages_per_s"/ { m = $2 } END { printf "%.0f %.0f", b, m }')"
}
for round in $(seq "$rounds"); do
    theirs perftest 8 "$round"
    ours batch1 8 "$round" --batch 1
    theirs perftest32 8 "$round" -l 32
    ours batch32 8 "$round" --batch 32
    theirs perftest 65536 "$round"
    ours batch4 65536 "$round" --batch 4
done
GUEST

SHARE=$out/share SMP=2 MEM=1024 MTU=4200 timeout $((60 + rounds * (secs + 15) * 8)) \
    peers/rxe/vm.sh "$rxe" "sh /mnt/measure.sh $rounds $secs" | tee "$out/console.txt" | grep --line-buffered -a '^@@' || true
grep -qa 'CMD-END rc=0' "$out/console.txt" || { tail -20 "$out/console.txt"; echo "the guest did not come to its end" >&2; exit 1; }

python3 - "$out/console.txt" <<'PY'
import statistics, sys

rows = {}
for line in open(sys.argv[1], errors="replace"):
    words = line.split()
    if words[:1] == ["@@"] and len(words) == 6:
        rows.setdefault((words[2], int(words[3])), {})[int(words[1])] = (float(words[4]), float(words[5]))
print(f"{'one guest, two emulated CPUs, over rxe0':46}{'verbs link':>11}{'perftest':>10}{'ratio':>8}")
missing = 0
for title, name, base, size, column, scale, unit in [
    ("8-byte puts, one doorbell each", "batch1", "perftest", 8, 1, 1e3, "k/s"),
    ("8-byte puts, 32 a doorbell, beside lists of 32", "batch32", "perftest32", 8, 1, 1e3, "k/s"),
    ("64 KiB puts", "batch4", "perftest", 65536, 0, 1e6, "MB/s"),
]:
    mine, theirs = rows.get((name, size), {}), rows.get((base, size), {})
    both = sorted(set(mine) & set(theirs))
    if not both:
        print(f"{title:46} not measured")
        missing += 1
        continue
    m, b = [mine[r][column] for r in both], [theirs[r][column] for r in both]
    ratio = statistics.median(x / y for x, y in zip(m, b))
    print(f"{title:46}{statistics.median(m) / scale:11.1f}{statistics.median(b) / scale:10.1f}{ratio:8.2f}  {unit}")
sys.exit(missing)
PY
