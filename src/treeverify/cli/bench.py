"""``treeverify bench``: acceptance, speed and attention, each leaving a record, and a page made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treeverify.bench.record import Record

app = typer.Typer(help="Measure, and leave a record.", no_args_is_help=True)

ModelFolder = Annotated[Path | None, typer.Option(help="Folder with target/ and drafter/; default: packaged.")]
Prompts = Annotated[int | None, typer.Option(min=1, help="Held-out prompts; default: all there are.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens after each prompt.")]
Out = Annotated[Path | None, typer.Option(help="Append the record to this .jsonl file.")]
Page = Annotated[Path | None, typer.Option(help="Write the page (and its plot under img/) here.")]
Commit = Annotated[str | None, typer.Option(help="Written into the record; default: ask git.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record instead.")]


@app.command()
def acceptance(
    prompts: Prompts = None,
    new_tokens: NewTokens = 128,
    out: Out = None,
    page: Page = None,
    model: ModelFolder = None,
    commit: Commit = None,
    as_json: AsJson = False,
) -> None:
    """Acceptance length at T = 0 on held-out text: chain, prompt lookup and trees, free-running and teacher-forced."""
    import torch

    from treeverify.bench import acceptance as bench
    from treeverify.bench import pages, setting
    from treeverify.cli.progress import progress
    from treeverify.env import cpu_threads
    from treeverify.models.heldout import load_heldout
    from treeverify.models.pair import load_pair

    torch.set_num_threads(cpu_threads())
    texts = setting.first(load_heldout(), prompts)
    target, drafter, _ = load_pair(model)
    with progress(2 * len(texts)) as advance:
        measures = bench.measure(target, drafter, texts, bench.Options(new_tokens, advance))
    case = {
        "prompts": len(texts),
        "prompt_tokens": len(texts[0].prompt_ids),
        "new_tokens": new_tokens,
        "depth": drafter.depth,
        **setting.model_case(target, model),
    }
    entry = setting.make_record(bench.BENCHMARK, case, measures, commit)
    text = pages.acceptance_page(entry, "img/acceptance.svg")
    _keep(entry, text, out, page, as_json)
    if page is not None:
        pages.draw_acceptance(entry, page.parent / "img" / "acceptance.svg")


@app.command()
def speed(
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 8,
    new_tokens: NewTokens = 128,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each mode, after one to warm up.")] = 5,
    verify: Annotated[str, typer.Option(help="off | validate | on: which kernel serves.")] = "on",
    auto: Annotated[bool, typer.Option("--auto", help="Trees of a budget by cost as well.")] = False,
    out: Out = None,
    page: Page = None,
    model: ModelFolder = None,
    commit: Commit = None,
    as_json: AsJson = False,
) -> None:
    """Tokens/s of plain, chain and tree decoding of held-out prompts, and where a step's time goes."""
    import os
    from dataclasses import replace

    import torch

    from treeverify.bench import pages, setting
    from treeverify.bench import speed as bench
    from treeverify.cli.budget import measured_policy
    from treeverify.cli.progress import progress
    from treeverify.engine.engine import Engine, EngineConfig
    from treeverify.env import cpu_threads, parse_verify_mode
    from treeverify.models.heldout import load_heldout
    from treeverify.models.pair import load_pair

    torch.set_num_threads(cpu_threads())
    texts = setting.first(load_heldout(), prompts)
    target, drafter, _ = load_pair(model)
    policy = measured_policy(target, drafter, model, parse_verify_mode(verify, "verify"), progress) if auto else None
    engine = Engine(target, drafter, config=EngineConfig(verify=verify), policy=policy)
    before = os.getloadavg()[0]
    size = bench.Options(new_tokens, runs, bench.WITH_AUTO if auto else bench.MODES)
    with progress(size.decodes(len(texts))) as advance:
        measures = bench.measure(engine, texts, replace(size, advance=advance))
    load = [round(value, 2) for value in (before, os.getloadavg()[0])]
    case = {
        "prompts": len(texts),
        "prompt_tokens": len(texts[0].prompt_ids),
        "new_tokens": new_tokens,
        "runs": runs,
        "verify": str(engine.verify_mode),
        **setting.model_case(target, model),
    }
    entry = setting.make_record(bench.BENCHMARK, case, {**measures, "load_average": load}, commit)
    _keep(entry, pages.speed_page(entry), out, page, as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def attention(context: typer.Context) -> None:
    """Tree-verify attention on a GPU against its rivals and the machine's ceilings (its own --help)."""
    import torch

    from treeverify.bench.attention import main
    from treeverify.errors import ConfigError

    if "--help" not in context.args and not torch.cuda.is_available():
        raise ConfigError("bench attention: no CUDA device")
    main(context.args)


@app.command(
    "tree-ops", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def tree_ops(context: typer.Context) -> None:
    """The tree operators on a GPU, each alone and in the chains of a step (its own --help)."""
    from treeverify.bench.tree_ops import main

    main(context.args)


@app.command()
def pages(
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs/evidence"),
) -> None:
    """Make the acceptance and speed pages and the picture of a step anew from the records; measures nothing."""
    from treeverify.bench.pages import write_pages

    for path in write_pages(results, docs):
        print(path)


def _keep(entry: Record, text: str, out: Path | None, page: Path | None, as_json: bool) -> None:
    """Append the record, write the page, print one of the two."""
    from rich.console import Console
    from rich.markdown import Markdown

    from treeverify.bench import record
    from treeverify.errors import ConfigError

    try:
        if out is not None:
            record.append(out, entry)
        if page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from None
    if as_json:
        print(json.dumps(entry))
    else:
        Console().print(Markdown(text))
