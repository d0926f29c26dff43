#!/usr/bin/env bash
# Two processes of one host over UDP loopback: the RoCEv2 link beside UCX's `tcp` transport, and its round trip beside a bare UDP echo, in turn,
# on the same two cores.
#
#   [DOORBELL=COMMAND] bench/host/roce.sh [OUT]     (needs two cores, and python3 with pip for UCX's wheel: see ucx.sh; OUT defaults to target/bench)
#
# Both benchmarks put from one buffer of 1 MiB into one. Between two processes of one host the path MTU is 61,696 bytes unless told otherwise; the row
# with 4096 has InfiniBand's largest.
#
# Every figure is the median of ROUNDS rounds (default 3), and the ratio is taken within a round, because other load moves both.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-target/bench} rounds=${ROUNDS:-3}
mkdir -p "$out"

source bench/host/ucx.sh

doorbell=${DOORBELL:-target/release/doorbell}
if [ -z "${DOORBELL:-}" ]; then cargo build --release -q -p doorbell-cli; fi
port_rate=${PORT_RATE:-target/release/examples/port_rate}
if [ -z "${PORT_RATE:-}" ]; then cargo build --release -q -p doorbell-port --example port_rate; fi
run() { # file test extra...
    local file=$1
    shift
    timeout 120 taskset -c "$cpu_a,$cpu_b" "$doorbell" perf "$@" --link roce --gpu host --json "$file" >/dev/null
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    ucx_put tcp ucp_put_bw 8 1000000 >"$out/ucx-8.$round"
    run "$out/roce-8.$round.json" put-bw --hca-cores 0 --batch 32 --size 8 --secs 1
    run "$out/roce-8-batch1.$round.json" put-bw --hca-cores 0 --batch 1 --size 8 --secs 1
    ucx_put tcp ucp_put_bw 1048576 3000 >"$out/ucx-1m.$round"
    run "$out/roce-1m.$round.json" put-bw --hca-cores 0 --batch 4 --size 1M --secs 1
    run "$out/roce-1m-4096.$round.json" put-bw --hca-cores 0 --batch 4 --size 1M --secs 1 --mtu 4096
    timeout 60 taskset -c "$cpu_a,$cpu_b" "$port_rate" 0.3 >"$out/echo.$round"
    run "$out/roce-lat.$round.json" put-lat --hca-cores 0 --size 8 --secs 1
    ucx_put tcp ucp_put_lat 8 30000 >"$out/ucx-lat.$round"
done

python3 - "$out" "$rounds" "$cpu_a" "$cpu_b" <<'PY'
import json, re, statistics, sys

out, rounds = sys.argv[1], int(sys.argv[2])


def ucx(name, r):
    words = open(f"{out}/ucx-{name}.{r}").read().split()
    return {"mb_s": float(words[0]), "msg_s": float(words[1]), "us": float(words[2])}


def ours(name, r):
    return json.load(open(f"{out}/roce-{name}.{r}.json"))["results"][0]


def echo(r):
    """Round trip of a bare UDP echo, ns, as port_rate prints it."""
    text = open(f"{out}/echo.{r}").read()
    found = re.search(r"bare UDP echo\D*([\d.]+) *(ns|us)", text)
    if not found:
        raise SystemExit(f"{out}/echo.{r} has no line 'bare UDP echo'")
    return float(found[1]) * (1 if found[2] == "ns" else 1000)


rows = []


def row(title, theirs, mine, unit, base):
    ratios = [m / t for m, t in zip(mine, theirs)]
    rows.append((title, statistics.median(mine), base, statistics.median(theirs), statistics.median(ratios), unit))


R = range(1, rounds + 1)
row("8-byte puts, one doorbell per 32", [ucx("8", r)["msg_s"] / 1e6 for r in R], [ours("8", r)["messages_per_s"] / 1e6 for r in R], "M/s", "UCX tcp")
row("8-byte puts, one doorbell each", [ucx("8", r)["msg_s"] / 1e6 for r in R], [ours("8-batch1", r)["messages_per_s"] / 1e6 for r in R], "M/s", "UCX tcp")
theirs = [ucx("1m", r)["mb_s"] * 1.048576e-3 for r in R]
row("1 MiB puts", theirs, [ours("1m", r)["bytes_per_s"] / 1e9 for r in R], "GB/s", "UCX tcp")
row("1 MiB puts, path MTU 4096", theirs, [ours("1m-4096", r)["bytes_per_s"] / 1e9 for r in R], "GB/s", "UCX tcp")
row("8-byte round trip (lower is better)", [echo(r) / 1e3 for r in R], [2 * ours("lat", r)["latency_ns"]["p50"] / 1e3 for r in R], "us", "UDP echo")
row("8-byte put latency (lower is better)", [ucx("lat", r)["us"] for r in R], [ours("lat", r)["latency_ns"]["p50"] / 1e3 for r in R], "us", "UCX tcp")
print(f"{'two pinned processes, UDP loopback':40}{'RoCE link':>10}{'baseline':>20}{'ratio':>8}")
for title, mine, base, theirs, ratio, unit in rows:
    print(f"{title:40}{mine:10.2f}{base:>11}{theirs:9.2f}{ratio:8.2f}  {unit}")
print(f"CPUs {sys.argv[3]} and {sys.argv[4]}; cores used, both processes: {statistics.median(ours('8', r)['cpu_cores_used'] for r in R):.2f}")
PY
