#!/bin/sh
# Runs a command with a /run of its own, where ip-netns(8) keeps its names, after `unshare --mount --net`: what it makes ends with it, and
# no root is needed where unprivileged user namespaces are permitted (`unshare --map-root-user --mount --net`).
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
exec "$@"
