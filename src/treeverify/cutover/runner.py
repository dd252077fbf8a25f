"""What keeps the server running: systemd, or a command that restarts it. Both set its environment by owned files."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from treeverify.cutover import files, replacing
from treeverify.cutover.exits import Exit
from treeverify.cutover.quoting import environment_file, parse_environment_file
from treeverify.cutover.units import Systemctl, Unit, in_control_group, next_environment, process_environment
from treeverify.errors import CutoverError

DROP_IN, ENVIRONMENT = "zz-treeverify.conf", "zz-treeverify.env"
"""Drop-ins are read in the order of their names, and the last EnvironmentFile= wins: hence ``zz``."""


@dataclass(frozen=True)
class Status:
    """What the runner knows of the service."""

    active: str
    """systemd's ActiveState; empty: not known."""
    pid: int
    """The main process; 0: not known, or none."""
    restarts: int = 0
    """Times that systemd restarted it by itself."""


class Runner(Protocol):
    """One service, and how it is configured and restarted."""

    def names(self) -> tuple[str, ...]:
        """Return what this service is called on this machine, for a lock; empty: nothing but its address tells it."""

    def check(self) -> None:
        """Raise CutoverError unless the service exists and may be changed by this user. Changes nothing."""

    def status(self) -> Status:
        """Return whether the service runs, and as which process."""

    def owns(self, pid: int) -> bool:
        """Whether process ``pid`` is part of the service."""

    def environment(self, serving: int) -> Mapping[str, str]:
        """Return what the main process was started with; ``serving``: a process that serves, for want of a better."""

    def next_start(self) -> Mapping[str, str]:
        """Return the environment of the next start, as far as it is known."""

    def stale(self) -> bool:
        """Whether its files changed without ``reload``: the next start after one is then not what is known."""

    def doubt(self, serving: int) -> str | None:
        """Return why ``next_start`` cannot be right, judged by ``serving``, a process that serves; None: no reason."""

    def contents(self, variables: Mapping[str, str]) -> dict[Path, str | None]:
        """Return the owned files that set ``variables`` at the next start, in the order in which to write them."""

    def reload(self) -> None:
        """Let changed files count at the next start."""

    def restart(self) -> None:
        """Begin a restart; it need not be complete."""

    def undo_commands(self) -> list[str]:
        """Return what a person types to bring the service up without the owned files."""

    def options(self) -> list[str]:
        """Return the options of ``treeverify cutover`` that name this runner, beside ``--unit``."""


class SystemdRunner:
    """A unit of the system's or the user's manager."""

    def __init__(self, unit: str, *, user: bool = False) -> None:
        self.unit = unit
        self._systemctl = Systemctl(user=user)
        self._options = ["--user"] if user else []
        self._manager = f"user {os.getuid()}'s " if user else ""

    def names(self) -> tuple[str, ...]:
        """See ``Runner``."""
        return (f"{self._manager}unit {self.unit}",)

    def _show(self) -> Unit:
        return self._systemctl.show(self.unit)

    def _paths(self) -> tuple[Path, Path]:
        folder = self._systemctl.configuration_folder() / f"{self.unit}.d"
        return folder / ENVIRONMENT, folder / DROP_IN

    def check(self) -> None:
        """See ``Runner``; also refuses what would win over the owned drop-in."""
        unit = self._show()
        for path in self._paths():
            files.require_replaceable(path)
        hidden = [name for name in ("KDTREE_VERIFY", "KDTREE_VERIFY_ALLOW") if name in unit.unset]
        if hidden:
            raise CutoverError(Exit.NOT_SWITCHABLE, f"unit {self.unit}: UnsetEnvironment= takes {hidden[0]} away")
        if "KDTREE_VERIFY=" in unit.command or "KDTREE_VERIFY_ALLOW=" in unit.command:
            raise CutoverError(Exit.NOT_SWITCHABLE, f"unit {self.unit}: ExecStart= sets the mode itself; take it out")
        for path in unit.drop_ins:
            if path.name > DROP_IN and _sets_environment(path):
                raise CutoverError(
                    Exit.NOT_SWITCHABLE, f"{path} is read after {DROP_IN} and sets environment; rename it"
                )

    def status(self) -> Status:
        """See ``Runner``."""
        unit = self._show()
        return Status(unit.active, unit.main_pid, unit.restarts)

    def owns(self, pid: int) -> bool:
        """See ``Runner``; judged by the control group."""
        return in_control_group(pid, self._show().control_group)

    def environment(self, serving: int) -> Mapping[str, str]:
        """See ``Runner``."""
        return process_environment(self._show().main_pid)

    def next_start(self) -> Mapping[str, str]:
        """See ``Runner``."""
        return next_environment(self._show(), self._systemctl.manager_environment())

    def stale(self) -> bool:
        """See ``Runner``; systemd itself does not notice drop-ins in a folder that is new."""
        unit = self._show()
        known = {path.name for path in unit.drop_ins}
        there = (path for folder in self._systemctl.folders() for path in (folder / f"{self.unit}.d").glob("*.conf"))
        return unit.stale or any(path.name not in known and path.exists() and path.stat().st_size for path in there)

    def doubt(self, serving: int) -> str | None:
        """See ``Runner``: systemd knows."""
        return None

    def contents(self, variables: Mapping[str, str]) -> dict[Path, str | None]:
        """See ``Runner``; an environment file, because ``Environment=`` would lose to one that the unit names."""
        environment, drop_in = self._paths()
        text = f"{files.MARK}[Service]\nEnvironmentFile={str(environment).replace('%', '%%')}\n"
        return {environment: files.MARK + environment_file(dict(variables)), drop_in: text}

    def reload(self) -> None:
        """See ``Runner``."""
        self._systemctl.call("daemon-reload")

    def restart(self) -> None:
        """See ``Runner``; a unit that failed too often is let off first."""
        self._systemctl.call("reset-failed", self.unit)
        self._systemctl.call("restart", "--no-block", self.unit)

    def undo_commands(self) -> list[str]:
        """See ``Runner``."""
        environment, drop_in = self._paths()
        again = [self._systemctl.command("daemon-reload"), self._systemctl.command("restart", self.unit)]
        return [_remove(drop_in, environment), *again]

    def options(self) -> list[str]:
        """See ``Runner``."""
        return self._options


def _remove(*paths: Path) -> str:
    """Return the command that removes owned files, and leaves a link to one where it is."""
    return shlex.join(["rm", "-f", *(str(replacing.target(path)) for path in paths)])


def _sets_environment(drop_in: Path) -> bool:
    """Whether a drop-in that systemd has read says anything of the environment; one that is gone does not."""
    try:
        lines = drop_in.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CutoverError(Exit.NOT_PERMITTED, f"{drop_in}: {error.strerror}") from None
    return any("Environment" in line for line in lines if not line.lstrip().startswith(("#", ";")))


class CommandRunner:
    """A service that a shell command restarts, and whose start reads an environment file that this tool owns."""

    def __init__(self, command: str, environment: Path, *, timeout: float) -> None:
        self._command, self._environment, self._timeout = command, environment.absolute(), timeout

    def names(self) -> tuple[str, ...]:
        """See ``Runner``: its unit's name is anything that an operator chose."""
        return ()

    def check(self) -> None:
        """See ``Runner``."""
        files.require_replaceable(self._environment)

    def status(self) -> Status:
        """See ``Runner``: nothing is known."""
        return Status("", 0)

    def owns(self, pid: int) -> bool:
        """See ``Runner``: it must at least be a process of this machine."""
        return Path(f"/proc/{pid}").exists()

    def environment(self, serving: int) -> Mapping[str, str]:
        """See ``Runner``."""
        return process_environment(serving)

    def next_start(self) -> Mapping[str, str]:
        """See ``Runner``: what the owned file says."""
        return parse_environment_file(files.read(self._environment) or "")

    def stale(self) -> bool:
        """See ``Runner``: nothing to read again."""
        return False

    def doubt(self, serving: int) -> str | None:
        """See ``Runner``: without the owned file, a start that gets a mode all the same gets it from elsewhere."""
        started = self.environment(serving).get("KDTREE_VERIFY", "off")
        if files.read(self._environment) is not None or started == "off":
            return None
        return (
            f"process {serving} was started with KDTREE_VERIFY={started}, and {self._environment} is not there: "
            "restart the server; if it has that again, take it out of what else its start reads"
        )

    def contents(self, variables: Mapping[str, str]) -> dict[Path, str | None]:
        """See ``Runner``."""
        return {self._environment: files.MARK + environment_file(dict(variables))}

    def reload(self) -> None:
        """See ``Runner``: nothing to do."""

    def restart(self) -> None:
        """Run the command to its end; raises CutoverError (``Exit.FAILED``) with its last words where it fails."""
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a pipe would be held open by the server that the command leaves behind
                timeout=self._timeout,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise CutoverError(Exit.FAILED, f"{self._command}: not done in {self._timeout:g} s") from None
        if done.returncode:
            raise CutoverError(Exit.FAILED, f"{self._command}: exit code {done.returncode}")

    def undo_commands(self) -> list[str]:
        """See ``Runner``."""
        return [_remove(self._environment), self._command]

    def options(self) -> list[str]:
        """See ``Runner``."""
        return ["--restart-command", self._command, "--environment-file", str(self._environment)]
