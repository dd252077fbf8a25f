"""A server that a shell script restarts, the command to cut it over, and what a test wants to know of both."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from treeverify.control.client import read_state, switch_mode
from treeverify.cutover.quoting import parse_environment_file
from treeverify.cutover.units import process_environment
from treeverify.env import VerifyMode
from treeverify.errors import ServerError

HERE = Path(__file__).parent
RESTART = """
if [ -f pid ]; then
    kill "$(cat pid)" 2>/dev/null
    while kill -0 "$(cat pid)" 2>/dev/null; do sleep 0.02; done
fi
set -a
. ./base.env
[ -f owned.env ] && . ./owned.env
{server} >server.log 2>&1 </dev/null &
echo $! >pid
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class Outcome:
    code: int
    out: str

    @property
    def last(self) -> str:
        return self.out.strip().splitlines()[-1]


class Driver:
    """The command, by way of ``driver.py``."""

    def __init__(self, folder: Path, prefix: tuple[str, ...] = ()) -> None:
        self._out = folder / "out"
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __call__(self, *argv: object, **request: object) -> Outcome:
        self._out.unlink(missing_ok=True)
        request |= {"argv": [str(word) for word in argv], "out": str(self._out)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Outcome(code, self._out.read_text() if self._out.exists() else "")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Bench:
    """One server, a stub unless ``server`` says otherwise, under a restart script."""

    folder: Path
    driver: Driver
    server: tuple[str, ...] = (str(HERE / "stub_server.py"), "{port}")
    base: dict[str, str] = field(default_factory=lambda: {"KDTREE_VERIFY_ALLOW": "off,validate,on"})

    def __post_init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = self.folder / "state"
        self.owned = self.folder / "owned.env"
        words = [sys.executable, *(word.format(port=self.port) for word in self.server)]
        prompt = {"input": "def parse(", "forced": "path):\n    return path\n"}
        (self.folder / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
        self.settings(prompts_file=str(self.folder / "prompts.jsonl"))
        (self.folder / "restart.sh").write_text(RESTART.format(server=shlex.join(words)))

    def settings(self, **fields: object) -> None:
        (self.folder / "settings.json").write_text(json.dumps({"health_seconds": 60} | fields))

    @property
    def restart_command(self) -> str:
        return f"cd {shlex.quote(str(self.folder))} && sh restart.sh"

    def start(self) -> None:
        """Have a server in mode off, with nothing of an earlier cutover."""
        self.owned.unlink(missing_ok=True)
        for path in sorted(self.state.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        try:
            if "KDTREE_VERIFY_ALLOW" in self.base:
                pid = switch_mode(self.url, VerifyMode.OFF)[0].ranks[0].pid
                if process_environment(pid).get("KDTREE_VERIFY") == self.base.get("KDTREE_VERIFY"):
                    return
        except ServerError:
            pass
        self.boot()

    def boot(self) -> None:
        (self.folder / "base.env").write_text("".join(f"{name}={value}\n" for name, value in self.base.items()))
        subprocess.run(["sh", "-c", self.restart_command], check=True)
        for _ in range(3000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"the server did not come up: {(self.folder / 'server.log').read_text()[-2000:]}")

    def stop(self) -> None:
        pid = self.folder / "pid"
        if pid.exists():
            with_pid = int(pid.read_text())
            if Path(f"/proc/{with_pid}").exists():
                os.kill(with_pid, signal.SIGKILL)
            pid.unlink()

    def options(self) -> list[str]:
        where = ["--unit", "stub", "--url", self.url, "--state", str(self.state)]
        return [*where, "--restart-command", self.restart_command, "--environment-file", str(self.owned)]

    def run(self, to: str = "on", *more: str, **request: object) -> Outcome:
        short = ["--soak", "0", "--settings", str(self.folder / "settings.json")]
        return self.driver("cutover", "run", *self.options(), "--to", to, *short, *more, **request)

    def rollback(self, **request: object) -> Outcome:
        return self.driver("cutover", "rollback", *self.options(), **request)

    def status(self) -> dict:
        return json.loads(self.driver("cutover", "status", *self.options(), "--json").out)

    def modes(self) -> tuple[str, str]:
        """Mode of the live server, and of its next start."""
        try:
            live = read_state(self.url)[0].ranks[0].mode.value
        except ServerError as error:
            live = type(error).__name__
        text = self.owned.read_text() if self.owned.exists() else ""
        return live, (self.base | parse_environment_file(text)).get("KDTREE_VERIFY", "off")

    def pid(self) -> int:
        return read_state(self.url)[0].ranks[0].pid

    def records(self) -> list[dict]:
        """Whole records of the journal, read without the code under test."""
        path = self.state / "journal.jsonl"
        text = path.read_text(errors="replace") if path.exists() else ""
        return [json.loads(line)["record"] for line in text.split("\n")[:-1]]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    driver = Driver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def systemd(tmp_path_factory):
    """A systemd of this module's own; skips where none can be started."""
    from tests.cutover.systemd import Systemd

    systemd = Systemd(tmp_path_factory.mktemp("systemd"))
    yield systemd
    systemd.stop()


@pytest.fixture(scope="module")
def driver_inside(systemd):
    """The command, run beside that systemd's units."""
    driver = Driver(systemd.log.parent, systemd.prefix)
    yield driver
    driver.close()


@pytest.fixture
def bench(tmp_path, driver):
    bench = Bench(tmp_path, driver)
    yield bench
    bench.stop()
