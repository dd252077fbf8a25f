"""Train the target and its drafter, measure them, and write both as bfloat16 checkpoints.

    python -m training.train --out DIR                  everything, about five minutes on one H200
    python -m training.train --phase target --out DIR   only the target
    python -m training.train --phase drafter --restart DIR --out DIR2

`--restart DIR` begins from the saved bfloat16 weights (float32 masters are rebuilt from them). Single fields of the
recipes are changed with `--set target.drop=0.2` and the like, those of the shapes with `--set shape.layers=2`.
"""

import argparse
import dataclasses
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import acceptance, loops
from training.checkpoint import load_drafter, load_target, save_pair
from training.corpus import PROMPT, unpack
from training.drafter import Drafter
from training.layers import mebibytes
from training.shapes import DrafterShape, TargetShape
from training.target import Target


@dataclass
class Generation:
    """How much text the target writes for its drafter."""

    rounds: int = 3
    rows: int = 4096
    new: int = 384


@dataclass
class Plan:
    """All settings of one run."""

    shape: TargetShape = field(default_factory=TargetShape)
    draft: DrafterShape = field(default_factory=DrafterShape)
    target: loops.TargetRecipe = field(default_factory=loops.TargetRecipe)
    drafter: loops.DrafterRecipe = field(default_factory=loops.DrafterRecipe)
    generation: Generation = field(default_factory=Generation)
    prompts: int = 64
    walk: int = 128
    loss_windows: int = 256

    def change(self, setting: str) -> None:
        """Apply one `part.field=value`."""
        name, _, text = setting.partition("=")
        part, _, key = name.partition(".")
        value = json.loads(text)
        if key:
            old = getattr(self, part)
            setattr(self, part, dataclasses.replace(old, **{key: tuple(value) if isinstance(value, list) else value}))
        elif hasattr(self, part):
            setattr(self, part, value)
        else:
            raise SystemExit(f"unknown setting {name}")


class Run:
    """One training run: its device, data, record and output folder."""

    def __init__(self, plan: Plan, corpus: dict[str, Any], out: Path) -> None:
        self.plan, self.out, self.begin = plan, out, time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.corpus: dict[str, Tensor] = {
            k: torch.from_numpy(v.astype("int32")).to(self.device) for k, v in corpus.items() if "lengths" not in k
        }
        out.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        self.record: dict[str, Any] = {"device": name, "torch": torch.__version__, "plan": asdict(plan)}

    def log(self, *words: object) -> None:
        """Print with the seconds since the start."""
        print(f"[{time.perf_counter() - self.begin:6.1f}]", *words, flush=True)

    def keep(self, name: str, value: Any) -> None:
        """Add to the record, on the screen and on disk."""
        self.record[name] = value
        self.log(name, json.dumps(value))
        (self.out / "record.json").write_text(json.dumps(self.record, indent=1) + "\n")

    def prepare_target(self, restart: Path | None) -> Target:
        """A new target, or the one saved in `restart`; still float32."""
        torch.manual_seed(self.plan.target.seed)
        drop = self.plan.target.drop
        target = Target(self.plan.shape, drop) if restart is None else load_target(restart, self.plan.shape, drop)
        return target.to(self.device)

    def train_target(self, target: Target) -> None:
        """Train, measure on all splits, save."""
        self.keep("target_MiB", round(mebibytes(target), 3))
        run = loops.train_target(target, self.corpus, self.plan.target, self.dtype, self.log)
        self.keep("target", run)
        self.measure_target(target)
        save_pair(target, None, self.out)

    def measure_target(self, target: Target) -> None:
        """Loss on every split, in windows of 1024 tokens (fewer where a split is short)."""
        length = min(1024, self.corpus["valid"].numel() // 2)
        splits = ("heldout", "valid", "library", "tests")
        self.keep("loss", {s: loops.evaluate(target, self.corpus[s], length, self.plan.loss_windows) for s in splits})

    def train_drafter(self, target: Target, restart: Path | None) -> Drafter:
        """Let the target write, train the drafter on that and on text, save both."""
        target.lower(self.dtype).eval().requires_grad_(False)
        start, g = time.perf_counter(), self.plan.generation
        torch.manual_seed(self.plan.drafter.seed)
        generated = loops.own_text(target, self.corpus, g.rounds, g.rows, g.new).to(torch.int32)
        self.keep("generation", {"tokens": generated.numel(), "seconds": round(time.perf_counter() - start, 1)})
        if self.device == "cuda":
            torch.cuda.empty_cache()
        has_drafter = restart is not None and (restart / "drafter").exists()
        drafter = load_drafter(restart, self.plan.draft, target) if has_drafter else Drafter(self.plan.draft)
        drafter.to(self.device)
        self.keep("drafter_MiB", round(mebibytes(drafter), 3))
        run = loops.train_drafter(drafter, target, self.corpus, generated, self.plan.drafter, self.log)
        self.keep("drafter", run)
        self.keep("bytes", save_pair(target, drafter, self.out))
        return drafter

    def measure_pair(self, target: Target, drafter: Drafter) -> None:
        """Acceptance on validation windows (to choose by) and on the held-out prompts (to report)."""
        torch.manual_seed(5)
        size = PROMPT + self.plan.walk + acceptance.DEPTH
        sets = {
            "valid": loops.windows(self.corpus["valid"], self.plan.prompts, size),
            "heldout": self.corpus["heldout_prompts"][: self.plan.prompts, :size].long(),
        }
        for name, texts in sets.items():
            self.keep(f"acceptance_{name}", acceptance.measure(target, drafter, texts, PROMPT, self.plan.walk))


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".carry/corpus.npz.xz"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phase", choices=("all", "target", "drafter"), default="all")
    parser.add_argument("--restart", type=Path, help="folder with target/ (and drafter/) to begin from")
    parser.add_argument("--set", action="append", default=[], metavar="PART.FIELD=VALUE")
    given = parser.parse_args(arguments)
    if given.phase == "drafter" and given.restart is None:
        parser.error("--phase drafter needs --restart")
    plan = Plan()
    for setting in given.set:
        plan.change(setting)
    torch.backends.cuda.enable_cudnn_sdp(False)  # ten times slower than flash while lengths grow
    run = Run(plan, unpack(given.data), given.out)
    target = run.prepare_target(given.restart)
    if given.phase in ("all", "target"):
        run.train_target(target)
    else:
        target.lower(run.dtype).eval()
        run.measure_target(target)
    if given.phase in ("all", "drafter"):
        drafter = run.train_drafter(target, given.restart)
        run.measure_pair(target, drafter)
    run.log("done")


if __name__ == "__main__":
    main()
