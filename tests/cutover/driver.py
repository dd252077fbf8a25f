"""The ``treeverify`` command with what takes long left out, and killed where a test wants it.

``driver.py KILL GATES -- ARGUMENTS``. KILL: ``never``, or ``before:N``, ``torn:N``, ``after:N`` for the N-th record
that this process appends: SIGKILL before it, half-way through it, or as soon as it is on the disk. GATES: ``real``, or
the stage whose gate is closed, or ``open``; unless ``real``, nothing is asked of the server but its control calls.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from treeverify.cli.main import main
from treeverify.cutover import gates, journal, report, samples

kill, closed = sys.argv[1:3]
how, _, which = kill.partition(":")
appended = 0
real_append = journal.Journal.append


def append(self, run, event, stage, **data):
    global appended
    appended += 1
    if appended != int(which or 0):
        return real_append(self, run, event, stage, **data)
    if how == "after":
        real_append(self, run, event, stage, **data)
    elif how == "torn":
        size = self.path.stat().st_size if self.path.exists() else 0
        real_append(self, run, event, stage, **data)
        os.truncate(self.path, (size + self.path.stat().st_size) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return None


def collect(url, plan, on_progress=None):
    if on_progress is not None:
        on_progress(1, 1, "prompt")
    return samples.Sample(
        taken_at="2026-01-01T00:00:00Z",
        url=url,
        mode="off",
        plan=plan,
        generations=[],
        probes=[],
        speed=[],
        failures=[],
    )


def judge(stage, baseline, candidate, states_before, states_after, limits):
    reason = "as the test wants it"
    passed = stage != closed
    return [gates.Verdict(stage=stage, gate="test", passed=passed, figures={}, threshold="none", reason=reason)]


journal.Journal.append = append
if closed != "real":
    samples.collect, gates.judge = collect, judge
    report.write = lambda path, *rest: path
sys.argv = ["treeverify", *sys.argv[4:]]
main()
