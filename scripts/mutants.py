"""Do the tests of the DDTREE step notice a fault? ``make mutants`` plants one after the other in a copy of the sources.

Each fault is a text that stands once in a file and what takes its place. A fault that all tests survive is printed, and
the exit status is 1. The checkout is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/step"


class Mutant(NamedTuple):
    """``old``, which stands once in ``file`` of ``src/treeverify``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


STEP, PLAIN, DRAFT, WINDOW, NUMBERS = (f"step/{name}.py" for name in ("step", "plain", "draft", "window", "randomness"))
COMPACT = "        kv_compact(self._pools, window.slots, accepted.path, accepted.lengths)\n"
MASK = "        tree_mask(trees.parents, window.lengths, out=masks)\n"
PUBLISH = "            publish(lengths)\n"
MUTANTS = (
    Mutant("accepted rows are not moved", STEP, COMPACT, ""),
    Mutant("rows are moved along no path", STEP, COMPACT, COMPACT.replace(".path", ".path.sort(1).values")),
    Mutant("no node sees another", STEP, MASK, MASK + "        [m.fill_(0) for m in masks.wanted.values()]\n"),
    Mutant("every node sees every node", STEP, MASK, MASK + "        [m.fill_(-1) for m in masks.wanted.values()]\n"),
    Mutant("positions are one too far", STEP, MASK, MASK + "        positions += 1\n"),
    Mutant(
        "lengths without the bonus",
        STEP,
        "lengths = window.lengths + accepted.lengths\n",
        "lengths = window.lengths + accepted.lengths - 1\n",
    ),
    Mutant("lengths are not published", STEP, PUBLISH, "            pass\n"),
    Mutant(
        "greedy in place of sampled",
        STEP,
        "        if law is None:\n            samples",
        "        if True:\n            samples",
    ),
    Mutant(
        "plain steps are greedy",
        STEP,
        "        if law is None:\n            return",
        "        if True:\n            return",
    ),
    Mutant("numbers of the position before", STEP, "lengths, self._depth + 1)", "lengths - 1, self._depth + 1)"),
    Mutant("features are not kept", STEP, "        self._append(window, accepted, features)\n", ""),
    Mutant(
        "features of the width before the front", STEP, "window, begin = window.front(width)", "window, begin = window"
    ),
    Mutant(
        "trees are not cut",
        STEP,
        "            trees = front(trees, width)\n",
        "            width = trees.tokens.shape[1]\n",
    ),
    Mutant("a plain step's features are a view", STEP, "verified.features.clone()", "verified.features"),
    Mutant(
        "a run verifies its root again", STEP, "            tokens = given[-1].clamp(min=0)  # -1 is no token\n", ""
    ),
    Mutant(
        "a run's lengths stand still",
        PLAIN,
        "return lengths + self._places[:run].unsqueeze(1)",
        "return lengths + 0 * self._places[:run].unsqueeze(1)",
    ),
    Mutant(
        "text after no token is kept",
        PLAIN,
        "(before == 0).sum(1, dtype=torch.int32) + 1",
        "(before >= 0).sum(1, dtype=torch.int32) + 1",
    ),
    Mutant("a run's slots are all the first", WINDOW, "slots=slots[place], lengths", "slots=slots[0], lengths"),
    Mutant(
        "the front begins a slot late",
        WINDOW,
        "self.slots[:, :width].contiguous()",
        "self.slots[:, 1 : width + 1].contiguous()",
    ),
    Mutant(
        "the front's parents are one short",
        DRAFT,
        "trees.parents[:, :width].contiguous()",
        "trees.parents[:, :width].clamp(min=0)",
    ),
    Mutant("candidates of the root's own place", DRAFT, "[:, 1:].to(", "[:, :-1].to("),
    Mutant("the seed is ignored", NUMBERS, "_mix(_mix(seeds)[:, None]", "_mix(0 * _mix(seeds)[:, None]"),
    Mutant("one number for all positions", NUMBERS, "positions * _GOLDEN", "0 * positions * _GOLDEN"),
)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Plant one fault in the copy in ``folder``, run the tests, and take it out again; true if all of them pass."""
    path = folder / "treeverify" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file}: expected the text once, found {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", TESTS, "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: the tests did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    """Try every fault; return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src/treeverify", folder / "treeverify", ignore=shutil.ignore_patterns("__pycache__"))
        alive = []
        for mutant in MUTANTS:
            if survives(mutant, folder):
                alive.append(mutant.name)
            print("SURVIVED" if alive[-1:] == [mutant.name] else "killed  ", mutant.name, flush=True)
    print(f"{len(MUTANTS) - len(alive)} of {len(MUTANTS)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
