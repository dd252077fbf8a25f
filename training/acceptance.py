"""How many tokens a step accepts: chain and DDTree of several budgets, free-running and teacher-forced.

A quick table for choosing a recipe and for the training record; the package's own benchmark is the published one.
Each figure is tokens per step of a walk (the root is counted).
"""

import heapq
import multiprocessing

import numpy as np
import torch
from torch import Tensor

from training.drafter import Drafter
from training.shapes import BLOCK
from training.target import Target

BUDGETS = (4, 8, 16, 32, 64)
COLUMNS = ("chain", *map(str, BUDGETS))
DEPTH = BLOCK - 1


def best_first(scores: list[list[float]], tokens: list[list[int]], budget: int) -> list[tuple[int, int]]:
    """Nodes (parent, token) in pop order; -1 is the root. A smaller budget's tree is a prefix of this list."""
    heap = [(-scores[0][0], (0,), -1, 0.0)]
    nodes: list[tuple[int, int]] = []
    while heap and len(nodes) < budget:
        cost, ranks, parent, base = heapq.heappop(heap)
        depth, rank, me = len(ranks), ranks[-1], len(nodes)
        nodes.append((parent, tokens[depth - 1][rank]))
        if rank + 1 < len(scores[depth - 1]):
            heapq.heappush(heap, (base - scores[depth - 1][rank + 1], (*ranks[:-1], rank + 1), parent, base))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0), me, cost))
    return nodes


def accepted(job: tuple) -> list[list[int]]:
    """For each label sequence of one start: accepted tokens of the chain and of each budget, root counted."""
    scores, tokens, label_sets = job
    children = {node: i for i, node in enumerate(best_first(scores, tokens, BUDGETS[-1]))}
    rows = []
    for labels in label_sets:
        chain = 0
        while chain < DEPTH and tokens[chain][0] == labels[chain]:
            chain += 1
        path, current = [], -1
        for token in labels:
            current = children.get((current, token))
            if current is None:
                break
            path.append(current)
        rows.append([1 + chain] + [1 + sum(i < budget for i in path) for budget in BUDGETS])
    return rows


@torch.no_grad()
def candidates(target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor) -> tuple[np.ndarray, ...]:
    """Top 64 log-probabilities and tokens at every depth after every anchor; and the target's argmax per place."""
    scores, tokens, best = [], [], []
    for rows in ids.split(16):
        logits, features = target(rows, drafter.s.features)
        best.append(logits.argmax(-1).cpu())
        top = drafter(target, features, rows, anchors).float().log_softmax(-1).topk(BUDGETS[-1], -1)
        scores.append(top.values.cpu())
        tokens.append(top.indices.cpu())
    return torch.cat(scores).numpy(), torch.cat(tokens).numpy(), torch.cat(best).numpy()


def walk(lengths: np.ndarray) -> float:
    """Tokens per step over rows [row, start]: begin at the first start, jump by what was accepted."""
    steps = total = 0
    for row in lengths:
        place = 0
        while place < len(row):
            total += int(row[place])
            steps += 1
            place += int(row[place])
    return round(total / steps, 3)


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
                    labels = [rows[r, p + 1 : p + BLOCK].tolist()]
                    if name == "forced":
                        labels.append(best[r, p : p + DEPTH].tolist())
                    jobs.append((scores[r, a].tolist(), tokens[r, a].tolist(), labels))
            found = np.array(pool.map(accepted, jobs, chunksize=64)).reshape(len(rows), len(anchors), -1, len(COLUMNS))
            kinds = ["free_running"] if name == "free" else ["forced_text", "forced_argmax"]
            for k, kind in enumerate(kinds):
                table[kind] = {column: walk(found[:, :, k, c]) for c, column in enumerate(COLUMNS)}
    table["repeated_8grams"] = {
        "free_running": repeated(free[:, prompt:]),
        "true_text": repeated(texts[:, prompt:width]),
    }
    return table


def repeated(ids: Tensor, n: int = 8) -> float:
    """Share of n-grams that occurred before in the same row."""
    total = again = 0
    for row in ids.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        total += len(grams)
        again += len(grams) - len(set(grams))
    return round(again / max(1, total), 3)
