# For the scripts beside it: two CPUs, and UCX's own benchmark on them. Sets cpu_a, cpu_b, ucx and ucx_put.
#
# UCX comes from its wheel, unpacked under target/ (never installed; python3 with pip fetches it), or lies in the folder that UCX names.

ucx=${UCX:-target/ucx}
if [ ! -x "$ucx/libucx/bin/ucx_perftest" ]; then
    mkdir -p "$ucx"
    python3 -m pip download -q --no-deps -d "$ucx" "libucx-cu13==1.22.0"
    python3 -m zipfile -e "$ucx"/libucx_cu13-1.22.0-*.whl "$ucx"
    chmod +x "$ucx"/libucx/bin/ucx_perftest
fi
ucx=$(realpath "$ucx")

# CPUS=A,B says which; else the first two allowed ones that are not threads of one core.
cpus=${CPUS:-$(python3 -c '
import os, pathlib
def core(cpu):
    file = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text() if file.exists() else cpu
allowed = sorted(os.sched_getaffinity(0))
other = [c for c in allowed if core(c) != core(allowed[0])] or allowed[1:] or allowed
print(f"{allowed[0]},{other[0]}")')}
cpu_a=${cpus%,*} cpu_b=${cpus#*,}

# ucx_put TRANSPORT TEST SIZE ITERATIONS -> "MB/s messages/s us us", between $cpu_a and $cpu_b
ucx_put() {
    (
        export LD_LIBRARY_PATH=$ucx/libucx/lib UCX_MODULE_DIR=$ucx/libucx/lib/ucx UCX_TLS=$1 UCX_WARN_UNUSED_ENV_VARS=n
        if [ "$1" = tcp ]; then export UCX_NET_DEVICES=lo; fi
        port=$((20000 + RANDOM % 20000)) bin=$ucx/libucx/bin/ucx_perftest
        timeout 60 taskset -c "$cpu_a" "$bin" -p $port >/dev/null 2>&1 &
        server=$!
        sleep 0.5
        timeout 60 taskset -c "$cpu_b" "$bin" 127.0.0.1 -p $port -t "$2" -s "$3" -n "$4" 2>/dev/null | awk '/^Final:/ {print $6, $8, $4, $5}'
        kill $server 2>/dev/null || true
        wait $server 2>/dev/null || true
    )
}
