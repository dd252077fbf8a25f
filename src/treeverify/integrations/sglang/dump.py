"""Dumps of breaching calls: kept on the device by the call itself, written to a file at the host's next chance.

**User data:** a dump holds activations of a user's prompt and text. Off unless ``KDTREE_DUMP_DIR`` is set.

A graph that PyTorch captures has no branches, and the host must not wait. So ``capture`` is a fixed sequence of torch
operations whose *destination* depends on the breach: row 1 of a buffer for a call to keep, row 0, which is never read,
for any other. Of a call the request with the worst row is kept, whose place on the device is only an index: the cost
does not grow with the batch. It is about fifty small kernels a layer and 0.4 MB (16 nodes, 8 heads); the prefix rows
are read and written only for a call that is kept, all others read pool row 0 and write row 0 over and over, which stays
in the L2 cache. (Choosing by ``where`` would read and write all of the buffer in every call.) One call is kept at a
time; those that breach before the host has written it are counted, not kept. Nor is one whose prefix is longer than
``MAX_PREFIX``, which bounds a file: 38 MB of prefix rows and 3.2 KB for each (node, head).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch

from treeverify.env import dump_dir, dump_max
from treeverify.errors import ConfigError
from treeverify.integrations.sglang.calls import Call
from treeverify.integrations.sglang.host_copy import HostCopy
from treeverify.observe.bounds import BOUND_ULP
from treeverify.observe.calls import RecordedCall, save
from treeverify.ops.tree_attention.contract import LATENT, ROW, rows_of

logger = logging.getLogger(__name__)

MAX_PREFIX = 32_768
"""Longest prefix of a call that is kept, in tokens."""
_KEPT = 1


class _Fact(IntEnum):
    """Numbers that are kept with a call (float64)."""

    LAYER = 0
    REQUEST = 1
    PREFIX = 2
    NODES = 3
    SCALE = 4


class Store:
    """Where the dumps of one rank go: ``verify-LABEL-NUMBER.safetensors`` in ``folder``, ``limit`` of them at most.

    Files of an earlier run count, and none is ever written over. Raises ``ConfigError`` for a folder that does not
    exist or cannot be written.
    """

    def __init__(self, folder: Path, label: str, limit: int) -> None:
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"KDTREE_DUMP_DIR: expected a folder that can be written, got {folder}")
        self._folder = folder
        self._label = label
        self._limit = limit
        self.written = 0
        """Files that this process has written."""

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(list(self._folder.glob(f"verify-{self._label}-[0-9]*.safetensors"))) >= self._limit

    def write(self, call: RecordedCall) -> Path:
        """Write ``call`` under the first number that is free and return its file; raises ``OSError``."""
        number = 0
        while True:
            path = self._folder / f"verify-{self._label}-{number:04d}.safetensors"
            try:
                save(call, path)
            except FileExistsError:
                number += 1
                continue
            self.written += 1
            return path


class Sizes(NamedTuple):
    """What sizes the buffers: the most that a call may have, and its dtype and device."""

    nodes: int
    heads: int
    max_prefix: int
    dtype: torch.dtype
    device: torch.device


class Dumper:
    """Keeps the first breaching call on the device until ``drain`` has written it, then the next."""

    def __init__(self, store: Store, sizes: Sizes, notes: Mapping[str, str]) -> None:
        nodes, heads, longest, dtype, device = sizes
        longest = min(longest, MAX_PREFIX)
        self._store = store
        self._notes = dict(notes)
        self._stopped = False
        self._q = torch.zeros(2, nodes, heads, ROW, dtype=dtype, device=device)
        self._draft = torch.zeros(2, nodes, ROW, dtype=dtype, device=device)
        self._visible = torch.zeros(2, nodes, nodes, dtype=torch.bool, device=device)
        self._served, self._ours = (torch.zeros(2, nodes, heads, LATENT, dtype=dtype, device=device) for _ in range(2))
        self._facts = torch.zeros(2, len(_Fact), dtype=torch.float64, device=device)
        self._prefix = torch.zeros(1 + longest, ROW, dtype=dtype, device=device)
        self._node, self._token = torch.arange(nodes, device=device), torch.arange(longest, device=device)
        self._taken = torch.zeros(1, dtype=torch.int64, device=device)
        self._copy = HostCopy(self._taken)

    @property
    def written(self) -> int:
        """Files that this process has written for its rank."""
        return self._store.written

    def capture(self, call: Call, served: torch.Tensor, ours: torch.Tensor, score: torch.Tensor) -> None:
        """Keep the worst request of ``call`` if it breaches the bound and nothing is kept yet. Waits for nothing.

        ``served`` and ``ours``: ``[batch*nodes, heads, 512]``; ``score [batch*nodes, heads]`` from ``Counters.record``.
        """
        nodes = call.nodes
        batch = score.shape[0] // nodes
        worst, request = score.view(batch, -1).amax(1).max(0, keepdim=True)
        begin = call.kv_indptr.index_select(0, request).to(torch.int64)
        prefix = call.kv_indptr.index_select(0, request + 1).to(torch.int64) - begin
        take = (worst > BOUND_ULP) & (prefix <= self._token.numel()) & (self._taken == 0)
        place = take.to(torch.int64)
        for kept, tensor in (
            (self._q, call.q),
            (self._draft, rows_of(call.draft_kv)),
            (self._served, served),
            (self._ours, ours),
        ):
            one = tensor.view(batch, nodes, *tensor.shape[1:]).index_select(0, request)
            kept[:, :nodes].index_copy_(0, place, one)
        self._visible[:, :nodes, :nodes].index_copy_(0, place, self._tree(call, request, prefix, take))
        self._keep_prefix(call, begin, prefix, take)
        layer, width, scale = (self._filled(value) for value in (call.layer, nodes, call.scale))
        row = torch.cat([layer, request.double(), prefix.double(), width, scale])  # as in _Fact
        self._facts.index_copy_(0, place, row[None])
        self._taken.add_(place)  # last: who sees it set sees the rest

    def drain(self, wait: bool) -> Path | None:
        """Write the kept call, if there is one, and make room for the next; return its file.

        With ``wait`` it asks the device now. Without, it knows what the device said a call of ``drain`` ago, and waits
        only to write. Once the limit is reached or a file cannot be written, which is logged, nothing is kept any more.
        """
        if self._stopped:
            return None
        taken = self._copy.now() if wait else self._copy.latest()
        if not int(taken):
            self._copy.start()
            return None
        path = self._write()
        if path is None:
            self._stopped = True  # and what is kept stays, so that no later call is
            return None
        self._copy.now()  # waits: no call may be between reading the flag and writing it
        self._taken.zero_()
        self._copy.now()
        return path

    def _write(self) -> Path | None:
        try:
            if self._store.full:
                logger.warning("treeverify: a verify call beyond the bound is not dumped: KDTREE_DUMP_MAX is reached")
                return None
            path = self._store.write(self._recorded())
        except OSError as error:
            logger.error("treeverify: no more dumps: %s", error)
            return None
        logger.warning("treeverify: a verify call beyond the bound, which holds user data, is in %s", path)
        return path

    def _recorded(self) -> RecordedCall:
        layer, request, prefix, nodes, scale = self._facts[_KEPT].tolist()
        width = int(nodes)
        return RecordedCall(
            q=self._q[_KEPT, :width].cpu(),
            k=self._draft[_KEPT, :width, None].cpu(),
            kbuf=self._prefix[_KEPT : _KEPT + int(prefix), None].cpu(),
            visible=self._visible[_KEPT, :width, :width].cpu(),
            scale=scale,
            baseline=self._served[_KEPT, :width].cpu(),
            ours=self._ours[_KEPT, :width].cpu(),
            notes={**self._notes, "layer": str(int(layer)), "request": str(int(request))},
        )

    def _filled(self, value: float) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self._facts.device)

    def _tree(self, call: Call, request: torch.Tensor, prefix: torch.Tensor, take: torch.Tensor) -> torch.Tensor:
        """Which draft rows each node of the request sees: ``[1, nodes, nodes]`` bool."""
        node = self._node[: call.nodes]
        if call.mask is not None and call.mask_indptr is not None:
            begin = call.mask_indptr.index_select(0, request)
            cells = begin + node[:, None] * (prefix + call.nodes) + prefix + node
            return call.mask[cells * take][None] != 0  # cell 0 of a call that is not kept: its rows may be stale
        if call.tree_bits is not None:
            words = call.tree_bits.view(torch.int64).index_select(0, request)[..., node // 64]
            return (words >> (node % 64)) & 1 != 0
        return (node[:, None] >= node)[None]

    def _keep_prefix(self, call: Call, begin: torch.Tensor, prefix: torch.Tensor, take: torch.Tensor) -> None:
        if not call.kv_indices.numel():
            return
        other = ~((self._token < prefix) & take)
        position = (begin + self._token).masked_fill_(other, 0)
        slots = call.kv_indices.index_select(0, position).masked_fill_(other, 0)
        place = (self._token + _KEPT).masked_fill_(other, 0)
        self._prefix.index_copy_(0, place, rows_of(call.kv_pool).index_select(0, slots))


def from_environment(label: str, sizes: Sizes, notes: Mapping[str, str]) -> Dumper | None:
    """Make the dumper that ``KDTREE_DUMP_DIR`` and ``KDTREE_DUMP_MAX`` ask for; None if they ask for none.

    ``label`` names the rank in the files (``dp0-tp1``), ``notes`` go into each of them. None as well, with a line in
    the log, where earlier runs have reached the limit. Raises ``ConfigError``.
    """
    folder = dump_dir()
    if folder is None:
        return None
    store = Store(folder, label, dump_max())
    if store.full:
        logger.warning("treeverify: no dumps: KDTREE_DUMP_DIR %s holds %d of %s already", folder, dump_max(), label)
        return None
    return Dumper(store, sizes, notes)
