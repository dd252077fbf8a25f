"""Where the accepted rows of a verify step must go: complete, checked move plans. Pure.

A step verifies ``width`` draft rows in ``width`` reserved slots, in node order. Of these the accepted path is kept, and
moved to the front: ``slots[path[i]] -> slots[i]``. The rest, ``slots[len(path):]``, is then free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import frozen, require_array

_INDEX = (np.int32, np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class MovePlan:
    """Row moves ``sources[i] -> destinations[i]``, both int64 [moves], read-only, of slots >= 1.

    No destination occurs twice, no move is the identity, and no move reads a row that an earlier move wrote. So the
    plan is right when executed

    - one by one in order, each row read just before it is written elsewhere, or
    - as one gather of all sources followed by one scatter to all destinations.

    It is *not* right as parallel unordered in-place copies where some row is both read by one move and overwritten by
    another.

    Raises ContractError that names the move for any breach.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Check the plan."""
        sources = frozen(require_array("MovePlan", "sources", self.sources, (np.int64,), ndim=1))
        destinations = frozen(require_array("MovePlan", "destinations", self.destinations, (np.int64,), ndim=1))
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "destinations", destinations)
        if len(sources) != len(destinations):
            raise ContractError.of("MovePlan", "destinations: moves", f"{len(sources)} (as sources)", len(destinations))
        written: dict[int, int] = {}
        for move, (source, destination) in enumerate(zip(sources.tolist(), destinations.tolist(), strict=True)):
            if min(source, destination) < 1:
                raise ContractError.of("MovePlan", f"move {move}", "slots >= 1", f"{source} -> {destination}")
            if source == destination:
                raise ContractError.of("MovePlan", f"move {move}", "no identity", f"{source} -> {destination}")
            if source in written:
                raise ContractError.of(
                    "MovePlan", f"sources[{move}]", "a row not yet overwritten", f"{source}, as move {written[source]}"
                )
            if destination in written:
                raise ContractError.of(
                    "MovePlan", f"destinations[{move}]", "a new row", f"{destination}, as move {written[destination]}"
                )
            written[destination] = move


def plan_moves(path: NDArray[Any], slots: NDArray[Any]) -> MovePlan:
    """Plan one request's commit: rows ``slots[path]`` to ``slots[:length]``; rows already in place are skipped.

    ``path`` int32 or int64 [length]: accepted nodes, beginning with 0 and strictly rising (parents come before
    children). ``slots`` int32 or int64 [width]: the step's reserved slots in node order, distinct, >= 1.

    Strictly rising means ``path[i] >= i``, so a row is read (at move i) before it is written (at move path[i]): rising
    order is free of hazards. Raises ContractError for any breach, among them a path that leaves the slots.
    """
    return plan_batch_moves([path], [slots])


def plan_batch_moves(paths: Sequence[NDArray[Any]], slots: Sequence[NDArray[Any]]) -> MovePlan:
    """Plan the commit of several requests as one: as `plan_moves` for each, in order.

    Raises ContractError as `plan_moves` does, and when two requests name the same slot or the lengths differ.
    """
    if len(paths) != len(slots):
        raise ContractError.of("plan_moves", "slots: requests", f"{len(paths)} (as paths)", len(slots))
    taken: dict[int, int] = {}
    sources: list[int] = []
    destinations: list[int] = []
    for request, (one_path, one_slots) in enumerate(zip(paths, slots, strict=True)):
        own = require_array("plan_moves", f"slots[{request}]", one_slots, _INDEX, ndim=1).tolist()
        for slot in own:
            if slot in taken:
                raise ContractError.of(
                    "plan_moves", f"slots[{request}]", "distinct slots", f"{slot} again (request {taken[slot]})"
                )
            if slot < 1:
                raise ContractError.of("plan_moves", f"slots[{request}]", "slots >= 1", slot)
            taken[slot] = request
        nodes = require_array("plan_moves", f"path[{request}]", one_path, _INDEX, ndim=1).tolist()
        _check_path(request, nodes, len(own))
        for i, node in enumerate(nodes):
            if node != i:
                sources.append(own[node])
                destinations.append(own[i])
    return MovePlan(np.array(sources, dtype=np.int64), np.array(destinations, dtype=np.int64))


def _check_path(request: int, nodes: list[int], width: int) -> None:
    name = f"path[{request}]"
    if not nodes or nodes[0] != 0:
        raise ContractError.of("plan_moves", name, "a path that begins with the root 0", nodes)
    if any(later <= earlier for earlier, later in pairwise(nodes)):
        raise ContractError.of("plan_moves", name, "strictly rising nodes", nodes)
    if nodes[-1] >= width:
        raise ContractError.of("plan_moves", name, f"nodes below {width} (the reserved slots)", nodes)
