"""A server, a runner, a sample and a verdict in memory, for what needs no process of its own."""

from __future__ import annotations

import json

from tests.cutover.conftest import free_port

from treeverify.control.schema import PluginState
from treeverify.cutover.machine import Judges
from treeverify.cutover.plan import CutoverPlan
from treeverify.cutover.runner import CommandRunner
from treeverify.cutover.samples import Plan, Prompt, Sample
from treeverify.cutover.tool import Tool
from treeverify.cutover.verdict import Verdict
from treeverify.env import VerifyMode
from treeverify.errors import ServerUnreachableError, SwitchError

URL = f"http://fake:{free_port()}"
"""No other test's: two cutovers of one port are kept apart."""


class FakeService:
    """A server in memory. ``refuses``: modes that it cannot be switched to (any more)."""

    def __init__(self):
        self.mode, self.pid, self.refuses, self.up = "off", 1, set(), True

    def read(self):
        if not self.up:
            raise ServerUnreachableError("http://fake/server_info: connection refused")
        rank = {"rank": 0, "pid": self.pid, "mode": self.mode, "allowed": ["off", "validate", "on"]}
        rank |= {"switches": 0, "switched_at": -1, "backends": []}
        return [PluginState.model_validate_json(json.dumps({"version": "0", "engine": "fake", "ranks": [rank]}))]

    def switch(self, mode):
        if mode.value in self.refuses:
            raise SwitchError(f"{mode.value}: refused")
        self.mode = mode.value
        return self.read()

    def require_healthy(self):
        self.read()

    def refuses_logprobs(self, plan):
        return None


class FakeRunner(CommandRunner):
    """Restarts nothing; no process is asked what it was started with."""

    def environment(self, serving):
        return self.next_start()


def sample(url, plan, progress=None):
    parts = {"generations": [], "probes": [], "speed": [], "failures": []}
    return Sample(taken_at="2026-01-01T00:00:00Z", url=url, mode="off", plan=plan, **parts)


def verdict(stage, *_, passed=True):
    texts = {"gate": "test", "threshold": "none", "reason": "said so"}
    return [Verdict(stage=stage, passed=passed, figures={}, **texts)]


class Restarts(FakeRunner):
    """Restarts the fake server, with what the owned file says."""

    def __init__(self, service, environment):
        super().__init__("true", environment, timeout=5)
        self.service = service

    def restart(self):
        self.service.mode = self.next_start().get("KDTREE_VERIFY", "off")
        self.service.pid += 1
        self.service.refuses = set()


def tool_of(folder, service, runner=None):
    """A tool for that service, which judges everything open."""
    runner = runner or FakeRunner("true # again", folder / "owned.env", timeout=5)
    return Tool("fake", URL, folder / "state", runner, service, lambda line: None, judges=Judges(sample, verdict))


def plan_to_on(**changes):
    prompts = Plan(prompts=[Prompt(name="a", input="x", forced="abcdefgh")])
    return CutoverPlan(unit="fake", url=URL, target=VerifyMode.ON, soak_seconds=0, prompts=prompts, **changes)


def with_judge(tool, judge):
    object.__setattr__(tool, "judges", Judges(sample, judge))
    return tool


def last(tool):
    return tool.status()["stage"]
