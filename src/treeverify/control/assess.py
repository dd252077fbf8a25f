"""Is a server serving what its mode says? Judged from one or two readings of its state; pure."""

from __future__ import annotations

from collections.abc import Sequence

from treeverify.control.schema import PluginState, RankState
from treeverify.env import VerifyMode


def problems(states: Sequence[PluginState], earlier: Sequence[PluginState], expect: VerifyMode | None) -> list[str]:
    """Return what is wrong with a server, one line each; none if it serves what it says.

    ``earlier`` is a reading of the same server a moment before (or ``states`` again, for one reading only): calls that
    are left to SGLang's own kernel count only where they grow. ``expect`` is the mode that every rank should have.
    """
    found = list(_disagreements(states))
    before = {(group, rank.rank): _left(rank) for group, rank in _ranks(earlier)}
    for group, rank in _ranks(states):
        name = f"group {group}, rank {rank.rank}"
        if expect is not None and rank.mode is not expect:
            found.append(f"{name}: mode {rank.mode}, expected {expect}")
        if rank.mode is not VerifyMode.OFF and not rank.backends:
            found.append(f"{name}: mode {rank.mode}, but no backend of ours")
        grown = _left(rank) - before.get((group, rank.rank), 0)
        if grown > 0 and rank.mode is not VerifyMode.OFF:
            reasons = ", ".join(sorted({reason for backend in rank.backends for reason in backend.left_to_parent}))
            found.append(f"{name}: {grown} calls left to SGLang's kernel while it was watched ({reasons})")
    return found


def breaches(states: Sequence[PluginState]) -> int:
    """Return the validate calls beyond the bound, of all ranks."""
    return sum(backend.breaches for _, rank in _ranks(states) for backend in rank.backends)


def _ranks(states: Sequence[PluginState]) -> list[tuple[int, RankState]]:
    return [(group, rank) for group, state in enumerate(states) for rank in state.ranks]


def _left(rank: RankState) -> int:
    return sum(count for backend in rank.backends for count in backend.left_to_parent.values())


def _disagreements(states: Sequence[PluginState]) -> list[str]:
    facts = {
        "versions": {state.version for state in states},
        "modes": {str(rank.mode) for _, rank in _ranks(states)},
        "kernels": {", ".join(backend.kernel for backend in rank.backends) or "none" for _, rank in _ranks(states)},
    }
    return [f"ranks have different {name}: {'; '.join(sorted(f))}" for name, f in facts.items() if len(f) > 1]
