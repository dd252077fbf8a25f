"""The systemd that tests start, as root, changes nothing of the machine that runs them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.cutover.systemd import Systemd

pytestmark = [pytest.mark.systemd, pytest.mark.slow]
MASKED = [
    *("systemd-sysctl.service", "systemd-modules-load.service", "kmod-static-nodes.service", "modprobe@fuse.service"),
    *("proc-sys-fs-binfmt_misc.automount", "proc-sys-fs-binfmt_misc.mount", "systemd-binfmt.service"),
    *("systemd-remount-fs.service", "systemd-fsck-root.service", "systemd-growfs-root.service"),
    *("dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    *("sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "systemd-udevd.service"),
    *("systemd-udev-trigger.service", "systemd-tmpfiles-setup.service", "systemd-tmpfiles-setup-dev.service"),
    *("systemd-random-seed.service", "systemd-machine-id-commit.service", "systemd-sysusers.service"),
    *("systemd-firstboot.service", "systemd-repart.service", "systemd-timesyncd.service"),
]
SYS_MODULE, SYS_TIME = 16, 25


def test_what_sets_up_a_machine_is_masked(systemd):
    said = systemd.run("systemctl", "show", "--property=LoadState", "--value", *MASKED).stdout.split()
    assert dict(zip(MASKED, said, strict=True)) == dict.fromkeys(MASKED, "masked")
    wanted = [path.name for path in Path("/lib/systemd/system/sysinit.target.wants").iterdir()]
    setting_up = [name for name in wanted if not name.endswith(".target")]
    said = systemd.run("systemctl", "show", "--property=LoadState", "--value", *setting_up).stdout.split()
    assert set(said) == {"masked"}


def test_no_service_runs_but_the_bus(systemd):
    listed = systemd.run("systemctl", "list-units", "--type=service,automount,swap", "--plain", "--no-legend").stdout
    assert {line.split()[0] for line in listed.splitlines()} <= {"dbus.service"}


def test_kernel_settings_and_devices_cannot_be_written(systemd):
    for path in ("/proc/sys/vm/swappiness", "/proc/sys/kernel/hostname"):
        same = systemd.run("sh", "-c", 'value=$(cat "$1") && echo "$value" >"$1"', "write", path, check=False)
        assert same.returncode != 0, path
        assert "Read-only" in same.stderr
    options = systemd.run("findmnt", "--noheadings", "--output", "OPTIONS", "/sys").stdout.split(",")
    assert "ro" in options


def test_no_module_can_be_loaded_and_no_clock_set(systemd):
    status = systemd.run("cat", "/proc/1/status").stdout
    for name in ("CapBnd", "CapEff"):
        held = int(next(line for line in status.splitlines() if line.startswith(name)).split()[1], 16)
        assert not held & (1 << SYS_MODULE | 1 << SYS_TIME), name


def settings():
    """Kernel settings of this machine that root may write, and its modules."""
    modules = Path("/proc/modules")  # not there where the kernel has none
    found = {"modules": {line.split()[0] for line in modules.read_text().splitlines()} if modules.exists() else set()}
    for path in Path("/proc/sys").rglob("*"):
        try:
            mode = path.stat().st_mode
            if stat.S_ISREG(mode) and mode & 0o200 and mode & 0o400 and path.name != "ns_last_pid":
                found[str(path)] = path.read_bytes()
        except OSError:
            continue  # one that cannot be read on this machine, or went with its device
    return found


def test_the_machine_is_the_same_after_a_start(tmp_path):
    before = settings()
    systemd = Systemd(tmp_path)
    systemd.stop()
    after = settings()
    assert {name: (before[name], after[name]) for name in before.keys() & after if before[name] != after[name]} == {}
