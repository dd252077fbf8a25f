"""Build and check the tree operators on a GPU: every check of their tests, and captured steps; a table, a JSON.

Needs torch, numpy, apache-tvm-ffi, filelock and nvcc; no pytest. Run from the repository root, ``src`` on PYTHONPATH:

    python scripts/gpu/check_tree_ops.py --out results
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/ops/tree_ops")]

import gpu_step  # noqa: E402
import torch  # noqa: E402
from tree_implementations import Api  # noqa: E402

from treeverify.ops import compiled  # noqa: E402

MODULES = ("check_build", "check_accept", "check_commit", "check_mask", "check_topk", "check_window")
SMALL = (
    "all_equal", "nothing_to_draft", "of_equal_siblings_the_first", "garbage_in_padded_requests", "mixed_batch_walks",
    "the_draw_is_exact_where_all_weights_are_equal", "a_row_without_a_law_ends_the_walk", "padded_requests",
    "gathers", "dtypes_and_batches", "garbage_parents_are_padding", "bfloat16_and_batches",
    "adversarial_orders", "nan_and_infinity_spoil_their_own_row", "index_dtypes_and_batches",
    "places_outside_the_table_are_slot_zero",
)  # fmt: skip
"""What a sanitizer run can afford: hostile data for every operator, groups of blocks among them."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only checks whose name contains this")
    parser.add_argument("--small", action="store_true", help="a few small checks and no graph, as for a sanitizer")
    parser.add_argument("--out", type=Path, help="folder for check_tree_ops.json")
    return parser.parse_args()


def checks(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield (group, name, check)."""
    ops = Api("cuda")
    for module in MODULES:
        for name, check in importlib.import_module(module).CHECKS.items():
            if name in SMALL or not arguments.small:
                yield module.removeprefix("check_"), name, partial(check, ops)
    if not arguments.small:
        for name, check in gpu_step.CHECKS.items():
            yield "step", name, partial(check, torch.device("cuda", torch.cuda.current_device()))


def main() -> int:
    """Return 0 if every check passed."""
    arguments = parse()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    compiled.prepare(torch.device("cuda"))
    records: list[dict[str, object]] = []
    for group, name, check in checks(arguments):
        if arguments.only not in name:
            continue
        started, problem = time.monotonic(), ""
        try:
            check()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  (a driver reports whatever a check raises, and goes on)
            problem = f"{type(error).__name__}: {error}"
            print(f"FAILED {group} {name}: {''.join(traceback.format_exception(error)[-2:]).strip()[-900:]}\n")
        seconds = round(time.monotonic() - started, 3)
        records.append({"group": group, "check": name, "passed": not problem, "problem": problem, "seconds": seconds})
        print(f"{group:10}{name:56}{'FAILED' if problem else 'ok':>8}{seconds:>9.1f} s", flush=True)
        if "CUDA error" in problem or "AcceleratorError" in problem:
            print("the context is lost; later checks cannot run")
            break
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "check_tree_ops.json").write_text(json.dumps(records, indent=1))
    passed = sum(bool(record["passed"]) for record in records)
    print(f"{passed} of {len(records)} checks passed")
    return 0 if records and passed == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
