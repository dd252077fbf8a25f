"""``treeverify generate``: one prompt, streamed to the terminal or reported as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from treeverify.cli.budget import measured_policy
from treeverify.cli.progress import progress
from treeverify.engine.engine import Engine
from treeverify.engine.request import AUTO, Budget, DraftMode, Result, SamplingParams
from treeverify.env import VerifyMode, cpu_threads, verify_mode
from treeverify.errors import ConfigError
from treeverify.models.pair import load_pair
from treeverify.models.tokenizer import StreamDecoder, Tokenizer
from treeverify.text import read_text, whole

_STDIN = 0


@dataclass(frozen=True)
class Ask:
    """What the command line asked for."""

    prompt: str | None
    file: Path | None
    draft: str
    budget: Budget
    params: SamplingParams
    model: Path | None
    as_json: bool


def prompt_text(ask: Ask) -> str:
    """The prompt, from the argument or the file; ConfigError unless exactly one is given and it can be read."""
    if (ask.prompt is None) == (ask.file is None):
        raise ConfigError("prompt: give either PROMPT or --file")
    if ask.prompt is not None:
        return whole("PROMPT", ask.prompt)
    assert ask.file is not None
    return read_text(f"--file: {ask.file}", _STDIN if str(ask.file) == "-" else ask.file)


def summary(engine: Engine, result: Result, text: str, seconds: float) -> dict[str, Any]:
    """The JSON object: text, tokens, why it ended, and what the steps did."""
    found: dict[str, Any] = {
        "text": text,
        "tokens": result.tokens,
        "finish": str(result.finish),
        "seed": result.seed,
        "steps": len(result.acceptance_lengths),
        "acceptance_lengths": result.acceptance_lengths,
        "seconds": round(seconds, 4),
        "verify_mode": str(engine.verify_mode),
        "widths": {str(width): count for width, count in sorted(engine.metrics.widths.items())},
    }
    if engine.verify_mode is VerifyMode.VALIDATE:
        record, total = engine.verify_record, engine.verify_record.total
        found["validate"] = {
            "calls": record.calls,
            "rows": record.rows,
            "max_abs": total.max_abs,
            "max_relative": total.max_relative,
            "max_row_ulp": total.max_row_ulp,
            "mismatched": total.mismatched,
            "failures": record.failures,
            "worst": str(record.worst or "none"),
        }
    return found


def run(ask: Ask) -> None:
    """Load the model, stream the continuation, print the summary."""
    text = prompt_text(ask)
    torch.set_num_threads(cpu_threads())
    target, drafter, tokenizer = load_pair(ask.model)
    if tokenizer is None:
        raise ConfigError("model: the folder has no tokenizer.json, which text needs")
    auto = ask.budget == AUTO and ask.draft == DraftMode.TREE  # others refuse it
    policy = measured_policy(target, drafter, ask.model, verify_mode(), progress) if auto else None
    engine = Engine(target, drafter, tokenizer, policy=policy)
    began = perf_counter()
    request = engine.submit(tokenizer.encode(text), ask.params, draft=ask.draft, budget=ask.budget)
    pieces = _stream(engine, request, tokenizer, quiet=ask.as_json)
    result, seconds = engine.result(request), perf_counter() - began
    if ask.as_json:
        print(json.dumps(summary(engine, result, "".join(pieces), seconds)))
        return
    steps = len(result.acceptance_lengths)
    rate = f"{result.acceptance:.2f} tokens per step" if steps else "no verify step"
    line = f"[{len(result.tokens)} tokens, {steps} steps, {rate}, {seconds:.2f} s, ended by {result.finish}]"
    print(f"\n{line}", file=sys.stderr)
    if engine.verify_mode is VerifyMode.VALIDATE:
        print(f"[validate: {engine.verify_record.total}]", file=sys.stderr)


def _stream(engine: Engine, request: int, tokenizer: Tokenizer, *, quiet: bool) -> list[str]:
    """Step until the request ends; returns the text pieces, printing each as it comes unless ``quiet``."""
    decoder, pieces = StreamDecoder(tokenizer), []
    while not engine.ended(request):
        for output in engine.step():
            pieces.append(decoder.feed(output.tokens))
            if not quiet:
                print(pieces[-1], end="", flush=True)
    pieces.append(decoder.flush())
    if not quiet:
        print(pieces[-1], end="", flush=True)
    return pieces
