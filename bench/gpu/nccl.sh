#!/usr/bin/env bash
# NCCL's device interface over Doorbell, on a machine with one NVIDIA GPU or more and no NIC:
#
#     bench/gpu/nccl.sh NCCL [DIST] [OUT]      NCCL: a folder with its include/ and lib/, such as the nvidia/nccl of a wheel
#                                              (nvidia-nccl-cu13 2.30.7 or later), the sources of such a release, or a .tar.* of
#                                              either; DIST: what `cargo xtask dist` made; OUT: where logs go
#
# Builds NCCL for this GPU alone if it got sources (a minute or two on 16 cores), then the programs of bench/gpu/nccl, and runs them:
# one rank by itself, two ranks on one GPU, and a rank a GPU where there are several. Each run has a time limit. The exit status
# is 1 if a check failed. RUNS names the runs; JOBS the compilers at a time.
#
#     self two gpus handlers signals   every call, then rates: one rank; two on one GPU; a GPU a rank, as threads and as processes; rung by
#                                      doorbell with record; signals in GPU memory
#     rates million huge depth again   rates against blocks and contexts, large puts; a million signals, a million words with one each; puts
#                                      and gets of more than 2 GiB; rates with shorter queues; hundreds of short kernels, with one engine
#                                      thread and with two
#     trip                             half round trips with a trace of each process
#     cores proxy hosted floor         for comparison: `rates` with two engine threads; NCCL's own CPU proxy over Doorbell's RMA plug-in, which
#                                      has as many; host-initiated NCCL over sockets and over NVLink; what the machine can do without either
#     symmetric                        NCCL's own reduce-scatter over GIN, by one block and by eight (a wheel's; skipped with one that was built here)
#     roce hosts                       packets instead of shared memory, GPU memory staged: between processes of one host; and between processes
#                                      that NCCL takes for two hosts, with its reduce-scatter over GIN too
#     fault release killed stopped     a script fails a request: the job must exit, or its kernels be let go; a rank is killed, or stands still
#     old oldfault                     NCCL 2.28.7 to 2.29.7 as OLD_NCCL has it (a folder with its include/ and lib/; default: that of the first
#                                      PyTorch wheel that is found), with bench/gpu/nccl/gin28.cu; its failures
#     wheel                            the commands that docs/nccl.md gives to who has PyTorch's wheel, as they stand there
set -uo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SOURCE=${1:?the sources of NCCL, or a folder with its include and lib}
DIST=$(realpath "${2:-target/dist}")
OUT=${3:-${OUT:-out}}
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
RUNS=${RUNS:-self two handlers signals gpus rates million huge again symmetric roce hosts fault release killed stopped cores proxy hosted floor old oldfault wheel}
JOBS=${JOBS:-$(nproc)}
LIMIT=${LIMIT:-120}
PLUGIN=$DIST/lib/libnccl-gin-doorbell.so
[ -s "$PLUGIN" ] || { echo "no $PLUGIN: run cargo xtask dist"; exit 2; }
NVCC=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
CUDA=$(dirname "$(dirname "$(realpath "$NVCC")")")
SM=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
failed=0
building=()

if [ -d "$SOURCE/lib" ] && [ -d "$SOURCE/include" ]; then
    NCCL=$(realpath "$SOURCE")
else
    # The build folder outlives this call where the machine keeps target/.
    WORK=${WORK:-$PWD/target/nccl}
    mkdir -p "$WORK"
    if [ -f "$SOURCE" ]; then tar -xf "$SOURCE" -C "$WORK"; else cp -a "$SOURCE/." "$WORK/"; fi
    NCCL=$WORK/build
    [ ! -d "$WORK/lib" ] || NCCL=$WORK
    if [ ! -e "$NCCL/lib/libnccl.so.2" ]; then
        begin=$SECONDS
        # Only what a communicator needs to start: the checks use kernels of their own.
        make -C "$WORK" -j"$JOBS" src.build CUDA_HOME="$CUDA" NVCC_GENCODE="-gencode=arch=compute_$SM,code=sm_$SM" ONLY_FUNCS=SendRecv \
            >"$OUT/nccl-build.txt" 2>&1 || { tail -30 "$OUT/nccl-build.txt"; echo "NCCL does not build"; exit 2; }
        echo "NCCL built in $((SECONDS - begin)) s with $JOBS jobs"
    fi
fi
LIB=$NCCL/lib

# build NAME NCCL: a program of this folder with that NCCL.
build() {
    "$NVCC" -std=c++17 -O2 -arch="sm_$SM" "-I$2/include" -o "$OUT/$1" "$HERE/nccl/$1.cu" "-L$2/lib" -l:libnccl.so.2 -lpthread
}
for one in gin host floor symmetric; do
    build "$one" "$NCCL" &
    building[${#building[@]}]=$!
done
for one in "${building[@]}"; do wait "$one" || exit 2; done
rm -f "$OUT/nccl-results.txt"

# run NAME RANKS threads|processes [VARIABLE=VALUE...]
run() {
    local name=$1 ranks=$2 kind=$3 status
    shift 3
    printf '\n== %s: %s rank(s), %s %s\n' "$name" "$ranks" "$kind" "$*" | tee -a "$OUT/nccl-results.txt"
    rm -f "$OUT/nccl-$name".*.log
    # What a program runs whose kernel does not end: what the queue pairs stand at, in short and whole.
    local dump="timeout 5 '$DIST/bin/doorbell' dump all"
    env EXPLAIN="$dump | head -150; $dump --json >'$OUT/nccl-$name.dump.json'" \
        LD_LIBRARY_PATH="$LIB:${LD_LIBRARY_PATH:-}" NCCL_GIN_PLUGIN="$PLUGIN" NCCL_GIN_TYPE=3 NCCL_NET_PLUGIN=none NCCL_IB_DISABLE=1 \
        NCCL_SOCKET_IFNAME=lo NCCL_CUMEM_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1 \
        NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_DEBUG_FILE="$OUT/nccl-$name.%p.log" "$@" \
        setsid timeout --kill-after=5 "$LIMIT" "$OUT/${PROGRAM:-gin}" "$ranks" "$kind" "${MODE:-checks}" 2>&1 | tee -a "$OUT/nccl-results.txt"
    status=${PIPESTATUS[0]}
    grep -hE 'Assigned (GIN )?plugin|GIN/Doorbell' "$OUT/nccl-$name".*.log 2>/dev/null | sed 's/^.*NCCL INFO //' | sort | uniq -c | head -20
    if [ "$status" -ne 0 ]; then
        failed=1
        echo "FAILED with $status: $name" | tee -a "$OUT/nccl-results.txt"
        grep -hE "WARN|Doorbell" "$OUT/nccl-$name".*.log | tail -20
    fi
}

# beside NAME PROGRAM ARGUMENT [VARIABLE=VALUE...]
beside() {
    local name=$1 program=$2 argument=$3
    shift 3
    printf '\n== %s: %s\n' "$name" "$*" | tee -a "$OUT/nccl-results.txt"
    # shellcheck disable=SC2086 # nothing, or a number
    env LD_LIBRARY_PATH="$LIB:${LD_LIBRARY_PATH:-}" NCCL_NET_PLUGIN=none NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=WARN "$@" \
        setsid timeout --kill-after=5 "$LIMIT" "$program" $argument 2>&1 | tee -a "$OUT/nccl-results.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || { failed=1; echo "FAILED: $name" | tee -a "$OUT/nccl-results.txt"; }
}

# scatters NAME [VARIABLE=VALUE...]: NCCL's own reduce-scatter, and which kernels its log names; true if they are those over GIN alone.
scatters() {
    local name=$1 logs kernels
    shift
    # As with an NCCL that was built above. Whether its kernels over GIN would do without the others has not been tried.
    if ! grep -qa ncclDevKernel_ReduceScatter "$LIB/libnccl.so.2"; then
        echo "SKIPPED: $name: this NCCL was built without kernels for reduce-scatters: give a wheel's" | tee -a "$OUT/nccl-results.txt"
        return
    fi
    PROGRAM=symmetric run "$name" 2 processes NCCL_DEBUG_SUBSYS=INIT,NET,ENV,TUNING "$@"
    logs=("$OUT/nccl-$name".*.log)
    # Other ways would give the right sums too. A count of each, the kernel's last.
    kernels=$(sed -nE 's/^.*(ReduceScatter[^:]*): [0-9]+ Bytes -> (Kernel|Algo) ([A-Za-z0-9_]+).*$/\3/p' "${logs[@]}" | sort | uniq -c)
    echo "kernels $name:" ${kernels:-none named} | tee -a "$OUT/nccl-results.txt"
    [[ $kernels == *RailA2A* ]] && ! grep -q -v RailA2A <<<"$kernels"
}

GPUS=$(nvidia-smi -L | wc -l)
PACKETS=(DOORBELL_NCCL_LINK=roce DOORBELL_NCCL_ADDR=127.0.0.1 DOORBELL_ROCE=udp://127.0.0.1)
SCRIPT='wqe=60, n=1: fail=REMOTE_ACCESS'

# The first NCCL of 2.28 or 2.29 that a wheel brought. Others lie about too, such as that of docs/nccl.md.
old_nccl() {
    find / -path '*/nvidia/nccl/include/nccl.h' -not -path '/proc/*' 2>/dev/null | while read -r header; do
        if grep -Eq '^#define NCCL_VERSION_CODE +2(28|29)[0-9]{2}$' "$header"; then
            dirname "$(dirname "$header")"
            break
        fi
    done
}

# An NCCL whose network plug-in has the GIN plug-in.
old() {
    local name=$1
    shift
    OLD_NCCL=${OLD_NCCL:-$(old_nccl)}
    if [ ! -d "$OLD_NCCL/include" ]; then
        echo "SKIPPED: $name: no NCCL of 2.28.7 to 2.29.7 was found: set OLD_NCCL" | tee -a "$OUT/nccl-results.txt"
        return
    fi
    [ -e "$OUT/gin28" ] || build gin28 "$OLD_NCCL" || exit 2
    LIB=$OLD_NCCL/lib PROGRAM=gin28 run "$name" 2 "$@" NCCL_GIN_PLUGIN= NCCL_NET_PLUGIN="$DIST/lib/libnccl-net-doorbell.so"
}

for one in $RUNS; do
    case $one in
        self) run self 1 threads CUDA_VISIBLE_DEVICES=0 ;;
        two) run two 2 threads CUDA_VISIBLE_DEVICES=0 ;;
        handlers)
            run gpus-record 2 threads DOORBELL_HANDLER=record
            MODE=rates run rates-record 2 processes DOORBELL_HANDLER=record ;;
        signals) run gpu-signals 2 threads DOORBELL_NCCL_SIGNALS=gpu ;;
        gpus)
            [ "$GPUS" -lt 2 ] || run gpus "$GPUS" threads
            [ "$GPUS" -lt 2 ] || run processes "$GPUS" processes ;;
        # How far a queue's depth binds.
        depth) MODE=rates run depth 2 processes DOORBELL_NCCL_DEPTH=256 ;;
        rates | million | huge) MODE=$one run "$one" 2 processes ;;
        again)
            MODE=again run again 2 processes
            MODE=again run again-cores 2 processes DOORBELL_HCA_CORES=2 ;;
        # Where the time goes: docs/trace.md says how to look at the files.
        trip) MODE=trip run trip 2 processes DOORBELL_TRACE="$OUT/trip-%p.json" ;;
        cores) MODE=rates run cores 2 processes DOORBELL_HCA_CORES=2 ;;
        symmetric)
            # NCCL 2.30 takes a kernel over GIN by itself; one that estimates it to be slower than a ring must be told.
            if scatters symmetric NCCL_LSA_TEAM_SIZE=1; then named=(); else named=(NCCL_SYM_KERNEL=ReduceScatter_RailA2A_LsaLD); fi
            # By default NCCL counts blocks by the speed of the slowest network, which is a socket here.
            scatters symmetric-blocks NCCL_LSA_TEAM_SIZE=1 NCCL_SYM_CTAS=8 "${named[@]}" ||
                { failed=1; echo "FAILED: symmetric: no kernel over GIN was chosen" | tee -a "$OUT/nccl-results.txt"; } ;;
        roce) run roce 2 processes "${PACKETS[@]}" ;;
        hosts)
            run hosts 2 processes HOSTS_APART=1 "${PACKETS[@]}"
            scatters hosts-symmetric HOSTS_APART=1 "${PACKETS[@]}" ||
                { failed=1; echo "FAILED: hosts: no kernel over GIN was chosen" | tee -a "$OUT/nccl-results.txt"; } ;;
        fault) MODE=fault run fault 2 processes DOORBELL_FAULT="$SCRIPT" ;;
        release) MODE=fault run release 2 processes DOORBELL_FAULT="$SCRIPT" DOORBELL_ON_ERROR=release ;;
        killed | stopped) MODE=$one run "$one" 2 processes ;;
        proxy)
            # The same program, kernels and links; what differs is who writes the work requests.
            MODE=rates run proxy 2 processes NCCL_GIN_PLUGIN=none NCCL_RMA_PLUGIN="$PLUGIN" NCCL_GIN_TYPE=2 ;;
        hosted)
            beside sockets "$OUT/host" 2 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket
            beside nvlink "$OUT/host" 2 ;;
        floor) beside floor "$OUT/floor" "" ;;
        old) old old threads ;;
        oldfault)
            MODE=fault old old-fault processes DOORBELL_FAULT="$SCRIPT"
            MODE=killed old old-killed processes ;;
        wheel)
            # The block of the page, run where a reader would: in a checkout, with the tools of a distribution in the path.
            printf '\n== wheel: the commands of docs/nccl.md\n' | tee -a "$OUT/nccl-results.txt"
            sed -n '/^<!-- run: wheel -->/,/^```$/p' "$HERE/../../docs/nccl.md" | sed '1,2d;$d' >"$OUT/wheel.sh"
            [ -s "$OUT/wheel.sh" ] || { echo "docs/nccl.md has no such block"; exit 2; }
            (cd "$HERE/../.." && PATH="$DIST/bin:$(dirname "$NVCC"):$PATH" timeout --kill-after=5 "$LIMIT" bash -euo pipefail "$OUT/wheel.sh") 2>&1 |
                tee "$OUT/wheel.txt" | awk '!/NCCL INFO/ || /Assigned GIN/' | tee -a "$OUT/nccl-results.txt"
            [ "${PIPESTATUS[0]}" -eq 0 ] || { failed=1; echo "FAILED: wheel" | tee -a "$OUT/nccl-results.txt"; tail -20 "$OUT/wheel.txt"; } ;;
        *) echo "no run is called $one"; exit 2 ;;
    esac
done
exit $failed
