# Sourced by rxe_guest.sh and verbs_guest.sh, in the project's folder: one boot of a guest with soft-RoCE, in which perftest and this project's command
# are measured in turn, two processes each, on the guest's two CPUs.
#
# DOORBELL=COMMAND is measured (default: built here), DOORBELL_RXE=FOLDER is what peers/rxe/setup.sh made (default target/rxe, made if it is not there).
# ROUNDS rounds (default 3) of SECS seconds each.

# prepare NAME SECS [OUT]: sets out, rounds and secs, and lays out what the guest gets.
prepare() {
    out=$(realpath -m "${3:-target/bench/$1}") rounds=${ROUNDS:-3} secs=${SECS:-$2}
    rxe=$(realpath -m "${DOORBELL_RXE:-target/rxe}")
    [ -s "$rxe/vmlinux" ] || peers/rxe/setup.sh "$rxe"
    if [ -z "${DOORBELL:-}" ]; then cargo build --release -q -p doorbell-cli; fi
    mkdir -p "$out/share"
    cp -L "${DOORBELL:-target/release/doorbell}" "$out/share/doorbell"
}

# measure: runs the script on standard input in the guest. It says which $link is ours, and calls `theirs` and `ours` in each $round of $rounds.
measure() {
    cat >"$out/share/rounds.sh"
    cat >"$out/share/measure.sh" <<'GUEST'
# Runs in the guest: words "ROUND NAME SIZE BYTES_PER_S MESSAGES_PER_S" after a mark, for the host to read.
rounds=$1 secs=$2
cp /mnt/doorbell /tmp/doorbell
theirs() { # name size options...: perftest's columns are size, iterations, peak, average (MB/s of 2^20), messages (M/s)
    name=$1 size=$2
    shift 2
    ib_write_bw -d rxe0 -F -s "$size" -D "$secs" -m 4096 "$@" >/tmp/server 2>&1 &
    server=$!
    sleep 1
    if ! ib_write_bw -d rxe0 -F -s "$size" -D "$secs" -m 4096 "$@" 127.0.0.1 >/tmp/client 2>&1; then cat /tmp/client /tmp/server; fi
    wait $server
    awk -v s="$size" -v r="$round" -v n="$name" '$1 == s && NF >= 5 { printf "@@ %s %s %s %.0f %.0f\n", r, n, s, $4 * 1048576, $5 * 1e6 }' /tmp/client
}
ours() { # name size options...
    name=$1 size=$2
    shift 2
    # $link is a link and its options.
    /tmp/doorbell perf put-bw --link $link --gpu host --hca-cores 0 --size "$size" --secs "$secs" --json /tmp/j "$@" >/tmp/ours 2>&1 || { cat /tmp/ours; return; }
    echo "@@ $round $name $size $(tr ',{}' '\n\n\n' </tmp/j | awk -F: '/"bytes_per_s"/ { b = $2 } /"messages_per_s"/ { m = $2 } END { printf "%.0f %.0f", b, m }')"
}
. /mnt/rounds.sh
GUEST
    SHARE=$out/share SMP=2 MEM=1024 MTU=4200 timeout $((60 + rounds * (secs + 15) * 8)) \
        peers/rxe/vm.sh "$rxe" "sh /mnt/measure.sh $rounds $secs" | tee "$out/console.txt" | grep --line-buffered -a '^@@' || true
    grep -qa 'CMD-END rc=0' "$out/console.txt" || { tail -20 "$out/console.txt"; echo "the guest did not come to its end" >&2; exit 1; }
}

# table HEADING OURS THEIRS ROW...: medians, and the median of the ratios within each round. A row is TITLE:OURS:THEIRS:SIZE:UNIT, the names as in `measure`.
# Its status is the number of rows that were not measured.
table() {
    python3 - "$out/console.txt" "$@" <<'PY'
import statistics, sys

console, heading, our_link, their_name, *wanted = sys.argv[1:]
rows = {}
for line in open(console, errors="replace"):
    words = line.split()
    if words[:1] == ["@@"] and len(words) == 6:
        rows.setdefault((words[2], words[3]), {})[words[1]] = (float(words[4]), float(words[5]))
print(f"{heading:46}{our_link:>11}{their_name:>10}{'ratio':>8}")
missing = 0
for title, name, base, size, unit in (row.split(":") for row in wanted):
    column, scale = {"MB/s": (0, 1e6), "k/s": (1, 1e3)}[unit]
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
}
