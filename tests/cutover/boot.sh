#!/bin/bash
# A real systemd as PID 1 in namespaces of its own, on a machine whose own PID 1 may be something else; up in about 3 s.
#   unshare --pid --fork --kill-child --mount --uts --cgroup --ipc bash boot.sh FOLDER...
#   nsenter -t PID_OF_ITS_CHILD -p -m -u -i -C systemctl ...
# Network and the rest of the file system are the machine's own; it ends when unshare is killed.
# /tmp, /var/tmp, /run and /var/log are private on purpose: without that, systemd-tmpfiles empties the machine's /tmp.
# So is /etc/systemd/system. Each FOLDER stays where it is, whatever is mounted over its parents.
# Nothing of the machine is changed: kernel settings and devices are read-only, no module can be loaded and no clock set,
# generators (of mounts, swap) are not there, and whatever sets up a machine at its start is masked.
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir "/mnt/$number"
    mount --bind "$folder" "/mnt/$number"
done
for folder in /tmp /var/tmp /run /var/log /etc/systemd/system; do
    mount -t tmpfs -o mode=755 tmpfs "$folder"
done
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount --bind "/mnt/$number" "$folder"
done
mkdir -p /run/lock /run/systemd/system
umount -R /sys/fs/cgroup 2>/dev/null || true
mount --bind /proc/sys /proc/sys
awk '$2 == "/proc/sys" || $2 ~ "^/sys(/|$)" { print $2 }' /proc/self/mounts | while read -r place; do
    mount -o remount,bind,ro "$place"
done
for folder in /lib/systemd/system-generators /etc/systemd/system-generators; do
    if [ -d "$folder" ]; then mount -t tmpfs tmpfs "$folder"; fi
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cat >/run/systemd/system/mini.target <<'X'
[Unit]
Description=minimal
Requires=dbus.socket
After=dbus.socket
X
for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer \
    systemd-journald.service systemd-journald.socket systemd-journald-dev-log.socket systemd-journald-audit.socket \
    systemd-journal-flush.service systemd-udevd.service systemd-udevd-kernel.socket systemd-udevd-control.socket \
    systemd-udev-trigger.service systemd-sysctl.service procps.service systemd-modules-load.service kmod.service \
    kmod-static-nodes.service modprobe@.service proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount \
    systemd-binfmt.service systemd-remount-fs.service systemd-fsck-root.service dev-hugepages.mount dev-mqueue.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount \
    systemd-random-seed.service systemd-machine-id-commit.service systemd-sysusers.service systemd-firstboot.service \
    systemd-repart.service systemd-growfs-root.service systemd-hwdb-update.service systemd-update-done.service \
    systemd-timesyncd.service systemd-networkd.service systemd-network-generator.service ldconfig.service; do
    ln -s /dev/null "/run/systemd/system/$unit"
done
for wanted in /lib/systemd/system/{sysinit,local-fs,swap,timers}.target.wants/*; do # and what this distribution adds
    case $wanted in
    *.target | *'*') ;;
    *) ln -sf /dev/null "/run/systemd/system/${wanted##*/}" ;;
    esac
done
export container=treeverify
exec setpriv --bounding-set -sys_module,-sys_time \
    /lib/systemd/systemd --system --unit=mini.target --log-target=console --log-level=notice --show-status=no
