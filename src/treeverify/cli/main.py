"""The ``treeverify`` command: parses, calls, and turns every typed error into one line and its exit code, 2 mostly."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from treeverify.cli import bench, cutover, extras, live, parity, serve
from treeverify.errors import TreeverifyError

app = typer.Typer(
    help="Tree-verify attention for MLA models, and lossless DDTree speculative decoding around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(parity.app, name="parity")
app.add_typer(cutover.app, name="cutover")
app.command(name="serve")(serve.serve)
for command in (live.mode, live.probe, live.replay):
    app.command()(command)

Model = Annotated[Path | None, typer.Option(help="Folder with target/, drafter/, tokenizer.json; default: packaged.")]
Budget = Annotated[
    str | None,
    typer.Option(help="Draft nodes beside the root (tree: 16, chain: the drafter's depth), or auto: by cost."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file ('-': standard input).")] = None,
    draft: Annotated[str, typer.Option(help="none | chain | tree")] = "tree",
    budget: Budget = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at the most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, in (0, 1].")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Best k tokens only.")] = None,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's probability, in [0, 1].")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same text.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt; text streams as steps commit it. KDTREE_VERIFY = off | validate | on picks the kernel."""
    from treeverify.cli.budget import parse_budget
    from treeverify.cli.generate import Ask, run
    from treeverify.engine.request import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_new_tokens=max_new_tokens
    )
    run(Ask(prompt, file, draft, parse_budget(budget), params, model, as_json))


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to run.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens for each.")] = 128,
    budget: Annotated[str, typer.Option(help="Draft nodes of the tree, the root left out: 1..256, or auto.")] = "16",
    html: Annotated[Path | None, typer.Option(help="Write the report as a self-contained page.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Plain, chain and tree decoding of held-out prompts side by side, a validate run, and one step drawn."""
    from treeverify.cli.budget import parse_budget
    from treeverify.cli.demo import run_demo, show

    show(run_demo(prompts, new_tokens, parse_budget(budget), model), html, as_json)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the descriptor is closed
            stream.reconfigure(errors="backslashreplace")  # a character that the encoding lacks is escaped
    try:
        app()
    except TreeverifyError as error:
        line = " ".join(str(error).split())
        print(f"treeverify: {line}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except ModuleNotFoundError as error:
        advice = extras.advice(sys.argv[1], error)
        if advice is None:
            raise
        print(f"treeverify: {advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
