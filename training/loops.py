"""The two training loops: the target on text, the drafter on the target."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.drafter import Drafter
from training.optim import Clock, Optimiser
from training.shapes import BLOCK
from training.target import Target


@dataclass(frozen=True)
class TargetRecipe:
    """How the target is trained."""

    seconds: float = 115.0
    steps: int = 10**9
    rows: int = 32
    length: int = 1024
    rate: float = 6e-3
    plain_rate: float = 3e-3
    decay: float = 0.3
    drop: float = 0.1
    library_first: float = 0.25  # share of rows from library files at the start, the rest from the test suite
    library_last: float = 0.6
    check_windows: int = 128  # validation windows looked at during training
    seed: int = 0


@dataclass(frozen=True)
class DrafterRecipe:
    """How the drafter is trained."""

    seconds: float = 140.0
    steps: int = 10**9
    rows: int = 64
    length: int = 512
    anchors: int = 48
    rate: float = 6e-3
    plain_rate: float = 2e-3
    decay: float = 0.1
    generated: float = 0.5  # share of batches from target-generated text
    text_share: float = 0.35  # weight of the text's own next tokens against the target's argmax
    depth_scale: float = 5.0  # weight exp(-depth / scale)
    reach: float = 0.5  # power of the probability that a draft got as far as this depth; 0 switches it off
    library: float = 0.5
    seed: int = 1


def windows(source: Tensor, rows: int, length: int) -> Tensor:
    """Random windows [rows, length] of a token array."""
    start = torch.randint(0, source.numel() - length, (rows, 1), device=source.device)
    return source[start + torch.arange(length, device=source.device)].long()


def mixed(corpus: dict[str, Tensor], rows: int, length: int, share: float) -> Tensor:
    """Windows of library and test files, `share` of them from the library."""
    count = round(rows * share)
    return torch.cat([windows(corpus["library"], count, length), windows(corpus["tests"], rows - count, length)])


@torch.no_grad()
def evaluate(target: Target, source: Tensor, length: int, most: int = 512) -> dict[str, float]:
    """Loss, perplexity and top-1 on consecutive windows."""
    was, _ = target.training, target.eval()
    count = min(most, (source.numel() - 1) // length)
    x = source[: count * length].view(count, length).long()
    y = source[1 : count * length + 1].view(count, length).long()
    loss = hits = 0.0
    for ids, labels in zip(x.split(16), y.split(16), strict=True):
        logits = target(ids)[0].float()
        loss += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        hits += (logits.argmax(-1) == labels).sum().item()
    target.train(was)
    loss /= x.numel()
    return {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 3), "top1": round(hits / x.numel(), 4)}


def train_target(target: Target, corpus: dict[str, Tensor], recipe: TargetRecipe, dtype: torch.dtype, log) -> dict:
    """Train in place; returns the record of the run."""
    torch.manual_seed(recipe.seed)
    optimiser = Optimiser(target, recipe.rate, recipe.decay, recipe.plain_rate)
    target.lower(dtype).train()
    clock, history, mark, loss = Clock(recipe.seconds, recipe.steps), [], 0.2, torch.zeros(())
    while (progress := clock.progress) < 1:
        share = recipe.library_first + (recipe.library_last - recipe.library_first) * progress
        ids = mixed(corpus, recipe.rows, recipe.length + 1, share)
        logits = target(ids[:, :-1])[0]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step(clock.factor)
        target.balance()
        clock.done += 1
        if clock.done % 8 == 0:
            loss.item()  # wait for the device, or elapsed time means nothing
        if progress > mark:
            mark += 0.2
            now = evaluate(target, corpus["valid"], recipe.length // 2, recipe.check_windows)
            history.append({"step": clock.done, "train": round(loss.item(), 4), **now})
            log("target", history[-1])
    tokens = clock.done * recipe.rows * recipe.length
    target.eval()
    return {"steps": clock.done, "seconds": round(clock.elapsed, 1), "tokens": tokens, "history": history}


@torch.no_grad()
def own_text(target: Target, corpus: dict[str, Tensor], rounds: int, rows: int, new: int) -> Tensor:
    """Text of the target's own after true prompts of 128 tokens: a third greedy, a third at 0.7, a third at 1."""
    temperature = torch.linspace(0, 2.999, rows, device=corpus["library"].device).floor()
    temperature = torch.where(temperature > 0, 0.4 + 0.3 * temperature, temperature)
    return torch.cat([target.generate(mixed(corpus, rows, 128, 0.5), new, temperature) for _ in range(rounds)])


def draft_loss(log_probs: Tensor, argmax: Tensor, text: Tensor, recipe: DrafterRecipe) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy to both label sets, and the mean per depth to the argmax labels.

    A place counts by depth and by the probability that the draft's earlier places were right: a tree never asks for
    the place after a token that it did not hold, so depth d learns the law that follows likely drafts.
    """
    depth = torch.exp(-torch.arange(BLOCK - 1, device=text.device) / recipe.depth_scale)
    total, plain = 0.0, None
    for labels, share in ((argmax, 1 - recipe.text_share), (text, recipe.text_share)):
        picked = log_probs.gather(-1, labels[..., None])[..., 0]
        before = F.pad(picked.detach().cumsum(-1)[..., :-1], (1, 0))
        weight = depth * (0.2 + 0.8 * (recipe.reach * before).exp())
        total = total - share * (weight * picked).sum(-1).mean()
        plain = -picked.detach().mean((0, 1)) if plain is None else plain
    return total, plain


def train_drafter(
    drafter: Drafter, target: Target, corpus: dict[str, Tensor], generated: Tensor, recipe: DrafterRecipe, log
) -> dict:
    """Train in place against a frozen target; returns the record of the run."""
    torch.manual_seed(recipe.seed)
    device = generated.device
    optimiser = Optimiser(drafter, recipe.rate, recipe.decay, recipe.plain_rate)
    drafter.to(target.head.dtype).train()
    clock, latest, mark = Clock(recipe.seconds, recipe.steps), {}, 0.25
    ahead = torch.arange(BLOCK - 1, device=device)
    while (progress := clock.progress) < 1:
        kind = "generated" if torch.rand(()).item() < recipe.generated else "data"
        if kind == "generated":
            ids, low = generated[torch.randint(0, len(generated), (recipe.rows,), device=device)].long(), 120
        else:
            ids, low = mixed(corpus, recipe.rows, recipe.length, recipe.library), 4
        with torch.no_grad():
            logits, features = target(ids, drafter.s.features)
            best = logits.argmax(-1)
        free = ids.shape[1] - BLOCK - low
        anchors = (torch.randperm(free, device=device)[: recipe.anchors] + low).sort().values
        places = anchors[:, None] + ahead
        log_probs = drafter(target, features, ids, anchors).float().log_softmax(-1)
        loss, plain = draft_loss(log_probs, best[:, places], ids[:, places + 1], recipe)
        loss.backward()
        optimiser.step(clock.factor)
        clock.done += 1
        if clock.done % 8 == 0:
            loss.item()
        latest[kind] = plain
        if progress > mark:
            mark += 0.25
            log("drafter", clock.done, {k: [round(z, 3) for z in v.tolist()] for k, v in latest.items()})
    drafter.eval()
    losses = {k: [round(z, 4) for z in v.tolist()] for k, v in latest.items()}
    return {"steps": clock.done, "seconds": round(clock.elapsed, 1), "loss_by_depth": losses}
