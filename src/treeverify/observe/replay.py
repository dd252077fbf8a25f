"""Run a recorded call again: which of the two recorded results, and of the kernels here, is how far from float64?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import BuildError, ParityError
from treeverify.observe.bounds import RESULT_ULP
from treeverify.observe.calls import RecordedCall
from treeverify.ops.tree_attention.api import IMPLEMENTATIONS, tree_attention
from treeverify.ops.tree_attention.contract import RELATIVE_ERROR_FLAT, Options
from treeverify.ops.tree_attention.difference import compare
from treeverify.ops.tree_attention.reference import tree_attention_reference
from treeverify.tree.packing import pack_rows

BASELINE, OURS = "recorded baseline", "recorded ours"


@dataclass(frozen=True)
class Measured:
    """One result ``[nodes, heads, 512]`` against float64 on the same inputs."""

    name: str
    relative: float
    """norm(result - exact) / norm(exact) over the whole call."""
    max_row_ulp: float
    """Largest error in bfloat16 ULP of its row's largest exact value."""
    node: int
    """Node and head of the worst element: a mismatched one if there is one, else the one with ``max_row_ulp``;
    -1: all agree."""
    head: int
    mismatched: int
    """Elements of which one is NaN or infinite and the other is not the same; the figures above leave them out."""


@dataclass(frozen=True)
class Report:
    """What a replay found."""

    device: str
    results: tuple[Measured, ...]
    """The recorded ones first, then every implementation on this device."""
    skipped: dict[str, str]
    """Implementations that cannot run this call here, with what they say."""
    judged: str
    """Which result stands for ours: the recorded one, or the device's default implementation if there is none."""
    worse: bool
    """Whether ours is further from float64 than both the baseline and a correct result may be."""
    verdict: str


def replay(call: RecordedCall, device: torch.device) -> Report:
    """Run every implementation on ``device`` and measure all results against the float64 reference.

    Ours is worse if an element is NaN or infinite where float64 is not (or the other way round), or if its relative
    error exceeds both the baseline's and ``RELATIVE_ERROR_FLAT``, or its row error both the baseline's and
    ``RESULT_ULP``. Raises ``ContractError`` for a call that the operator refuses, ``ParityError`` if nothing stands for
    ours.
    """
    arguments, options = _arguments(call, device)
    exact, _ = tree_attention_reference(*arguments, **options)
    found = {BASELINE: call.baseline} | ({} if call.ours is None else {OURS: call.ours})
    skipped: dict[str, str] = {}
    for name in IMPLEMENTATIONS[device.type]:
        if name == "reference":
            continue
        try:
            found[name] = tree_attention(*arguments, implementation=name, **options)[0]
        except (ValueError, BuildError) as error:  # a prefix too long for it, a dtype, no compiler
            skipped[name] = str(error)
    single, _ = tree_attention_reference(*arguments, dtype=torch.float32, **options)
    found["float32 reference"] = single.to(call.q.dtype)
    judged = OURS if call.ours is not None else IMPLEMENTATIONS[device.type][0]
    if judged in skipped:
        raise ParityError(f"replay: the file has no result of ours, and {judged} cannot run it: {skipped[judged]}")
    results = tuple(_measure(name, exact, result.to(device)) for name, result in found.items())
    by_name = {result.name: result for result in results}
    worse = _worse(by_name[judged], by_name[BASELINE], RELATIVE_ERROR_FLAT[call.q.dtype])
    return Report(str(device), results, skipped, judged, worse, _verdict(by_name[judged], by_name[BASELINE], worse))


def _arguments(call: RecordedCall, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Options]:
    """The call as a batch of one: its prefix rows are the pool."""
    bits = torch.from_numpy(pack_rows(call.visible.numpy()).view("int64"))[None]
    indptr = torch.tensor([0, call.prefix], dtype=torch.int32)
    tensors = (call.q, call.k, call.kbuf, indptr, torch.arange(call.prefix))
    options: Options = {"nodes": call.nodes, "scale": call.scale, "tree_bits": bits.to(device)}
    return tuple(tensor.to(device) for tensor in tensors), options


def _measure(name: str, exact: torch.Tensor, result: torch.Tensor) -> Measured:
    difference = compare(exact, result, unit=torch.bfloat16)
    worst = difference.worst
    node, head = (-1, -1) if worst is None else (worst.token, worst.head)
    return Measured(name, difference.relative, difference.max_row_ulp, node, head, difference.mismatched)


def _worse(ours: Measured, baseline: Measured, relative: float) -> bool:
    return (
        ours.mismatched > 0
        or ours.relative > max(baseline.relative, relative)
        or ours.max_row_ulp > max(baseline.max_row_ulp, RESULT_ULP)
    )


def _verdict(ours: Measured, baseline: Measured, worse: bool) -> str:
    pair = sorted((ours, baseline), key=lambda result: (result.mismatched > 0, result.relative))
    near, far = pair
    tie = (near.relative, near.mismatched) == (far.relative, far.mismatched)
    further = "both are as far from float64" if tie else f"{far.name} is further from float64 than {near.name}"
    bound = "ours is beyond what a correct result may err" if worse else "ours is within its bound"
    return f"{further}; {bound}"
