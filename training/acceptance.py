"""How many tokens a step accepts: chain and DDTree of several budgets, free-running and teacher-forced.

A quick table for choosing a recipe and for the training record; the package's own benchmark is the published one.
Each figure is tokens per step of a walk (the root is counted). Trees and walks are the package's (its numpy part only).
"""

import multiprocessing

import numpy as np
import torch
from torch import Tensor

from training.drafter import Drafter
from training.shapes import BLOCK
from training.target import Target
from treeverify.bench.walk import BUDGETS, draft_lengths, repeated, walk
from treeverify.tree.build import Candidates

COLUMNS = ("chain", *map(str, BUDGETS))
DEPTH = BLOCK - 1


def accepted(job: tuple) -> list[list[int]]:
    """For each label sequence of one start: accepted tokens of the chain and of each budget, root counted."""
    root, scores, tokens, label_sets = job
    return draft_lengths(root, Candidates(scores, tokens), label_sets)


@torch.no_grad()
def candidates(target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor) -> tuple[np.ndarray, ...]:
    """Top 64 log-probabilities and tokens at every depth after every anchor; and the target's argmax per place."""
    scores, tokens, best = [], [], []
    for rows in ids.split(16):
        logits, features = target(rows, drafter.s.features)
        best.append(logits.argmax(-1).cpu())
        top = drafter(target, features, rows, anchors).float().log_softmax(-1).topk(BUDGETS[-1], -1)
        scores.append(top.values.clamp(max=0.0).cpu())
        tokens.append(top.indices.cpu())
    return torch.cat(scores).numpy(), torch.cat(tokens).numpy(), torch.cat(best).numpy()


def measure(target: Target, drafter: Drafter, texts: Tensor, prompt: int, new: int) -> dict[str, dict[str, float]]:
    """Acceptance on windows of true text [rows, >= prompt + new + 7] (walks of `new` tokens after `prompt`)."""
    anchors = torch.arange(prompt, prompt + new - 1, device=texts.device)
    width = prompt + new + DEPTH
    free = target.generate(texts[:, :prompt], width - prompt)
    table: dict[str, dict[str, float]] = {}
    workers = min(14, max(2, multiprocessing.cpu_count() - 2))
    with multiprocessing.get_context("fork").Pool(workers) as pool:  # the workers touch no device
        for name, ids in (("free", free), ("forced", texts[:, :width])):
            scores, tokens, best = candidates(target, drafter, ids, anchors)
            rows = ids.cpu().numpy()
            jobs = []
            for r in range(len(rows)):
                for a in range(len(anchors)):
                    p = prompt + a
                    labels = [rows[r, p + 1 : p + BLOCK + 1]]
                    if name == "forced":
                        labels.append(best[r, p : p + BLOCK])
                    jobs.append((int(rows[r, p]), scores[r, a], tokens[r, a], labels))
            found = np.array(pool.map(accepted, jobs, chunksize=64)).reshape(len(rows), len(anchors), -1, len(COLUMNS))
            kinds = ["free_running"] if name == "free" else ["forced_text", "forced_argmax"]
            for k, kind in enumerate(kinds):
                table[kind] = {column: round(walk(found[:, :, k, c]), 3) for c, column in enumerate(COLUMNS)}
    table["repeated_8grams"] = {
        "free_running": round(repeated(free[:, prompt:].tolist()), 3),
        "true_text": round(repeated(texts[:, prompt:width].tolist()), 3),
    }
    return table
