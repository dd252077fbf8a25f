"""Build and check the compiled tree_attention on a GPU: grid, points, faults, graphs, random replays; a table, a JSON.

Needs torch, apache-tvm-ffi, filelock and nvcc; no pytest. Run from the repository root with ``src`` on PYTHONPATH:

    python scripts/gpu/check_attention.py --implementations naive,portable --replays 1000 --out results
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/ops/tree_attention")]

import gpu_faults  # noqa: E402
import gpu_graphs  # noqa: E402
import gpu_points  # noqa: E402
import torch  # noqa: E402
from gpu_kernel import Kernel, exact_on_device  # noqa: E402

from treeverify.errors import BuildError  # noqa: E402
from treeverify.jit import compiler  # noqa: E402
from treeverify.jit.modules import module_named, target_for  # noqa: E402

SMALL = ("F3-mask-of-exact-size", "F22-65-nodes-bits", "F24-9-nodes-21-prefix", "F18-16-heads", "chain", "all-empty")
"""What a sanitizer run can afford."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", default="naive,portable,portable-99k")
    parser.add_argument("--replays", type=int, default=300, help="random graph replays per implementation")
    parser.add_argument("--only", default="", help="run only checks whose name contains this")
    parser.add_argument("--small", action="store_true", help="a few small cases and no graph, as for a sanitizer")
    parser.add_argument("--out", type=Path, help="folder for check_attention.json")
    return parser.parse_args()


def build(names: list[str], failures: list[str]) -> list[str]:
    """Compile all in parallel; return the names that are there."""
    target = target_for(torch.cuda.get_device_capability())

    def one(name: str) -> bool:
        try:
            print(f"{name}: {compiler.locate(module_named(f'tree_attention.{name}'), target)}")
        except BuildError as error:
            failures.append(f"{name}: {error}")
            return False
        return True

    with ThreadPoolExecutor(len(names)) as pool:
        return [name for name, built in zip(names, pool.map(one, names), strict=True) if built]


def grid_check(name: str, kernel: Kernel) -> None:
    """One case of the table."""
    case = gpu_faults.grid_case(name, kernel.device)
    kernel.matches(case, exact_on_device(case))


def checks(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[Kernel], None]]]:
    """Yield (group, name, check)."""
    for name in SMALL if arguments.small else gpu_faults.GRID:
        yield "grid", name, partial(grid_check, name)
    if arguments.small:
        return
    for name, check in gpu_points.CHECKS.items():
        yield "points", name, check
    for name, check in gpu_faults.CHECKS.items():
        yield "faults", name, check
    for name, check in gpu_graphs.CHECKS.items():
        yield "graphs", name, check
    if arguments.replays:
        replays = partial(gpu_graphs.random_replays, count=arguments.replays)
        yield "replays", f"{arguments.replays}_random_replays", replays


def main() -> int:
    """Return 0 if every check passed."""
    arguments = parse()
    failures: list[str] = []
    records: list[dict[str, object]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    names = build(arguments.implementations.split(","), failures)
    for name in names:
        kernel = Kernel(name, bare=arguments.small)
        for group, title, check in checks(arguments):
            if arguments.only not in title:
                continue
            kernel.worst, started, problem = 0.0, time.monotonic(), ""
            try:
                check(kernel)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  (a driver reports whatever a check raises, and goes on)
                problem = f"{type(error).__name__}: {error}"
                trace = "".join(traceback.format_exception(error)[-2:])
                failures.append(f"{name} {title}: {trace.strip()[-900:]}")
            seconds = time.monotonic() - started
            records.append(
                {
                    "implementation": name,
                    "group": group,
                    "check": title,
                    "passed": not problem,
                    "problem": problem[:2000],
                    "worst_relative_error": kernel.worst,
                    "seconds": round(seconds, 3),
                }
            )
            torch.cuda.empty_cache()
            if "CUDA error" in problem or "AcceleratorError" in problem:
                failures.append(f"{name}: the context is lost; later checks cannot run")
                return finish(arguments, records, failures)
    return finish(arguments, records, failures)


def finish(arguments: argparse.Namespace, records: list[dict[str, object]], failures: list[str]) -> int:
    """Write the record, print failures and then the table."""
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "check_attention.json").write_text(json.dumps(records, indent=1))
    for failure in failures:
        print(f"FAILED {failure}\n")
    print(f"{'implementation':16}{'group':10}{'passed':>10}{'worst error':>14}{'seconds':>10}")
    for key in dict.fromkeys((record["implementation"], record["group"]) for record in records):
        mine = [record for record in records if (record["implementation"], record["group"]) == key]
        passed = f"{sum(bool(record['passed']) for record in mine)}/{len(mine)}"
        worst = max(float(str(record["worst_relative_error"])) for record in mine)
        seconds = sum(float(str(record["seconds"])) for record in mine)
        print(f"{key[0]!s:16}{key[1]!s:10}{passed:>10}{worst:>14.3e}{seconds:>10.1f}")
    return 1 if failures or not records else 0


if __name__ == "__main__":
    sys.exit(main())
