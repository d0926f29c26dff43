#!/usr/bin/env bash
# Checks and measures Doorbell on a machine with an NVIDIA GPU, in one call, from a built distribution:
#
#     bench/gpu/run.sh [DIST] [OUT] [PART...]      DIST: what `cargo xtask dist` made (default target/dist)
#                                                  OUT: where results go (default $OUT, else ./out)
#                                                  PART: machine check post e2e forward memory proxy roce c torch nvidia (default: all)
#
# Needs no Rust there. Writes OUT/machine.txt, OUT/log.txt (what the commands printed) and OUT/results.jsonl (one
# doorbell-perf/1 object a line). Every command has a time limit; the exit status is 1 if any of them failed.
set -uo pipefail

DIST=${1:-target/dist}
OUT=${2:-${OUT:-out}}
shift $(($# < 2 ? $# : 2))
PARTS=${*:-machine check post e2e forward memory proxy roce c torch nvidia}
SECS=${SECS:-1}         # seconds a measured case
LIMIT=${LIMIT:-60}      # seconds a command may take
GPU=${GPU:-cuda}         # host: a rehearsal of the script without a GPU
DOORBELL=$DIST/bin/doorbell

mkdir -p "$OUT"
LOG=$OUT/log.txt RESULTS=$OUT/results.jsonl
: >"$LOG" >"$RESULTS"
ran=0 failed=()

wants() { [[ " $PARTS " == *" $1 "* ]]; }

# perf ARGS...: one command; its table goes to the log, its JSON becomes one line of the results.
perf() {
    local json begin=$SECONDS status
    json=$(mktemp)
    ran=$((ran + 1))
    printf '\n$ %sdoorbell perf %s\n' "${DOORBELL_GPU_COPIES:+DOORBELL_GPU_COPIES=$DOORBELL_GPU_COPIES }" "$*" | tee -a "$LOG"
    timeout --kill-after=5 "$LIMIT" "$DOORBELL" perf "$@" --gpu "$GPU" --json "$json" 2>&1 | tee -a "$LOG"
    status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        failed+=("$status: perf $*")
        printf 'FAILED with %s after %s s\n' "$status" $((SECONDS - begin)) | tee -a "$LOG"
    fi
    if [ -s "$json" ]; then
        tr -d '\n' <"$json" >>"$RESULTS"
        echo >>"$RESULTS"
    fi
    rm -f "$json"
}

# other COMMAND...: anything else that must succeed.
other() {
    local status
    ran=$((ran + 1))
    printf '\n$ %s\n' "$*" | tee -a "$LOG"
    timeout --kill-after=5 "$LIMIT" "$@" 2>&1 | tee -a "$LOG"
    status=${PIPESTATUS[0]}
    # 77: it says itself why it was skipped.
    [ "$status" -eq 0 ] || [ "$status" -eq 77 ] || failed+=("$status: $*")
}

if wants machine; then
    {
        date -u +%FT%TZ
        uname -a
        lscpu 2>/dev/null | grep -E 'Model name|^CPU\(s\)|Socket|NUMA|MHz|L3' || true
        grep -E 'MemTotal|HugePages_Total' /proc/meminfo
        nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm,mig.mode.current --format=csv
        nvidia-smi topo -m
        ls -l /dev/gdrdrv /dev/infiniband 2>&1
        "$DOORBELL" info --gpu "$GPU"
        "$DOORBELL" info --gpu "$GPU" --json
    } 2>&1 | tee "$OUT/machine.txt"
fi

# NVIDIA's device headers as a second poster, beside ours in the same run. NVIDIA_POSTER: nvidia_poster.cu, compiled; or DOCA: the
# folder of doca_gpunetio_device.h, with nvcc at hand. SAME_BYTES: the example `same_bytes` of the crate doorbell.
poster=${NVIDIA_POSTER:-}
if [ -z "$poster" ] && [ -n "${DOCA:-}" ] && command -v nvcc >/dev/null; then
    poster=$OUT/nvidia_poster.cubin
    other nvcc -cubin -arch=native -O3 -std=c++17 "-I$DOCA" -o "$poster" "$(dirname "${BASH_SOURCE[0]}")/nvidia_poster.cu"
fi
[ -s "$poster" ] || poster=
beside=(${poster:+--module "$poster"})

# Every sharing mode, handler, CQ kind, operation and payload place: every byte compared.
if wants check; then
    for sharing in exclusive block gpu; do
        for handler in record doorbell producer; do
            for cq in per-slot collapsed; do
                perf put-bw --quick --check --sharing $sharing --handler $handler --cq $cq --blocks 4 --threads 32
            done
        done
    done
    for mem in host gpu; do
        for local in host gpu; do
            perf put-bw --quick --check --mem $mem --local-mem $local --size 8:64K
            perf get-bw --quick --check --mem $mem --local-mem $local --size 8:64K
        done
    done
    for test in put-lat get-lat signal-lat atomic-rate forward; do
        perf $test --quick --check
    done
    for initiator in assisted proxy cpu; do
        perf put-bw --quick --check --initiator $initiator
    done
    perf put-bw --quick --check --link shm
fi

# Posting alone: the shapes of the table of anchors.
if wants post; then
    for queue in host gpu; do
        perf post --secs "$SECS" --queue-mem $queue --sharing exclusive --blocks 1,64,128 --batch 1 "${beside[@]}"
        perf post --secs "$SECS" --queue-mem $queue --sharing exclusive --blocks 1,64 --batch 32 "${beside[@]}"
        perf post --secs "$SECS" --queue-mem $queue --sharing block --blocks 1,64 --threads 32 --batch 1 "${beside[@]}"
        perf post --secs "$SECS" --queue-mem $queue --sharing gpu --blocks 8,64 --threads 32 --batch 1 "${beside[@]}"
        # NVIDIA's headers take seconds for a handful of messages a thread here: so many, and no more.
        perf post --iters 8 --timeout 40 --queue-mem $queue --sharing gpu --blocks 128 --threads 256 --batch 1 "${beside[@]}"
    done
    for handler in doorbell producer; do
        perf post --secs "$SECS" --handler $handler --sharing exclusive --blocks 1,64 --batch 1 "${beside[@]}"
        perf post --secs "$SECS" --handler $handler --sharing block --blocks 64 --threads 32 --batch 1 "${beside[@]}"
        perf post --secs "$SECS" --handler $handler --sharing gpu --blocks 64 --threads 32 --batch 1 "${beside[@]}"
    done
fi

# End to end, flow control on, by number of engine threads.
if wants e2e; then
    for cores in 1 4; do
        perf put-bw --secs "$SECS" --hca-cores $cores --sharing exclusive --blocks 1,64 --batch 1
        perf put-bw --secs "$SECS" --hca-cores $cores --sharing exclusive --blocks 64 --batch 32
        perf put-bw --secs "$SECS" --hca-cores $cores --sharing block --blocks 64 --threads 32 --batch 1
        perf put-bw --secs "$SECS" --hca-cores $cores --sharing gpu --blocks 64 --threads 32 --depth 1024 --batch 1
        perf put-bw --secs "$SECS" --hca-cores $cores --sharing gpu --blocks 64 --threads 32 --depth 32768 --batch 1
    done
    perf put-bw --secs "$SECS" --blocks 16 --size 1M
    perf atomic-rate --secs "$SECS" --blocks 1,64
    perf put-lat --secs "$SECS"
    perf signal-lat --secs "$SECS"
    perf get-lat --secs "$SECS"
fi

# RoCEv2 packets over the UDP loopback, to a second process; with a second GPU its kernels answer there (PEER_GPU, default: chosen).
if wants roce; then
    peer=(${PEER_GPU:+--peer-gpu "$PEER_GPU"})
    perf put-bw --quick --check --link roce "${peer[@]}"
    perf get-bw --quick --check --link roce "${peer[@]}"
    for test in put-lat get-lat signal-lat; do
        perf $test --secs "$SECS" --link roce "${peer[@]}"
    done
    perf put-bw --secs "$SECS" --link roce "${peer[@]}" --blocks 1,4,16,64 --batch 1
    perf put-bw --secs "$SECS" --link roce "${peer[@]}" --sharing block --blocks 1,4,16,64 --threads 32
    perf put-bw --secs "$SECS" --link roce "${peer[@]}" --sharing gpu --blocks 1,4,16,64 --threads 32
    perf put-bw --secs "$SECS" --link roce "${peer[@]}" --size 64K,1M --blocks 4
    perf atomic-rate --secs "$SECS" --link roce "${peer[@]}" --blocks 1,16
fi

if wants forward; then
    perf forward --secs "$((SECS * 3))"
fi

# Payloads in GPU memory, beside the copy engine's own rate.
if wants memory; then
    perf put-bw --secs "$SECS" --mem gpu --blocks 64 --size 8,512,4K,64K,1M
    perf put-bw --secs "$SECS" --mem gpu --local-mem gpu --blocks 16 --size 8,4K,64K
    perf get-bw --secs "$SECS" --mem gpu --blocks 64 --size 8,512,4K,64K,1M
    # The same small ones by the copy engine alone, for what the kernel is worth.
    DOORBELL_GPU_COPIES=engine perf put-bw --secs "$SECS" --mem gpu --blocks 64 --size 8,512
    DOORBELL_GPU_COPIES=engine perf put-bw --secs "$SECS" --mem gpu --local-mem gpu --blocks 16 --size 8
fi

# Who should post: GPU, assisted, proxy or CPU, at equal cores.
if wants proxy; then
    perf put-bw --secs "$SECS" --initiator gpu,assisted,proxy,cpu --blocks 1:128 --batch 1
    perf put-bw --secs "$SECS" --initiator gpu,assisted,proxy,cpu --blocks 1:128 --batch 32
fi

# Programs that know the C ABI alone: built before, or here where a compiler is.
if wants c; then
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    for program in "$DIST"/examples/*; do
        [ -x "$program" ] && other env LD_LIBRARY_PATH="$DIST/lib" "$program"
    done
    if command -v nvcc >/dev/null && [ -d "$here/crates/doorbell-c/examples/cuda" ]; then
        other make -C "$here/crates/doorbell-c/examples/cuda" DIST="$(cd "$DIST" && pwd)" OUT="$(cd "$OUT" && pwd)/cuda" run
    fi
fi

# In a process with PyTorch: training beside it, tensors, CUDA graphs, fork, teardown.
if wants torch; then
    other python3 "$(dirname "${BASH_SOURCE[0]}")/torch_coexist.py" "$DIST"
fi

# NVIDIA's device headers, unchanged, on our queues.
if wants nvidia; then
    if [ -s "$poster" ]; then
        for sharing in exclusive block gpu; do
            for handler in record doorbell producer; do
                perf put-bw --quick --check --module "$poster" --cq per-slot --sharing $sharing --handler $handler --blocks 4 --threads 32 --batch 1
            done
        done
        perf get-bw --quick --check --module "$poster" --cq per-slot
        perf atomic-rate --quick --check --module "$poster" --cq per-slot
        [ -x "${SAME_BYTES:-}" ] && other "$SAME_BYTES" "$poster"
    else
        printf 'nvidia: skipped, no poster: set NVIDIA_POSTER, or DOCA with nvcc on the PATH\n' | tee -a "$LOG"
    fi
fi

printf '\n%s command(s), %s failed\n' "$ran" "${#failed[@]}" | tee -a "$LOG"
for line in "${failed[@]+"${failed[@]}"}"; do printf '  %s\n' "$line" | tee -a "$LOG"; done
[ "${#failed[@]}" -eq 0 ] && [ "$ran" -gt 0 ]
