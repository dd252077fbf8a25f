#!/bin/bash
# A real systemd as PID 1 in namespaces of its own, on a machine whose own PID 1 may be something else; up in about 3 s.
#   unshare --pid --fork --kill-child --mount --uts --cgroup --ipc bash boot.sh FOLDER...
#   nsenter -t PID_OF_ITS_CHILD -p -m -u -i -C systemctl ...
# Network and the rest of the file system are the machine's own; it ends when unshare is killed.
# /tmp, /var/tmp, /run and /var/log are private on purpose: without that, systemd-tmpfiles empties the machine's /tmp.
# So is /etc/systemd/system. Each FOLDER stays where it is, whatever is mounted over its parents.
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
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cat >/run/systemd/system/mini.target <<'X'
[Unit]
Description=minimal
Requires=dbus.socket
After=dbus.socket
X
for unit in systemd-tmpfiles-setup.service systemd-tmpfiles-clean.timer systemd-journald.service \
    systemd-journald.socket systemd-journald-dev-log.socket systemd-udevd.service; do
    ln -s /dev/null "/run/systemd/system/$unit"
done
export container=treeverify
exec /lib/systemd/systemd --system --unit=mini.target --log-target=console --log-level=notice --show-status=no
