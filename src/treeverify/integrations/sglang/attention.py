"""What stands behind one attention backend: buffers, counters and the calls of ``tree_attention``, by mode.

``off`` calls the parent and nothing else; ``validate`` computes both on the same live tensors, serves the parent's and
counts the difference on the device; ``on`` serves ours. What ``tree_attention`` does not compute is left to the
parent, by a named reason that is counted and logged once.

A call allocates only the output that is served, as the parent does, and waits for nothing. The workspace is sized for
the largest captured batch before the first capture; an eager batch beyond it grows it (older ones stay alive, since
graphs hold their addresses).
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from treeverify.control.schema import ModeCounts
from treeverify.env import VerifyMode
from treeverify.errors import ContractError
from treeverify.integrations.sglang import calls, compat
from treeverify.integrations.sglang.counters import Counters
from treeverify.integrations.sglang.dump import Dumper
from treeverify.integrations.sglang.modes import Switch
from treeverify.ops.tree_attention.api import choose, tree_attention
from treeverify.ops.tree_attention.contract import LATENT, OPERATOR

logger = logging.getLogger(__name__)


class Verifier:
    """What one backend needs to serve its calls, and what the probe reports of it."""

    def __init__(self, switch: Switch, facts: compat.Facts, dtype: torch.dtype, dumper: Dumper | None = None) -> None:
        self.switch = switch
        self.facts = facts
        self.kernel = choose(facts.device, None)
        self.counters = Counters(facts.layers, facts.nodes, facts.heads, facts.device)
        self.off = ModeCounts(calls=0, rows=0)
        """Passes in mode ``off``: nothing of ours runs on the device then, so the host counts what it launches."""
        self.shapes: dict[tuple[int, int, int, str], set[str]] = {}
        """(requests, nodes, heads, mask dtype) of the calls made from the host, captures included, with their modes."""
        self.left_to_parent: Counter[str] = Counter()
        self.dumper = dumper
        self._dtype = dtype
        self._capacity = 0
        self._kept: list[torch.Tensor] = []
        if facts.device.type == "cuda":
            from treeverify.ops.tree_attention import cuda  # needs a compiler, or a compiled library

            cuda.prepare(facts.device, self.kernel)
        self.reserve(1)

    def reserve(self, batch: int) -> None:
        """Make room for ``batch`` requests. Raises ``ContractError`` if that needs memory during a capture."""
        if batch <= self._capacity:
            return
        device, heads, nodes = self.facts.device, self.facts.heads, self.facts.nodes
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ContractError.of(OPERATOR, "workspace: requests", f"<= {self._capacity} in a graph capture", batch)
        tokens = batch * nodes
        self._lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
        rows = tokens if VerifyMode.VALIDATE in self.switch.allowed else 0
        self._shadow = torch.empty(rows, heads, LATENT, dtype=self._dtype, device=device)
        self._workspace = torch.empty(self._workspace_bytes(batch), dtype=torch.uint8, device=device)
        self._no_bits = torch.zeros(batch, 1, 1, dtype=torch.int64, device=device)
        kept = [self._lse, self._shadow, self._workspace, self._no_bits]
        self._kept += kept
        self._capacity = batch
        taken = sum(tensor.numel() * tensor.element_size() for tensor in kept) / 2**20
        logger.info("treeverify: room for %d requests of %d nodes: %.1f MiB", batch, nodes, taken)

    def room(self, tokens: int, nodes: int) -> None:
        """Make sure that a call of ``tokens`` rows fits, twice as much if it does not."""
        if nodes > self.facts.nodes:
            raise ContractError.of(OPERATOR, "nodes", f"<= {self.facts.nodes} (the server's draft tokens)", nodes)
        batch = tokens // nodes
        if batch > self._capacity:
            self.reserve(1 << (batch - 1).bit_length())

    def no_bits(self, batch: int) -> torch.Tensor:
        """Return zeros ``[>= batch, 1, 1]``: the tree of one node that sees no draft row."""
        self.room(batch, 1)
        return self._no_bits

    def leave(self, reason: str) -> None:
        """Note a call that the parent serves."""
        if reason not in self.left_to_parent:
            logger.warning("treeverify: a call is left to Triton: %s", reason)
        self.left_to_parent[reason] += 1

    def attend(self, call: calls.Call, mode: VerifyMode, out: torch.Tensor) -> torch.Tensor:
        """Compute ours into ``out [batch*nodes, heads, 512]``."""
        self.room(call.q.shape[0], call.nodes)
        self._note(call, mode)
        tree_attention(
            call.q,
            call.draft_kv,
            call.kv_pool,
            call.kv_indptr,
            call.kv_indices,
            nodes=call.nodes,
            scale=call.scale,
            mask=call.mask,
            mask_indptr=call.mask_indptr,
            tree_bits=call.tree_bits,
            out=out,
            lse=self._lse[: call.q.shape[0]],
            workspace=self._workspace,
            max_prefix=self.facts.max_prefix,
            implementation=self.kernel,
        )
        return out

    def serve(self, call: calls.Call, out: torch.Tensor) -> None:
        """Mode on: ours into ``out``."""
        self.attend(call, VerifyMode.ON, out)
        self._count(call, VerifyMode.ON)

    def compare(self, call: calls.Call, served: torch.Tensor) -> None:
        """Mode validate: ours beside ``served``, the difference into the counters."""
        self.room(call.q.shape[0], call.nodes)
        ours = self.attend(call, VerifyMode.VALIDATE, self._shadow[: call.q.shape[0]])
        score = self.counters.record(call.layer, served, ours, call.slots != 0, call.nodes)
        if self.dumper is not None:
            self.dumper.capture(call, served, ours, score)
        self._count(call, VerifyMode.VALIDATE)

    def served_off(self, tokens: int) -> None:
        """Mode off: count a pass of ``tokens`` nodes that the parent served whole."""
        rows = tokens * self.facts.heads
        self.off = ModeCounts(calls=self.off.calls + 1, rows=self.off.rows + rows)

    def _count(self, call: calls.Call, mode: VerifyMode) -> None:
        """Once per forward pass: at the first layer of this rank."""
        if call.layer == self.facts.first_layer:
            self.counters.count(mode, call.slots != 0, call.q.shape[1])

    def _note(self, call: calls.Call, mode: VerifyMode) -> None:
        mask = "none" if call.mask is None else str(call.mask.dtype)
        shape = (call.q.shape[0] // call.nodes, call.nodes, call.q.shape[1], mask)
        seen = self.shapes.setdefault(shape, set())
        if mode.value not in seen:
            seen.add(mode.value)
            logger.info("treeverify %s: requests %d, nodes %d, heads %d, mask %s", mode.value, *shape)

    def _workspace_bytes(self, batch: int) -> int:
        if self.facts.device.type != "cuda":
            return 0
        from treeverify.ops.tree_attention.cuda import workspace_bytes

        return max(  # a batch of fewer requests may be split more, and fewer nodes make other row tiles
            workspace_bytes(
                requests,
                nodes,
                self.facts.heads,
                device=self.facts.device,
                implementation=self.kernel,
                max_prefix=self.facts.max_prefix,
            )
            for nodes in range(1, self.facts.nodes + 1)
            for requests in range(1, batch + 1)
        )
