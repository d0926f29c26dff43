#!/bin/bash
# vm.sh DIR COMMAND: runs one guest of setup.sh's DIR to its end; COMMAND runs in it. The console goes to standard output.
#
# No privileges: RoCE frames travel as datagrams between LOCAL and PEER (UDP ports of 127.0.0.1), TCP control connections through
# QEMU's user network: HOSTFWD="18600 18515" forwards those ports of 127.0.0.1 to the guest, and the guest reaches the host's at 10.0.2.2.
# Environment: LOCAL=47001 PEER=47000 MAC=52:54:00:00:00:02 IP=192.168.77.2/24 MTU=1500 SMP=1 MEM=256 SHARE=FOLDER (at /mnt) HOSTFWD=
set -euo pipefail
DIR=$1 COMMAND=$2
forward=
for port in ${HOSTFWD:-}; do forward+=",hostfwd=tcp:127.0.0.1:${port%:*}-:${port#*:}"; done
words="console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check"
words+=" rxe.ip=${IP:-192.168.77.2/24} rxe.mtu=${MTU:-1500} ${SHARE:+rxe.share=1} rxe.cmd64=$(printf '%s' "$COMMAND" | base64 -w0)"
if [ ${#words} -gt 2000 ]; then
    echo "vm.sh: the command is too long for a kernel's command line (${#words} > 2000 with everything): put it into SHARE" >&2
    exit 2
fi
# KVM is not to be counted on in CI (nested or absent), and the rates that matter are ratios inside one guest.
exec qemu-system-x86_64 -M q35 -accel "${ACCEL:-tcg,tb-size=256}" -cpu max -smp "${SMP:-1}" -m "${MEM:-256}" \
    -nodefaults -no-user-config -nographic -serial stdio -no-reboot \
    -kernel "$DIR/vmlinux" -initrd "$DIR/initramfs.cpio.gz" \
    -netdev "dgram,id=n0,local.type=inet,local.host=127.0.0.1,local.port=${LOCAL:-47001},remote.type=inet,remote.host=127.0.0.1,remote.port=${PEER:-47000}" \
    -device "virtio-net-pci,netdev=n0,mac=${MAC:-52:54:00:00:00:02},mrg_rxbuf=on,romfile=" \
    -netdev "user,id=n1$forward" -device "virtio-net-pci,netdev=n1,romfile=" \
    ${SHARE:+-virtfs "local,path=$SHARE,mount_tag=share,security_model=none,readonly=on"} \
    -append "$words" </dev/null
