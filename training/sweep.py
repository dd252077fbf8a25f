"""Train variants side by side, one per GPU, and keep the best by the validation files.

With one GPU only the first variant of each list is trained. The held-out files are never looked at for the choice.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

TARGETS = {
    "drop10": ["target.drop=0.1", "target.decay=0.3"],
    "drop05": ["target.drop=0.05", "target.decay=0.15"],
}
DRAFTERS = {
    "reach": [],
    "plain": ["drafter.reach=0.0", "drafter.depth_scale=3.0"],
}


def launch(phase: str, variants: dict[str, list[str]], out: Path, common: list[str]) -> list[Path]:
    """Run every variant on its own GPU at the same time; returns the folders of those that succeeded."""
    running = []
    for gpu, (name, settings) in enumerate(variants.items()):
        folder = out / f"{phase}_{name}"
        command = [sys.executable, "-m", "training.train", "--phase", phase, "--out", str(folder), *common]
        for setting in settings:
            command += ["--set", setting]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONUNBUFFERED": "1"}
        running.append((folder, subprocess.Popen(command, env=environment)))
    done = [folder for folder, process in running if process.wait() == 0]
    if not done:
        raise SystemExit(f"no {phase} variant succeeded")
    return done


def record(folder: Path) -> dict:
    """The record of one variant."""
    return json.loads((folder / "record.json").read_text())


def target_score(folder: Path) -> float:
    """Lower validation loss is better."""
    return -record(folder)["loss"]["valid"]["loss"]


def drafter_score(folder: Path) -> float:
    """Mean acceptance length of a tree of 16 over the three ways of measuring, on validation text."""
    table = record(folder)["acceptance_valid"]
    kinds = ("free_running", "forced_text", "forced_argmax")
    return sum(table[kind]["16"] for kind in kinds) / len(kinds)


def main() -> None:
    """Command line; unknown arguments go to every training run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    given, common = parser.parse_known_args()
    gpus = max(1, torch.cuda.device_count())
    given.out.mkdir(parents=True, exist_ok=True)
    summary = {}
    targets = launch("target", dict(list(TARGETS.items())[:gpus]), given.out, common)
    best = max(targets, key=target_score)
    summary["targets"] = {f.name: record(f)["loss"] for f in targets}
    print("best target", best.name, json.dumps(summary), flush=True)
    drafters = launch("drafter", dict(list(DRAFTERS.items())[:gpus]), given.out, [*common, "--restart", str(best)])
    chosen = max(drafters, key=drafter_score)
    summary["drafters"] = {f.name: {k: v for k, v in record(f).items() if "acceptance" in k} for f in drafters}
    summary |= {"chosen": [best.name, chosen.name], "target_record": record(best), "drafter_record": record(chosen)}
    shutil.copytree(chosen / "target", given.out / "target", dirs_exist_ok=True)
    shutil.copytree(chosen / "drafter", given.out / "drafter", dirs_exist_ok=True)
    (given.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("chosen", *summary["chosen"], flush=True)


if __name__ == "__main__":
    main()
