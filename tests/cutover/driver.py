"""Runs the ``treeverify`` command often and quickly: imports once, forks for each, and kills it where a test wants it.

A line of JSON in: ``argv``; ``out``: file for what it prints; ``kill``: ``after:N`` or ``torn:N`` for the N-th record
that it appends to a journal: SIGKILL as soon as the record is on the disk, or with the record half written (so that
the act before it is done and not told), or ``reload:N``: before its N-th ``systemctl daemon-reload``; ``closed``:
stage whose gate is closed, or ``real``: unless ``real``, nothing is asked of the server for samples; ``page``:
whether the report is written (default: with ``real`` only); ``uid``: user to become; ``env``: variables to set first;
``umask``. A line out: the exit code,
negative: the signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from treeverify.cli.main import main
from treeverify.control import http
from treeverify.cutover import acts, gates, journal, report, samples, tool, units  # noqa: F401  (imported once, here)


def append_and_die(how, which):
    real, count = journal.Journal.append, 0

    def append(self, run, event, stage, **data):
        nonlocal count
        count += 1
        size = self.path.stat().st_size if self.path.exists() else 0
        record = real(self, run, event, stage, **data)
        if count == which:
            if how == "torn":
                os.truncate(self.path, (size + self.path.stat().st_size) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    journal.Journal.append = append


def die_before_reload(which):
    real, left = units.Systemctl.call, [which]

    def call(self, *words):
        left[0] -= words == ("daemon-reload",)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *words)

    units.Systemctl.call = call


def collect(url, plan, on_progress=None):
    if on_progress is not None:
        on_progress(1, 1, "prompt")
    parts = {"generations": [], "probes": [], "speed": [], "failures": []}
    return samples.Sample(taken_at="2026-01-01T00:00:00Z", url=url, mode="off", plan=plan, **parts)


def judge_all_but(closed):
    def judge(stage, baseline, candidate, states_before, states_after, limits):
        texts = {"threshold": "none", "reason": "as the test wants it"}
        return [gates.Verdict(stage=stage, gate="test", passed=stage != closed, figures={}, **texts)]

    return judge


def child(request):
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(out, 1)
    os.dup2(out, 2)
    acts._POLL = 0.05
    if "env" in request:
        os.environ.update(request["env"])
        http._trust.cache_clear()
    if "umask" in request:
        os.umask(request["umask"])
    if request.get("kill"):
        how, _, which = request["kill"].partition(":")
        die_before_reload(int(which)) if how == "reload" else append_and_die(how, int(which))
    if request.get("closed") != "real":
        samples.collect, gates.judge = collect, judge_all_but(request.get("closed"))
    if not request.get("page", request.get("closed") == "real"):
        report.write = lambda path, *rest: path
    if request.get("uid"):
        os.setuid(request["uid"])
    sys.argv = ["treeverify", *request["argv"]]
    main()


def serve():
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(json.loads(line))
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:  # noqa: BLE001  (a forked child must not return into the loop)
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    http._trust()  # once, for all children
    serve()
    os._exit(0)
