"""Gates on what the server says of itself: mode, restarts and errors, numerical parity, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treeverify.control.schema import BackendState, LayerCounts, PluginState, RankState, Shape
from treeverify.cutover.limits import Limits
from treeverify.cutover.samples import Sample
from treeverify.cutover.verdict import Figure, Kind, Verdict, few
from treeverify.env import VerifyMode
from treeverify.errors import ConfigError
from treeverify.ops.tree_attention.difference import ROW_EDGES

States = Sequence[PluginState]
EXPECTED: dict[Kind, VerifyMode] = {
    "validate": VerifyMode.VALIDATE,
    "soak": VerifyMode.VALIDATE,
    "on": VerifyMode.ON,
}


def mode(stage: Kind, before: States, after: States) -> Verdict:
    """Every rank is in the stage's mode, before and after, and (but in a soak) served verify passes in it meanwhile."""
    expected = EXPECTED[stage]
    wrong = [f"{name} is {rank.mode}" for name, rank in (*_ranks(before), *_ranks(after)) if rank.mode is not expected]
    earlier = {(name, rank.pid): _served(rank, expected) for name, rank in _ranks(before)}
    new = {name: _served(rank, expected) - earlier.get((name, rank.pid), 0) for name, rank in _ranks(after)}
    idle = [f"{name} served no verify pass" for name, count in new.items() if count <= 0] if stage != "soak" else []
    return Verdict(
        stage=stage,
        gate="mode",
        passed=bool(new) and not wrong and not idle,
        figures={"ranks": len(new), "fewest_passes": min(new.values(), default=0)},
        threshold=f"every rank in {expected.value}, and serving in it",
        reason="; ".join([*wrong, *idle]) or f"all {len(new)} ranks are in {expected.value}",
    )


def errors(stage: Kind, baseline: Sample | None, candidate: Sample | None, before: States, after: States) -> Verdict:
    """No request failed, no process was replaced, and nobody else switched the mode."""
    failed = [
        f"{name}: {len(sample.failures)} requests failed, first: {sample.failures[0]}"
        for name, sample in (("baseline", baseline), ("candidate", candidate))
        if sample is not None and sample.failures
    ]
    then, now = dict(_ranks(before)), dict(_ranks(after))
    restarted = [f"{name} was restarted" for name in then if name in now and then[name].pid != now[name].pid]
    lost = [f"{name} is {'gone' if name in then else 'new'}" for name in sorted(then.keys() ^ now.keys())]
    switched = [
        f"{name} was switched by somebody else"
        for name in then
        if name in now and then[name].pid == now[name].pid and then[name].switches != now[name].switches
    ]
    return Verdict(
        stage=stage,
        gate="errors",
        passed=not (failed or restarted or lost or switched),
        figures={"failures": 0 if candidate is None else len(candidate.failures), "restarts": len(restarted)},
        threshold="no failed request, no restart, no other switch: each has a cause that a cutover must not cover up",
        reason="; ".join([*failed, *restarted, *lost, *switched]) or "none",
    )


@dataclass(frozen=True)
class _Row:
    """One layer of one backend: all its counts, and the share of rows beyond the usual ULP since ``before``."""

    place: str
    counts: LayerCounts
    rows: int
    share: float


def parity(stage: Kind, before: States, after: States, limits: Limits) -> Verdict:
    """Ours against the baseline, layer by layer, from the counters of validate.

    Layer by layer, because one wrong head of one layer is lost among all rows of a large model. The rows that count
    are those of this stage in ``validate``, all of them in ``soak``; maxima are since the server started.
    """
    if limits.usual_ulp not in ROW_EDGES:
        edges = ", ".join(f"{edge:g}" for edge in ROW_EDGES)
        raise ConfigError(f"limits: usual_ulp: expected an edge of the histogram ({edges}), got {limits.usual_ulp:g}")
    rows = sorted(
        _rows({} if stage == "soak" else _layers(before), after, limits.usual_ulp), key=_badness, reverse=True
    )
    problems = [problem for row in rows for problem in _problems(row, limits)]
    for name, rank in _ranks(after):
        if not any(backend.layers for backend in rank.backends):
            problems.append(f"{name} compared nothing")
    figures: dict[str, Figure] = {
        "layers": len(rows),
        "fewest_rows": min((row.rows for row in rows), default=0),
        "mismatched_rows": sum(row.counts.mismatched_rows for row in rows),
        "max_row_ulp": max((row.counts.max_row_ulp for row in rows), default=None),
        "largest_share_beyond": max((row.share for row in rows), default=None),
    }
    if rows:
        worst = rows[0].counts
        figures |= {"worst": rows[0].place, "worst_node": worst.worst_node, "worst_head": worst.worst_head}
    return Verdict(
        stage=stage,
        gate="parity",
        passed=not problems,
        figures=figures,
        threshold=(
            f"each layer: {limits.rows} rows, none beyond {limits.max_row_ulp:g} ULP or with NaN in one result only, "
            f"{limits.share_beyond:.2%} beyond {limits.usual_ulp:g} ULP"
        ),
        reason=few(problems) or f"{len(rows)} layers agree; worst row {figures['max_row_ulp']:.3g} bfloat16 ULP",
    )


def shapes(stage: Kind, after: States) -> Verdict:
    """Every shape that ours served was compared under validate: same nodes, heads and mask, no more requests.

    Fewer requests than compared are covered, because requests of a batch do not see each other. Before ``on`` there
    must be at least one compared shape; what ``off`` served and validate has not compared yet is a figure.
    """
    compared, open_ = 0, []
    served = VerifyMode.ON if stage == "on" else VerifyMode.OFF
    for name, rank in _ranks(after):
        for backend in rank.backends:
            covered = [shape for shape in backend.shapes if VerifyMode.VALIDATE in shape.modes]
            compared += len(covered)
            open_ += [
                f"{name}: {_name(shape)}"
                for shape in backend.shapes
                if served in shape.modes and not any(_covers(other, shape) for other in covered)
            ]
    passed = compared > 0 and not (stage == "on" and open_)
    reason = f"{compared} shapes compared"
    if open_:
        reason += f"; not compared, but served in {served.value}: {few(open_)}"
    return Verdict(
        stage=stage,
        gate="shapes",
        passed=passed,
        figures={"compared": compared, "not_compared": len(open_)},
        threshold="what ours serves was compared before" if stage == "on" else "at least one shape compared",
        reason=reason if compared else "no shape was compared",
    )


def _ranks(states: States) -> Iterator[tuple[str, RankState]]:
    for group, state in enumerate(states):
        for rank in state.ranks:
            yield (f"group {group} rank {rank.rank}" if len(states) > 1 else f"rank {rank.rank}"), rank


def _served(rank: RankState, served: VerifyMode) -> int:
    return sum(backend.served[served].calls for backend in rank.backends if served in backend.served)


def _backends(states: States) -> Iterator[tuple[str, int, BackendState]]:
    for name, rank in _ranks(states):
        for index, backend in enumerate(rank.backends):
            yield (f"{name} backend {index}" if len(rank.backends) > 1 else name), rank.pid, backend


def _layers(states: States) -> dict[tuple[str, int, int], LayerCounts]:
    """Counts by backend, process and layer."""
    return {(name, pid, counts.layer): counts for name, pid, backend in _backends(states) for counts in backend.layers}


def _rows(before: dict[tuple[str, int, int], LayerCounts], after: States, usual: float) -> Iterator[_Row]:
    """Every layer's counts, those of ``before`` taken off where the same process counted them."""
    beyond = ROW_EDGES.index(usual) + 1
    for (name, pid, layer), counts in _layers(after).items():
        earlier = before.get((name, pid, layer))
        rows = counts.rows - (earlier.rows if earlier else 0)
        far = sum(counts.histogram[beyond:]) - (sum(earlier.histogram[beyond:]) if earlier else 0)
        yield _Row(f"{name} layer {layer}", counts, rows, far / rows if rows > 0 else 0.0)


def _badness(row: _Row) -> tuple[bool, float, float]:
    return row.counts.mismatched_rows > 0, row.counts.max_row_ulp, row.share


def _problems(row: _Row, limits: Limits) -> Iterator[str]:
    counts = row.counts
    worst = f"worst: node {counts.worst_node}, head {counts.worst_head}"
    if counts.mismatched_rows:
        yield f"{row.place}: NaN or infinity in one result only, in {counts.mismatched_rows} rows ({worst})"
    if counts.max_row_ulp > limits.max_row_ulp:
        yield f"{row.place}: a row is {counts.max_row_ulp:.3g} bfloat16 ULP off ({worst})"
    if row.share > limits.share_beyond:
        yield f"{row.place}: {row.share:.2%} of rows are beyond {limits.usual_ulp:g} ULP ({worst})"
    if row.rows < limits.rows:
        yield f"{row.place}: only {row.rows} rows compared"


def _covers(compared: Shape, served: Shape) -> bool:
    same = (compared.nodes, compared.heads, compared.mask) == (served.nodes, served.heads, served.mask)
    return same and compared.requests >= served.requests


def _name(shape: Shape) -> str:
    return f"{shape.requests} requests x {shape.nodes} nodes x {shape.heads} heads, mask {shape.mask}"
