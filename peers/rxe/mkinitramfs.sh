#!/bin/bash
# mkinitramfs.sh KROOT OUT.cpio.gz [PROGRAM...]: the guest's whole file system.
# KROOT is an unpacked linux-image package; each PROGRAM goes to /bin with the libraries that it needs.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
KROOT=$1 OUT=$(realpath -m "$2")
shift 2
for MODULES in "$KROOT"/usr/lib/modules/* "$KROOT"/lib/modules/*; do [ -d "$MODULES" ] && break; done
VERSION=$(basename "$MODULES")
ROOT=$(mktemp -d)
trap 'rm -rf "$ROOT"' EXIT
mkdir -p "$ROOT"/{bin,sbin,usr/bin,usr/sbin,dev,proc,sys,tmp,run,etc,mods,lib64,mnt}
cp /bin/busybox "$ROOT/bin/"
for applet in $(/bin/busybox --list | grep -vx busybox); do ln -sf busybox "$ROOT/bin/$applet"; done

# Modules, dependencies first: the guest has no modprobe, it loads them in this order.
[ -s "$MODULES/modules.dep" ] || depmod -b "${MODULES%/lib/modules/*}" "$VERSION"
: >"$ROOT/mods/order"
add_module() {
    local name
    name=$(basename "${1%.xz}")
    grep -qx "$name" "$ROOT/mods/order" && return 0
    if [[ $1 == *.xz ]]; then xz -dc "$MODULES/$1" >"$ROOT/mods/$name"; else cp "$MODULES/$1" "$ROOT/mods/$name"; fi
    strip -g "$ROOT/mods/$name"
    echo "$name" >>"$ROOT/mods/order"
}
for module in virtio_pci virtio_net 9pnet_virtio 9p ib_core ib_uverbs rdma_cm rdma_ucm rdma_rxe veth crc32-pclmul crc32_generic crc32c_generic; do
    line=$(grep -E "/${module}\.ko(\.xz)?:" "$MODULES/modules.dep" || true)
    [ -n "$line" ] || continue # built in
    for dependency in $(echo "${line#*:}" | tr ' ' '\n' | grep . | tac); do add_module "$dependency"; done
    add_module "${line%%:*}"
done

put() { # FILE NAME
    local file
    file=$(readlink -f "$1")
    rm -f "$ROOT/bin/$2"
    cp "$file" "$ROOT/bin/$2"
    ldd "$file" 2>/dev/null | grep -oE '/[^ )]+' | while read -r library; do
        mkdir -p "$ROOT$(dirname "$library")"
        [ -e "$ROOT$library" ] || cp -L "$library" "$ROOT$library"
    done
}
for program in ip rdma tcpdump ib_write_bw ib_write_lat ib_send_bw ib_read_bw ibv_rc_pingpong ibv_uc_pingpong ibv_devinfo; do
    path=$(command -v $program) || { echo "mkinitramfs.sh: no $program on this machine" >&2; exit 1; }
    put "$path" $program
done
for program in "$@"; do put "$program" "$(basename "$program")"; done
LIB=lib/x86_64-linux-gnu
mkdir -p "$ROOT/$LIB" "$ROOT/usr/$LIB/libibverbs" "$ROOT/etc/libibverbs.d"
for library in libgcc_s.so.1 libm.so.6; do # pthread_exit loads the first by name; Rust programs from the share need both
    [ -e "$ROOT/$LIB/$library" ] || cp -L "/$LIB/$library" "$ROOT/$LIB/"
done
cp -L /usr/$LIB/libibverbs/librxe-rdmav*.so "$ROOT/usr/$LIB/libibverbs/"
cp /etc/libibverbs.d/rxe.driver "$ROOT/etc/libibverbs.d/"
install -m 755 "$HERE/init" "$ROOT/init"
(cd "$ROOT" && find . | cpio -o -H newc --quiet | gzip -1 >"$OUT")
