"""``treeverify demo``: plain, chain and tree decoding of held-out prompts, then the same trees under validate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from treeverify.cli.budget import measured_policy
from treeverify.cli.draw import terminal_tree
from treeverify.cli.progress import progress as measuring
from treeverify.cli.report import DemoReport, DrawnStep, ModeRun, PromptView, ValidateView
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import AUTO, Budget, SamplingParams, check_int
from treeverify.env import VerifyMode, cpu_threads
from treeverify.errors import ConfigError
from treeverify.models.heldout import Heldout, load_heldout
from treeverify.models.pair import load_pair
from treeverify.models.tokenizer import Tokenizer
from treeverify.tree.accept import Acceptance
from treeverify.tree.drawing import svg_tree
from treeverify.tree.topology import Tree

MODES = ("none", "chain", "tree")
LARGEST_DRAWING = 9  # rows of text that a drawn prompt shows before its continuation


@dataclass
class Tally:
    """What one mode has done so far."""

    tokens: list[list[int]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, draft: str, budget: int | str, plain: Tally | None) -> ModeRun:
        """The finished figures."""
        flat = [n for row in self.lengths for n in row]
        return ModeRun(
            draft=draft,
            budget=budget,
            tokens=sum(flat),
            steps=len(flat),
            seconds=self.seconds,
            acceptance_length=sum(flat) / len(flat),
            histogram=[flat.count(n) for n in range(1, max(flat) + 1)],
            same_tokens=None if plain is None else self.tokens == plain.tokens,
        )


class Demo:
    """An engine, its prompts and what was seen of its steps."""

    def __init__(self, texts: list[Heldout], new_tokens: int, budget: Budget, model: Path | None) -> None:
        """Load the model, measure costs for ``auto``; steps of tree runs are kept, so that one can be drawn."""
        self.target, self.drafter, tokenizer = load_pair(model)
        if tokenizer is None:
            raise ConfigError("model: the folder has no tokenizer.json, which the demo needs")
        self.tokenizer: Tokenizer = tokenizer
        self.texts, self.budget = texts, budget
        self.params = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())
        mode, policy = VerifyMode.ON, None
        if budget == AUTO:
            policy = measured_policy(self.target, self.drafter, model, mode, measuring)
        self.engine = Engine(self.target, self.drafter, config=EngineConfig(verify=mode), policy=policy)
        self.engine.metrics.observer = self._keep
        self.steps: list[tuple[Tree, Acceptance]] = []

    def _keep(self, request_id: int, tree: Tree, accepted: Acceptance) -> None:
        self.steps.append((tree, accepted))

    def decode(self, text: Heldout, draft: str, tally: Tally) -> None:
        """Continue one prompt in one mode; seconds are the steps', prefill left out."""
        budget = self.budget if draft == "tree" else None
        before, began = self.engine.metrics.seconds["prefill"], perf_counter()
        result = self.engine.generate(text.prompt_ids, self.params, draft=draft, budget=budget)
        tally.seconds += perf_counter() - began - (self.engine.metrics.seconds["prefill"] - before)
        tally.tokens.append(result.tokens)
        tally.lengths.append(result.acceptance_lengths)

    def drawn(self) -> DrawnStep:
        """The step to draw: a long accepted path that leaves the tree's first branch, so that the tree matters."""

        def worth(step: tuple[Tree, Acceptance]) -> tuple[bool, int]:
            path = step[1].path.tolist()
            return path != list(range(len(path))), len(path)

        tree, accepted = max(self.steps, key=worth)
        token = self.tokenizer.token
        return DrawnStep(
            tokens=[token(int(t)) for t in tree.tokens],
            parents=tree.parents.tolist(),
            path=accepted.path.tolist(),
            bonus=token(accepted.bonus),
        )

    def view(self, tally: Tally) -> PromptView:
        """The first prompt's end and its continuation, cut as its steps committed it (the first token is prefill's)."""
        text, tokens, cuts = self.texts[0], tally.tokens[0], [1, *tally.lengths[0]]
        pieces, begin = [], 0
        for cut in cuts:
            pieces.append([self.tokenizer.token(t) for t in tokens[begin : begin + cut]])
            begin += cut
        prompt = "\n".join(self.tokenizer.decode(text.prompt_ids).splitlines()[-LARGEST_DRAWING:])
        return PromptView(name=text.file, prompt=prompt, pieces=pieces)

    def validate(self, tree: Tally, advance: Iterator[None]) -> ValidateView:
        """The tree runs once more with both kernels on the live tensors."""
        self.engine.set_verify_mode(VerifyMode.VALIDATE)
        self.engine.reset_record()
        tally = Tally()
        for text in self.texts:
            self.decode(text, "tree", tally)
            next(advance)
        record, total = self.engine.verify_record, self.engine.verify_record.total
        return ValidateView(
            calls=record.calls,
            rows=record.rows,
            max_abs=total.max_abs,
            max_relative=total.max_relative,
            max_ulp=total.max_row_ulp,
            worst=str(record.worst or "none"),
            same_tokens=tally.tokens == tree.tokens,
        )


@contextmanager
def progress(total: int) -> Iterator[Iterator[None]]:
    """A progress bar on standard error; advance it with ``next``."""
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("decoding held-out prompts", total=total)

        def ticks() -> Iterator[None]:
            while True:
                bar.advance(task)
                yield

        yield ticks()


def run_demo(prompts: int, new_tokens: int, budget: Budget, model: Path | None) -> DemoReport:
    """Decode ``prompts`` held-out prompts in every mode, interleaved, and validate the tree runs."""
    if budget != AUTO:
        check_int("budget", budget, 1, 257)
    texts = load_heldout()
    if prompts > len(texts):
        raise ConfigError(f"prompts: expected 1..{len(texts)} (the held-out prompts there are), got {prompts}")
    torch.set_num_threads(cpu_threads())
    demo = Demo(texts[:prompts], new_tokens, budget, model)
    tallies = {mode: Tally() for mode in MODES}
    for mode in MODES:  # warm up, unmeasured
        demo.decode(demo.texts[0], mode, Tally())
    demo.steps.clear()
    with progress(prompts * (len(MODES) + 1)) as advance:
        for text in demo.texts:
            for mode in MODES:
                demo.decode(text, mode, tallies[mode])
                next(advance)
        validate_run = demo.validate(tallies["tree"], advance)
    budgets: dict[str, int | str] = {"none": 0, "chain": demo.drafter.depth, "tree": budget or 0}
    plain = tallies["none"]
    return DemoReport(
        model="the packaged DeepSeek-V3-layout model and its DFlash drafter" if model is None else str(model),
        device=f"CPU, threads: {torch.get_num_threads()}",
        dtype="fp32",
        prompts=prompts,
        new_tokens=new_tokens,
        runs=[tallies[mode].run(mode, budgets[mode], None if mode == "none" else plain) for mode in MODES],
        step=demo.drawn(),
        view=demo.view(tallies["tree"]),
        validate_run=validate_run,
    )


def page(report: DemoReport) -> str:
    """The report as a self-contained HTML page."""
    environment = Environment(loader=PackageLoader("treeverify.cli"), autoescape=True)
    fastest = max(run.tokens_per_second for run in report.runs)
    template = environment.get_template("demo.html.j2")
    return template.render(report=report, fastest=fastest, tree_svg=Markup(svg_tree(report.step)))


def show(report: DemoReport, html: Path | None, as_json: bool) -> None:
    """Print the report, and write the page if a file was named."""
    if html is not None:
        try:
            html.write_text(page(report), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"--html: {html}: {error}") from None
    if as_json:
        print(json.dumps(report.model_dump()))
        return
    console = Console()
    console.print(f"{report.model}; {report.device}, {report.dtype}; {report.prompts} held-out prompts")
    console.print(_table(report))
    console.print("One verify step; green: accepted, dim: verified in the same pass and not taken:", style="bold")
    console.print(terminal_tree(report.step))
    check = report.validate_run
    console.print("KDTREE_VERIFY=validate: both kernels on the live tensors, the baseline served", style="bold")
    console.print(
        f"{check.calls} calls, {check.rows} (node, head) rows: max abs {check.max_abs:.2e}, "
        f"max relative {check.max_relative:.2e}, max {check.max_ulp:.1f} fp32 ULP of a row's largest value; "
        f"tokens unchanged: {'yes' if check.same_tokens else 'NO'}"
    )
    console.print(f"worst: {check.worst}", style="dim")
    if html is not None:
        console.print(f"page written to {html}")


def _table(report: DemoReport) -> Table:
    table = Table(title=f"{report.new_tokens} new tokens per prompt, temperature 0")
    table.add_column("draft")
    for heading in ("verify steps", "acceptance length", "tokens/s", "over plain", "same tokens as plain decoding"):
        table.add_column(heading, justify="right")
    plain = report.runs[0].tokens_per_second
    for run in report.runs:
        same = "-" if run.same_tokens is None else "[green]yes[/]" if run.same_tokens else "[bold red]NO[/]"
        name = run.draft if run.draft == "none" else f"{run.draft} of {run.budget}"
        speed = run.tokens_per_second
        table.add_row(
            name, str(run.steps), f"{run.acceptance_length:.2f}", f"{speed:.0f}", f"{speed / plain:.2f}x", same
        )
    return table
