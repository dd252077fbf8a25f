"""``treeverify mode``, ``probe`` and ``replay``: what an operator asks of a live server and of its dumps."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeverify.env import parse_verify_mode
from treeverify.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from treeverify.control.schema import BackendState, PluginState
    from treeverify.observe.calls import RecordedCall
    from treeverify.observe.replay import Report

NOT_SERVING, BREACHES, WORSE = 1, 3, 1
"""Exit codes; 2 is an error, as everywhere."""

Url = Annotated[str, typer.Argument(help="The server, http://HOST:PORT.")]
Key = Annotated[str | None, typer.Option(help="Bearer token of the server; default: TREEVERIFY_API_KEY.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def mode(url: Url, mode: Annotated[str, typer.Argument(help="off | validate | on")], api_key: Key = None) -> None:
    """Switch a live server's verify attention on all its ranks; exit code 1 if it refuses or a rank does not follow."""
    from treeverify.control.client import switch_mode

    states = switch_mode(url, parse_verify_mode(mode, "MODE"), api_key=api_key)
    ranks = [rank for state in states for rank in state.ranks]
    steps = sorted({rank.switched_at for rank in ranks})
    print(f"mode {mode}: {len(ranks)} ranks in {len(states)} groups, since step {' or '.join(map(str, steps))}")


def probe(
    url: Url,
    expect: Annotated[str | None, typer.Option(help="The mode that every rank should have.")] = None,
    interval: Annotated[float, typer.Option(min=0, help="Seconds between the two readings; 0: read once.")] = 1.0,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Ask a live server what serves its verify calls; exit code 1 if that is not ours, 3 if validate found a breach."""
    from treeverify.control.assess import breaches, problems
    from treeverify.control.client import read_state

    if not math.isfinite(interval):
        raise ConfigError(f"--interval: expected a finite number of seconds, got {interval}")
    wanted = None if expect is None else parse_verify_mode(expect, "--expect")
    earlier = states = read_state(url, api_key=api_key)
    if interval > 0:
        time.sleep(interval)
        states = read_state(url, api_key=api_key)
    found, beyond = problems(states, earlier, wanted), breaches(states)
    code = NOT_SERVING if found else BREACHES if beyond else 0
    if as_json:
        plain = [state.model_dump(mode="json") for state in states]
        print(json.dumps({"exit_code": code, "problems": found, "breaches": beyond, "groups": plain}))
    else:
        _show_states(states)
        for line in found:
            print(f"problem: {line}")
        if beyond:
            print(
                f"problem: {beyond} validate calls beyond the bound: treeverify replay on their dumps says whose fault"
            )
    if code:
        raise typer.Exit(code)


def replay(
    file: Annotated[Path, typer.Argument(help="A dump that mode validate wrote (KDTREE_DUMP_DIR).")],
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    as_json: Json = False,
) -> None:
    """Run a dumped verify call again; exit code 1 if ours is further from float64 than a correct result may be."""
    import torch

    from treeverify.env import cpu_threads
    from treeverify.observe.calls import load
    from treeverify.observe.replay import replay as run

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: expected auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda, but torch finds no GPU here")
    call = load(file)
    torch.set_num_threads(cpu_threads())
    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    report = run(call, torch.device(name))
    if as_json:
        print(json.dumps(_plain(call, report)))
    else:
        _show_replay(call, report)
    if report.worse:
        raise typer.Exit(WORSE)


def _show_states(states: list[PluginState]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for group, state in enumerate(states):
        title = f"group {group}: treeverify {state.version} in {state.engine}"
        table = Table("rank", "mode, kernel", "passes", "validate found", title=title, show_lines=True)
        for rank in state.ranks:
            if not rank.backends:
                table.add_row(str(rank.rank), f"{rank.mode}\nno backend of ours")
            for backend in rank.backends:
                served = "\n".join(f"{mode} {counts.calls}" for mode, counts in backend.served.items())
                table.add_row(str(rank.rank), f"{rank.mode}\n{backend.kernel}", served, _found(backend))
        console.print(table)
        console.print(_shapes(state))


def _found(backend: BackendState) -> str:
    worst = max(backend.layers, key=lambda layer: layer.max_row_ulp, default=None)
    if worst is None:
        return "nothing compared yet"
    rows = sum(layer.rows for layer in backend.layers)
    where = f"\nlayer {worst.layer}, node {worst.worst_node}, head {worst.worst_head}" if worst.worst_node >= 0 else ""
    mismatched = sum(layer.mismatched_rows for layer in backend.layers)
    return (
        f"{rows} rows, NaN/Inf differ in {mismatched}\n"
        f"worst {worst.max_row_ulp:.2g} of {backend.bound_ulp:g} ULP{where}\n"
        f"{backend.breaches} breaches, {backend.dumps} dumped"
    )


def _shapes(state: PluginState) -> Table:
    from rich.table import Table

    table = Table("requests", "nodes", "heads", "mask", "modes", title="shapes seen")
    shapes = {
        (shape.requests, shape.nodes, shape.heads, shape.mask, ", ".join(shape.modes))
        for rank in state.ranks
        for backend in rank.backends
        for shape in backend.shapes
    }
    for shape in sorted(shapes):
        table.add_row(*map(str, shape))
    return table


def _show_replay(call: RecordedCall, report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    notes = "".join(f", {name} {value}" for name, value in sorted(call.notes.items()))
    print(f"{call.nodes} nodes, {call.heads} heads, {call.prefix} prefix rows, {call.q.dtype}{notes}")
    table = Table("against float64", "relative", "row ULP", "node", "head", "NaN/Inf")
    for result in report.results:
        figures = (f"{result.relative:.3e}", f"{result.max_row_ulp:.3g}", result.node, result.head, result.mismatched)
        table.add_row(result.name, *map(str, figures))
    Console().print(table)
    for name, reason in report.skipped.items():
        print(f"not run: {name}: {reason}")
    print(f"{report.judged} stands for ours: {report.verdict}")


def _plain(call: RecordedCall, report: Report) -> dict[str, Any]:
    return {
        "nodes": call.nodes,
        "heads": call.heads,
        "prefix": call.prefix,
        "dtype": str(call.q.dtype).removeprefix("torch."),
        "notes": dict(call.notes),
        "device": report.device,
        "skipped": report.skipped,
        "judged": report.judged,
        "worse": report.worse,
        "verdict": report.verdict,
        "results": [{name: _number(value) for name, value in vars(result).items()} for result in report.results],
    }


def _number(value: object) -> object:
    """JSON has no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
