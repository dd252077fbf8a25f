"""Acceptance length at T = 0 on held-out text: how many tokens a verify step commits, the root counted.

A *start* is a place ``p`` of a text: tokens ``0 .. p - 1`` are committed, token ``p`` is the root, and a draft of
tokens ``p + 1, p + 2, ...`` is judged against labels, one per depth. Three sets of labels:

- ``free_running``: the text is the target's own plain greedy continuation of the prompt, the labels are its tokens.
  This is what an engine does at T = 0; the engine's steps are these steps, one by one.
- ``forced_argmax``: the text is the held-out file's; the label after token ``q`` is the target's argmax after the true
  tokens ``0 .. q``.
- ``forced_text``: the text is the held-out file's and so are the labels: the next true token.

Six columns: ``chain``, the drafter's best token at each of its depths (7); ``lookup``, a prompt-lookup chain of as many
tokens (n-gram lookup in the prompt and what follows it up to the root, no model); ``4`` .. ``64``, DDTree under that
budget of nodes beside the root.

*Walk*: begin at the first place after the prompt, go on by as many places as the step accepted, end when ``new_tokens``
places are behind; tokens of all walks / steps of all walks. The last step counts in full even where it reaches past the
end. This is the figure to compare with an engine's, and the one reported. *Mean over starts*: the mean over every
place, visited or not; it is recorded beside the walk, and differs because a walk hurries over what is easy to guess.

One target forward per text gives the logits and features of all places, the drafter then drafts for all starts. All of
it in the model's dtype on its device, through the package's own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treeverify.bench import record
from treeverify.bench.walk import BUDGETS, Ints, draft_lengths, lookup_lengths, repeated, standard_error, walk
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.engine.verify import VerifyBatch, baseline
from treeverify.errors import ConfigError
from treeverify.models.drafter import Drafter
from treeverify.models.heldout import Heldout
from treeverify.models.target import Target
from treeverify.tree.build import top_candidates

COLUMNS = ("chain", "lookup", *map(str, BUDGETS))
KINDS = ("free_running", "forced_argmax", "forced_text")
BENCHMARK = "acceptance"
_DRAFTS = 32  # starts drafted in one call
_BATCH = 16

Lengths = dict[str, Ints]
"""By kind: acceptance lengths int64 [texts, starts, columns]."""


@dataclass(frozen=True)
class Options:
    """How far to walk, and whom to tell about each text done."""

    new_tokens: int = 128
    advance: Callable[[str], None] = lambda _: None


@torch.inference_mode()
def measure(target: Target, drafter: Drafter, texts: Sequence[Heldout], options: Options) -> record.Record:
    """Measure all kinds and columns over ``texts``; returns the record's ``measures``.

    Raises ConfigError for texts too short: ``new_tokens + depth`` true tokens after each prompt are needed.
    """
    if not texts:
        raise ConfigError("acceptance: expected at least one text")
    extra = options.new_tokens + drafter.depth
    for text in texts:
        if len(text.continuation_ids) < extra:
            raise ConfigError(
                f"{text.file}: expected {extra} tokens after the prompt, got {len(text.continuation_ids)}"
            )
    true = [text.prompt_ids + text.continuation_ids[:extra] for text in texts]
    free = list(continuations(target, texts, extra, options))
    prompts = [len(text.prompt_ids) for text in texts]
    lengths = all_lengths(target, drafter, list(zip(free, true, prompts, strict=True)), options)
    last = [prompt + options.new_tokens for prompt in prompts]
    windows = {
        "free_running": [row[begin:end] for row, begin, end in zip(free, prompts, last, strict=True)],
        "true_text": [row[begin:end] for row, begin, end in zip(true, prompts, last, strict=True)],
    }
    return {
        "walk": _table(lengths, walk),
        "walk_standard_error": _table(lengths, standard_error),
        "mean_over_starts": _table(lengths, lambda rows: float(rows.mean())),
        "repeated_8grams": {name: round(repeated(rows), 4) for name, rows in windows.items()},
    }


def continuations(target: Target, texts: Sequence[Heldout], new: int, options: Options) -> Iterator[list[int]]:
    """Prompt and ``new`` tokens of plain greedy decoding of each text, stop tokens ignored."""
    slots = max(len(text.prompt_ids) for text in texts) + new
    engine = Engine(target, config=EngineConfig(slots=_BATCH * slots, max_batch=_BATCH, verify="off"))
    params = SamplingParams(max_new_tokens=new, stop_token_ids=())
    for begin in range(0, len(texts), _BATCH):
        batch = texts[begin : begin + _BATCH]
        requests = [engine.submit(text.prompt_ids, params, draft="none") for text in batch]
        for request, text in zip(requests, batch, strict=True):
            yield text.prompt_ids + engine.finish(request).tokens
            options.advance(f"continued {text.file}")


def all_lengths(
    target: Target, drafter: Drafter, rows: Sequence[tuple[list[int], list[int], int]], options: Options
) -> Lengths:
    """Acceptance lengths of every start of every (free text, true text, prompt length)."""
    found: dict[str, list[list[list[int]]]] = {kind: [] for kind in KINDS}
    for free, true, prompt in rows:
        starts = range(prompt, prompt + options.new_tokens - 1)
        (own,) = zip(*_lengths_of(target, drafter, free, starts, forced=False), strict=True)
        text, argmax = zip(*_lengths_of(target, drafter, true, starts, forced=True), strict=True)
        for kind, lengths in zip(KINDS, (own, argmax, text), strict=True):
            found[kind].append(list(lengths))
        options.advance("walked a text")
    return {kind: np.array(lengths, dtype=np.int64) for kind, lengths in found.items()}


def _lengths_of(
    target: Target, drafter: Drafter, ids: list[int], starts: range, *, forced: bool
) -> Iterator[list[list[int]]]:
    """For each start: columns of lengths for the text's own labels, and if ``forced`` for the argmax's."""
    logits, pool = _read(target, drafter, ids)
    width = drafter.depth + 1
    row, best = np.array(ids, dtype=np.int64), logits.argmax(-1).cpu().numpy()
    tokens = torch.tensor(ids, device=target.device)
    for begin in range(starts.start, starts.stop, _DRAFTS):
        places = torch.arange(begin, min(begin + _DRAFTS, starts.stop), device=target.device)
        context = torch.arange(int(places[-1]), device=target.device).expand(len(places), -1)
        drafts = drafter.draft(pool, tokens[places], places, context, places).cpu().numpy()
        for place, draft in zip(places.tolist(), drafts, strict=True):
            labels = [row[place + 1 : place + 1 + width]]
            if forced:
                labels.append(best[place : place + width])
            drafted = draft_lengths(ids[place], top_candidates(draft, BUDGETS[-1]), labels)
            looked_up = lookup_lengths(ids[: place + 1], drafter.depth, labels)
            yield [[chain, other, *trees] for (chain, *trees), other in zip(drafted, looked_up, strict=True)]


def _read(target: Target, drafter: Drafter, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward over the text: logits [tokens, vocab], and the drafter's context rows [tokens, ...]."""
    device, count = target.device, len(ids)
    places = torch.arange(count, device=device)
    batch = VerifyBatch(count, torch.zeros(2, dtype=torch.int64, device=device), places[:0], None, (0,))
    logits, features = target.forward(
        torch.tensor(ids, device=device),
        places,
        list(target.new_pool(1)),
        lambda layer, q, draft_kv, kv_pool: baseline(q, draft_kv, kv_pool, batch, target.scale)[0],
        feature_layers=drafter.feature_layers,
    )
    pool = drafter.new_pool(count)
    drafter.write(pool, places, features, places)
    return logits, pool


def _table(lengths: Lengths, figure: Callable[[Ints], float]) -> dict[str, dict[str, float]]:
    return {
        kind: {column: round(figure(rows[:, :, index]), 4) for index, column in enumerate(COLUMNS)}
        for kind, rows in lengths.items()
    }
