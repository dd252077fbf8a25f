"""A real systemd for tests, and services under it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.cutover.conftest import Driver, Outcome
from tests.ports import free_port

from treeverify.control.client import read_state
from treeverify.errors import ServerError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--cgroup", "--ipc")


def _die_with_parent() -> None:
    """Let the kernel end this process with the tests, however they end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Systemd:
    """A systemd that runs as PID 1 in namespaces of its own until ``stop``."""

    def __init__(self, folder: Path) -> None:
        needed = ["unshare", "nsenter", "setpriv", "systemctl", "dbus-daemon", "/lib/systemd/systemd"]
        missing = [name for name in needed if shutil.which(name) is None]
        if missing:
            pytest.skip(f"systemd cannot be started: no {', '.join(missing)} (Debian: systemd, dbus)")
        if os.geteuid():
            pytest.skip("systemd cannot be started: needs root")
        self.log = folder / "systemd.log"
        kept = [str(path) for path in (ROOT, Path(sys.prefix), folder) if not path.is_relative_to("/usr")]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                ["unshare", *NAMESPACES, "bash", str(HERE / "boot.sh"), *kept],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        if not self._up():
            self.stop()
            pytest.skip(f"systemd did not start: {self.log.read_text()[-500:]}")

    def _up(self) -> bool:
        for _ in range(600):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            if self._process.poll() is not None:
                return False
            if children.exists() and (found := children.read_text().split()):
                self.prefix = ("nsenter", "-t", found[0], "-p", "-m", "-u", "-i", "-C")
                if self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded"):
                    return True
            time.sleep(0.1)
        return False

    def run(self, *words: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess:
        found = subprocess.run([*self.prefix, *words], capture_output=True, text=True, timeout=600, input=text)
        assert not check or found.returncode == 0, f"{words}: {found.stdout}{found.stderr}"
        return found

    def write(self, path: str, text: str) -> None:
        """Write a file of the machine inside, its folders made if missing."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "write", path, text=text)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(600)


@dataclass
class UnitBench:
    """One service of a server under ``systemd``, and the command to cut it over, run beside it."""

    systemd: Systemd
    driver: Driver
    folder: Path
    name: str
    command: str
    """With {port}."""
    environment: dict[str, str] = field(default_factory=lambda: {"KDTREE_VERIFY_ALLOW": "off,validate,on"})
    settings: Path | None = None

    def __post_init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.unit = f"{self.name}-{os.getpid()}.service"  # a lock of its name holds on the whole machine
        self.path = f"/run/systemd/system/{self.unit}"
        self.drop_ins = f"/etc/systemd/system/{self.unit}.d"
        self.state = self.folder / f"{self.name}-state"

    def start(self, service: str = "") -> None:
        """Write the unit, ``service`` being more lines of its section, and wait until its server answers."""
        lines = [f'Environment="{name}={value}"\n' for name, value in self.environment.items()]
        start = f"ExecStart={self.command.format(port=self.port)}\nRestart=on-failure\nRestartSec=100ms\n"
        log = f"StandardOutput=append:{self.folder}/{self.name}.log\nStandardError=inherit\nWorkingDirectory={ROOT}\n"
        self.text = f"[Service]\n{start}{log}{''.join(lines)}{service}"
        self.systemd.write(self.path, self.text)
        self.systemctl("daemon-reload")
        self.restart()

    def systemctl(self, *words: str) -> subprocess.CompletedProcess:
        return self.systemd.run("systemctl", *words)

    def restart(self) -> None:
        self.systemctl("restart", self.unit)
        for _ in range(6000):
            try:
                read_state(self.url)
            except ServerError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"{self.unit} did not come up: {(self.folder / f'{self.name}.log').read_text()[-2000:]}")

    def cutover(self, what: str, *more: str, **request: object) -> Outcome:
        where = ["--unit", self.unit, "--url", self.url, "--state", str(self.state)]
        return self.driver("cutover", what, *where, *more, **request)

    def run(self, to: str, *more: str, **request: object) -> Outcome:
        chosen = [] if self.settings is None else ["--settings", str(self.settings)]
        return self.cutover("run", "--to", to, "--soak", "0", *chosen, *more, **request)

    def live(self) -> str:
        return read_state(self.url)[0].ranks[0].mode.value

    def process(self) -> dict[str, str]:
        """Environment of the main process."""
        pid = self.systemd.run("systemctl", "show", self.unit, "--property=MainPID", "--value").stdout.strip()
        words = self.systemd.run("cat", f"/proc/{pid}/environ").stdout.split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def owned(self) -> list[str]:
        """Files of the tool."""
        return self.systemd.run("find", self.drop_ins, "-type", "f", check=False).stdout.split()

    def stop(self) -> None:
        self.systemd.run("systemctl", "stop", self.unit, check=False)
