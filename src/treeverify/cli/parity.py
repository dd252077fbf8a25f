"""``treeverify parity``: statistical checks of the engine's output against the exact law."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from treeverify.parity.engine_law import CaseResult

app = typer.Typer(help="Does the engine's output follow the target's law?", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Does the engine's output follow the target's law?"""


@app.command()
def law(
    draws: Annotated[int, typer.Option(min=1, help="Continuations per prompt and seed.")] = 2000,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas; default: the ten listed.")] = None,
    plant: Annotated[
        str | None, typer.Option(help="Plant a bug: greedy-fallback | sibling-bias | draft-law; it should be found.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append one record per prompt to this file.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder with target/ and drafter/; default: packaged.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Test tokens 2 to 4, drawn through draft trees, against their exact joint law; exit code 1 if they differ."""
    from treeverify.bench.record import append, environment
    from treeverify.parity.engine_law import ALPHA, SEEDS
    from treeverify.parity.planted import bug

    if plant is not None:
        bug(plant)  # refuses an unknown name now, not after minutes of draws
    chosen = SEEDS if seeds is None else _seeds(seeds)
    results, seconds = _run(draws, chosen, plant, model)
    place = environment()
    records = [{**_record(result, draws, chosen, plant, seconds), **place} for result in results]
    for record in records if out else []:
        append(out or Path(), record)
    worst = min(result.worst for result in results)
    if as_json:
        print(json.dumps({"worst_holm": worst, "alpha": ALPHA, "differs": worst < ALPHA, "records": records}))
    else:
        _show(results, worst, seconds)
    if worst < ALPHA:
        raise typer.Exit(1)


def _seeds(text: str) -> tuple[int, ...]:
    from treeverify.errors import ConfigError

    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: expected different integers >= 0 separated by commas, got {text!r}")
    return seeds


def _run(
    draws: int, seeds: tuple[int, ...], plant: str | None, model: Path | None
) -> tuple[list[CaseResult], list[float]]:
    """Every case's result, and the seconds that each took."""
    from time import perf_counter

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from treeverify.env import cpu_threads
    from treeverify.models.pair import load_pair
    from treeverify.parity.engine_law import CASES, correct, exact_law, examine
    from treeverify.parity.replay import Replay

    torch.set_num_threads(cpu_threads())
    target, drafter, _ = load_pair(model)
    results, seconds = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for number, case in enumerate(CASES, start=1):
            began = perf_counter()
            name = f"prompt {number} of {len(CASES)} ({case.setting})"
            task = bar.add_task(name, total=None)

            def told(what: str, done: int, total: int, name: str = name, task: Any = task) -> None:
                bar.update(task, description=f"{name}: {what}", completed=done, total=total or None)

            exact = exact_law(target, case, told)
            results.append(examine(Replay(target, drafter), exact, case, seeds, draws, planted=plant, told=told))
            seconds.append(perf_counter() - began)
    return correct(results), seconds


def _record(
    result: CaseResult, draws: int, seeds: tuple[int, ...], plant: str | None, seconds: list[float]
) -> dict[str, Any]:
    case, pooled = result.case, result.pooled
    return {
        "benchmark": "law",
        "impl": "tree" if plant is None else f"tree, planted {plant}",
        "case": {"heldout": case.heldout, "tokens": case.tokens, "setting": str(case.setting)},
        "measures": {
            "seeds": list(seeds),
            "draws_per_seed": draws,
            "tests": [asdict(test) for test in result.tests],
            "holm": result.holm,
            "pooled": asdict(pooled),
            "pooled_holm": result.pooled_holm,
            "acceptance_length": round(result.acceptance_length, 4),
            "seconds_of_run": round(sum(seconds), 1),
        },
    }


def _show(results: list[CaseResult], worst: float, seconds: list[float]) -> None:
    from rich.console import Console
    from rich.table import Table

    from treeverify.parity.engine_law import ALPHA

    table = Table("prompt", "setting", "draws", "cells", "least p of a seed", "pooled p", "least p, Holm")
    for result in results:
        case, pooled = result.case, result.pooled
        table.add_row(
            f"held-out {case.heldout}, {case.tokens} tokens",
            str(case.setting),
            str(pooled.draws),
            str(pooled.cells),
            f"{min(test.p_value for test in result.tests):.3g}",
            f"{pooled.p_value:.3g}",
            f"{result.worst:.3g}",
        )
    console = Console()
    console.print(table)
    verdict = "the laws differ" if worst < ALPHA else "no difference found"
    tests = sum(len(result.tests) + 1 for result in results)
    console.print(f"{verdict}: least p of {tests} tests after Holm's correction {worst:.3g} ({sum(seconds):.0f} s)")
