#!/bin/bash
# setup.sh DIR: a Linux soft-RoCE (rxe) guest from packages: kernel, initramfs and the test programs, all under DIR.
#
# Needs Debian 12 or later and its package archive. As root it installs the packages; otherwise they have to be there.
# The kernel is downloaded and unpacked, never installed. A second call with everything in place does nothing.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=$(realpath -m "${1:?usage: setup.sh DIR}")
# Whatever changes the guest is part of the stamp.
STAMP=$(cat "$HERE"/{setup.sh,mkinitramfs.sh,init,wiretest.c,extract-vmlinux.py} | sha256sum | cut -c1-16)
if [ -s "$OUT/vmlinux" ] && [ -s "$OUT/initramfs.cpio.gz" ] && [ "$(cat "$OUT/stamp" 2>/dev/null)" = "$STAMP" ]; then
    echo "rxe guest: there ($OUT)"
    exit 0
fi

PACKAGES=(qemu-system-x86 busybox-static rdma-core ibverbs-utils ibverbs-providers perftest iproute2 tcpdump
    cpio xz-utils zstd kmod gcc libc6-dev libibverbs-dev binutils python3)
missing=()
for p in "${PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
export DEBIAN_FRONTEND=noninteractive
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "setup.sh: these packages are missing, install them as root: ${missing[*]}" >&2
        exit 1
    fi
    timeout 600 apt-get update -qq
    timeout 900 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

mkdir -p "$OUT/dl"
cd "$OUT"
# The generic image has rdma_rxe; the cloud image has not.
kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
if [ -z "$kernel" ]; then
    echo "setup.sh: the package archive knows no linux-image-amd64; run apt-get update" >&2
    exit 1
fi
if ! ls dl/"${kernel}"_*.deb >/dev/null 2>&1; then
    # The sandbox user of apt may not write here: as root the download runs unsandboxed, which is a warning only.
    (cd dl && timeout 600 apt-get download -q "$kernel" 2>/dev/null)
fi
rm -rf kroot
dpkg-deb -x dl/"${kernel}"_*.deb kroot
python3 "$HERE/extract-vmlinux.py" kroot/boot/vmlinuz-* vmlinux
gcc -O2 -Wall -o wiretest "$HERE/wiretest.c" -libverbs
bash "$HERE/mkinitramfs.sh" kroot initramfs.cpio.gz wiretest
rm -rf kroot
echo "$STAMP" >stamp
echo "rxe guest: built ($OUT, $kernel)"
