"""Is a server serving what its mode says? Judged from one or two readings of its state; pure."""

from __future__ import annotations

from collections.abc import Sequence

from treeverify.control.schema import BackendState, PluginState, RankState
from treeverify.env import VerifyMode


def problems(states: Sequence[PluginState], earlier: Sequence[PluginState], expect: VerifyMode | None) -> list[str]:
    """Return what is wrong with a server, one line each; none if it serves what it says.

    ``earlier`` is a reading of the same server a moment before (or ``states`` again, for one reading only): calls that
    are left to SGLang's own kernel count where they grow, and where nothing else was served in the rank's mode (a CUDA
    graph counts them once, when it is captured). ``expect`` is the mode that every rank should have.
    """
    found = list(_disagreements(states))
    before = {(group, rank.rank): _left(rank) for group, rank in _ranks(earlier)}
    for group, rank in _ranks(states):
        name = f"group {group}, rank {rank.rank}"
        if expect is not None and rank.mode is not expect:
            found.append(f"{name}: mode {rank.mode}, expected {expect}")
        if rank.mode is VerifyMode.OFF:
            continue
        if not rank.backends:
            found.append(f"{name}: mode {rank.mode}, but no backend of ours")
        grown = _left(rank) - before.get((group, rank.rank), 0)
        if grown > 0:
            found.append(f"{name}: {grown} calls left to SGLang's kernel while it was watched ({_reasons(rank)})")
        elif any(_only_left(backend, rank.mode) for backend in rank.backends):
            found.append(
                f"{name}: nothing served in mode {rank.mode}, calls left to SGLang's kernel ({_reasons(rank)})"
            )
    return found


def breaches(states: Sequence[PluginState]) -> int:
    """Return the validate calls beyond the bound, of all ranks."""
    return sum(backend.breaches for _, rank in _ranks(states) for backend in rank.backends)


def _ranks(states: Sequence[PluginState]) -> list[tuple[int, RankState]]:
    return [(group, rank) for group, state in enumerate(states) for rank in state.ranks]


def _left(rank: RankState) -> int:
    return sum(count for backend in rank.backends for count in backend.left_to_parent.values())


def _only_left(backend: BackendState, mode: VerifyMode) -> bool:
    passes = backend.served[mode].calls if mode in backend.served else 0
    return passes == 0 and sum(backend.left_to_parent.values()) > 0


def _reasons(rank: RankState) -> str:
    return ", ".join(sorted({reason for backend in rank.backends for reason in backend.left_to_parent}))


def _disagreements(states: Sequence[PluginState]) -> list[str]:
    facts = {
        "versions": {state.version for state in states},
        "modes": {str(rank.mode) for _, rank in _ranks(states)},
        "kernels": {", ".join(backend.kernel for backend in rank.backends) or "none" for _, rank in _ranks(states)},
    }
    return [f"ranks have different {name}: {'; '.join(sorted(f))}" for name, f in facts.items() if len(f) > 1]
