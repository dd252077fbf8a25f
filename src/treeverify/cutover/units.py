"""What systemd knows of a unit, and what the unit's next start would have in its environment."""

from __future__ import annotations

import glob
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from treeverify.cutover.exits import Exit
from treeverify.cutover.quoting import parse_environment_file, split_words
from treeverify.errors import CutoverError

_PROPERTIES = (
    "LoadState", "ActiveState", "MainPID", "NRestarts", "NeedDaemonReload", "ControlGroup", "DropInPaths",
    "Environment", "EnvironmentFiles", "UnsetEnvironment", "ExecStart",
)  # fmt: skip
_FILE = re.compile(r"(?P<path>.*) \(ignore_errors=(?P<optional>yes|no)\)")


@dataclass(frozen=True)
class Unit:
    """A unit as ``systemctl show`` tells it."""

    name: str
    active: str
    main_pid: int
    """0: no process."""
    restarts: int
    """Times that systemd restarted it by itself since it was last started by hand."""
    stale: bool
    """Whether its files changed since systemd read them."""
    command: str
    """``ExecStart=``, as systemd prints it."""
    control_group: str
    drop_ins: tuple[Path, ...]
    environment: dict[str, str]
    environment_files: tuple[tuple[str, bool], ...]
    """Path or pattern, and whether the file may be missing; the last one wins."""
    unset: frozenset[str]


class Systemctl:
    """Calls ``systemctl`` with a time limit; ``user``: the user's own manager."""

    def __init__(self, *, user: bool = False, timeout: float = 60.0) -> None:
        self._scope = ["--user"] if user else []
        self._timeout = timeout
        self.scope = "user" if user else "system"

    def command(self, *words: str) -> str:
        """Return the command line that ``call`` runs, for a person to type."""
        return shlex.join(["systemctl", *self._scope, *words])

    def call(self, *words: str) -> str:
        """Return what systemctl prints; raises CutoverError (``Exit.FAILED``) with its words where it fails."""
        try:
            done = subprocess.run(
                ["systemctl", *self._scope, "--no-ask-password", "--no-pager", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._timeout,
                start_new_session=True,  # an interrupt from the terminal must not end it half-way
            )
        except FileNotFoundError:
            raise CutoverError(Exit.NO_UNIT, "systemctl is not installed; use --restart-command") from None
        except subprocess.TimeoutExpired:
            raise CutoverError(Exit.FAILED, f"{self.command(*words)}: no answer in {self._timeout:g} s") from None
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise CutoverError(Exit.FAILED, f"{self.command(*words)}: {said}")
        return done.stdout

    def show(self, name: str) -> Unit:
        """Return the unit ``name``; raises CutoverError (``Exit.NO_UNIT``) where none is loaded under that name."""
        try:
            printed = self.call("show", name, f"--property={','.join(_PROPERTIES)}")
        except CutoverError as error:
            raise CutoverError(Exit.NO_UNIT, str(error)) from None
        values: dict[str, list[str]] = {key: [] for key in _PROPERTIES}
        for line in printed.removesuffix("\n").split("\n"):
            key, _, value = line.partition("=")
            if key in values:
                values[key].append(value)
            else:  # the argument of a command may have line ends
                values["ExecStart"].append(line)
        one = {key: (found or [""])[0] for key, found in values.items()}
        if one["LoadState"] != "loaded":
            raise CutoverError(Exit.NO_UNIT, f"unit {name}: {one['LoadState'] or 'unknown'} ({self.scope} manager)")
        if not one["MainPID"]:
            raise CutoverError(Exit.NO_UNIT, f"unit {name}: not a service")
        return Unit(
            name=name,
            active=one["ActiveState"],
            main_pid=int(one["MainPID"]),
            restarts=int(one["NRestarts"] or 0),
            stale=one["NeedDaemonReload"] == "yes",
            command=" ".join(values["ExecStart"]),
            control_group=one["ControlGroup"],
            drop_ins=tuple(Path(path) for path in split_words(one["DropInPaths"])),
            environment=assignments(split_words(one["Environment"])),
            environment_files=tuple(_environment_file(value) for value in values["EnvironmentFiles"] if value),
            unset=frozenset(word.partition("=")[0] for word in split_words(one["UnsetEnvironment"])),
        )

    def folders(self) -> list[Path]:
        """Return the manager's search path for units and drop-ins."""
        return [Path(word) for word in split_words(self.call("show", "--property=UnitPath", "--value").strip())]

    def configuration_folder(self) -> Path:
        """Return the manager's folder for the administrator's own units and drop-ins, from its search path."""
        for folder in self.folders():
            if folder.parts[-2:] == ("systemd", self.scope):
                return folder
        raise CutoverError(Exit.FAILED, "systemctl show --property=UnitPath: no folder for the administrator's units")

    def manager_environment(self) -> dict[str, str]:
        """Return the variables that the manager hands to every service."""
        return assignments(self.call("show-environment").removesuffix("\n").split("\n"))


def assignments(words: list[str]) -> dict[str, str]:
    """Return ``NAME=value`` words as a mapping, the last of a name winning."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _environment_file(value: str) -> tuple[str, bool]:
    match = _FILE.fullmatch(value)
    if match is None:
        raise CutoverError(Exit.FAILED, f"systemctl show: EnvironmentFiles={value}: not understood")
    return match["path"], match["optional"] == "yes"


def next_environment(unit: Unit, manager: dict[str, str]) -> dict[str, str]:
    """Return the environment of the unit's next start: manager, ``Environment=``, files in order, what is unset.

    The order is that of systemd's ``build_environment`` and ``exec_child``. Raises CutoverError (``Exit.FAILED``) for
    an environment file that cannot be read: then a restart would fail or be unpredictable.
    """
    found = manager | unit.environment
    for pattern, optional in unit.environment_files:
        paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        for path in paths:
            try:
                found |= parse_environment_file(Path(path).read_text(encoding="utf-8"))
            except FileNotFoundError:
                if not optional:
                    raise CutoverError(
                        Exit.FAILED, f"EnvironmentFile={path} of {unit.name} does not exist; a restart would fail"
                    ) from None
            except (OSError, UnicodeDecodeError) as error:
                raise CutoverError(Exit.FAILED, f"EnvironmentFile={path} of {unit.name}: {error}") from None
    return {name: value for name, value in found.items() if name not in unit.unset}


def process_environment(pid: int) -> dict[str, str]:
    """Return the environment that process ``pid`` was started with.

    A process that set a title of its own may have overwritten it (``setproctitle``, in SGLang's schedulers); then it is
    the nearest ancestor's, of which ``pid`` inherited it. Raises CutoverError (``Exit.FAILED``) where none can be read,
    ``Exit.NOT_PERMITTED`` where this user may not.
    """
    asked = pid
    while pid > 1 or pid == asked:  # process 1 was started by none that has an environment
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError as error:
            code = Exit.NOT_PERMITTED if isinstance(error, PermissionError) else Exit.FAILED
            raise CutoverError(code, f"environment of process {pid}: {error.strerror}") from None
        found = assignments([word.decode(errors="surrogateescape") for word in content.split(b"\0") if word])
        if "PATH" in found:
            return found
        pid = int(parent)
    raise CutoverError(Exit.FAILED, f"environment of process {asked}: overwritten, and so are its ancestors'")


def in_control_group(pid: int, control_group: str) -> bool:
    """Whether process ``pid`` belongs to ``control_group`` or to one inside it."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    paths = [line.split(":", 2)[2] for line in lines]
    return any(path == control_group or path.startswith(f"{control_group}/") for path in paths)
