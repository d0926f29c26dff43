#!/usr/bin/env bash
# Two processes of one host over shared memory: Doorbell beside UCX's `posix` transport, in turn, on the same two cores.
#
#   [DOORBELL=COMMAND] bench/host/shm_vs_ucx.sh [OUT]      (needs two cores, and python3 with pip for UCX's wheel: see ucx.sh; OUT defaults to target/bench)
#
# UCX's put of 8 bytes is a store by the initiating core: no work request, no key check, no completion. It is the most that a
# user of shared memory has today, which is why it stands here as the baseline. Every figure is the median of ROUNDS rounds
# (default 3), and the ratio is taken within a round, because other load moves both.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-target/bench}; rounds=${ROUNDS:-3}
mkdir -p "$out"

source bench/host/ucx.sh

# DOORBELL names a built command (of a distribution, say); else it is built here.
doorbell=${DOORBELL:-target/release/doorbell}
[ -n "${DOORBELL:-}" ] || cargo build --release -q -p doorbell-cli
run() { # test size extra... -> JSON file
  local file=$1; shift
  timeout 120 taskset -c "$cpu_a,$cpu_b" "$doorbell" perf "$@" --link shm --gpu host --json "$file" >/dev/null
}

for round in $(seq "$rounds"); do
  echo "round $round of $rounds" >&2
  ucx_put posix ucp_put_bw 8 20000000 >"$out/ucx-8.$round"
  run "$out/doorbell-8.$round.json" put-bw --hca-cores 0 --batch 32 --size 8 --secs 1
  run "$out/doorbell-8-batch1.$round.json" put-bw --hca-cores 0 --batch 1 --size 8 --secs 1
  ucx_put posix ucp_put_bw 1048576 20000 >"$out/ucx-1m.$round"
  run "$out/doorbell-1m.$round.json" put-bw --hca-cores 0 --batch 1 --size 1M --secs 1
  ucx_put posix ucp_put_lat 8 2000000 >"$out/ucx-lat.$round"
  run "$out/doorbell-lat.$round.json" put-lat --hca-cores 0 --size 8 --secs 1
done

python3 - "$out" "$rounds" <<'PY'
import json, statistics, sys
out, rounds = sys.argv[1], int(sys.argv[2])
def ucx(name, r):
    words = open(f"{out}/ucx-{name}.{r}").read().split()
    return {"mb_s": float(words[0]), "msg_s": float(words[1]), "us": float(words[2])}
def ours(name, r):
    return json.load(open(f"{out}/doorbell-{name}.{r}.json"))["results"][0]
rows = []
def row(title, theirs, mine, unit):
    ratios = [m / t for m, t in zip(mine, theirs)]
    rows.append((title, statistics.median(mine), statistics.median(theirs), statistics.median(ratios), unit))
R = range(1, rounds + 1)
row("8-byte puts, one doorbell per 32", [ucx("8", r)["msg_s"] / 1e6 for r in R], [ours("8", r)["messages_per_s"] / 1e6 for r in R], "M/s")
row("8-byte puts, one doorbell each", [ucx("8", r)["msg_s"] / 1e6 for r in R], [ours("8-batch1", r)["messages_per_s"] / 1e6 for r in R], "M/s")
row("1 MiB puts", [ucx("1m", r)["mb_s"] * 1.048576e-3 for r in R], [ours("1m", r)["bytes_per_s"] / 1e9 for r in R], "GB/s")
row("8-byte put latency (lower is better)", [ucx("lat", r)["us"] * 1e3 for r in R], [ours("lat", r)["latency_ns"]["p50"] for r in R], "ns")
cores = [ours("8", r)["cpu_cores_used"] for r in R]
print(f"{'two pinned processes, shared memory':42}{'Doorbell':>10}{'UCX posix':>11}{'ratio':>8}")
for title, mine, theirs, ratio, unit in rows:
    print(f"{title:42}{mine:10.2f}{theirs:11.2f}{ratio:8.2f}  {unit}")
print(f"CPU cores used by Doorbell, both processes: {statistics.median(cores):.2f}")
PY
