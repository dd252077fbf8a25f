"""One compiled implementation under test: every call gets poisoned outputs and a guarded, poisoned workspace."""

from __future__ import annotations

import torch
from cases import Case, assert_matches

from treeverify import tree_attention
from treeverify.ops.tree_attention import cuda
from treeverify.ops.tree_attention.contract import LATENT, RELATIVE_ERROR_FLAT
from treeverify.ops.tree_attention.reference import tree_attention_reference

GUARD_BYTES, GUARD_BYTE, GAP = 4096, 0xA5, 8
Result = tuple[torch.Tensor, torch.Tensor]


class Kernel:
    """Calls ``implementation``; remembers the largest relative error that ``matches`` saw.

    ``bare``: buffers of the exact size, unwritten and unguarded, so that a sanitizer sees their bounds and any read
    of what nothing wrote.
    """

    def __init__(self, implementation: str, device: torch.device | None = None, *, bare: bool = False) -> None:
        self.implementation, self.bare = implementation, bare
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.worst = 0.0

    def buffers(self, batch: int, nodes: int, heads: int, **sizes: int | None) -> dict[str, torch.Tensor]:
        """``out`` (rows longer than its own, so gaps between them), ``lse`` and ``workspace``, all poisoned."""
        size = self.workspace_bytes(batch, nodes, heads, **sizes)
        if self.bare:
            return {
                "out": torch.empty(batch * nodes, heads, LATENT, dtype=torch.bfloat16, device=self.device),
                "lse": torch.empty(batch * nodes, heads, dtype=torch.float32, device=self.device),
                "workspace": torch.empty(size, dtype=torch.uint8, device=self.device),
            }
        out = torch.full((batch * nodes, heads, LATENT + GAP), torch.nan, dtype=torch.bfloat16, device=self.device)
        guarded = torch.full((size + GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=self.device)
        guarded[size:] = GUARD_BYTE
        lse = torch.full((batch * nodes, heads), torch.nan, dtype=torch.float32, device=self.device)
        return {"out": out[..., :LATENT], "lse": lse, "workspace": guarded[:size]}

    def workspace_bytes(self, batch: int, nodes: int, heads: int, **sizes: int | None) -> int:
        given = {name: value for name, value in sizes.items() if value is not None}
        return cuda.workspace_bytes(
            batch, nodes, heads, device=self.device, implementation=self.implementation, **given
        )

    def __call__(self, *tensors: torch.Tensor, **options: object) -> Result:
        """Run the call on poisoned buffers, wait, and check that nothing beside them was written."""
        nodes, longest = options["nodes"], options.get("max_prefix")
        split = options.get("fixed_split")
        longest = tensors[4].shape[0] if longest is None else longest
        tokens, heads, _ = tensors[0].shape
        buffers = self.buffers(tokens // nodes, nodes, heads, fixed_split=split, max_prefix=longest)
        out, lse = tree_attention(*tensors, implementation=self.implementation, **{**options, **buffers})
        torch.cuda.synchronize(self.device)
        if not self.bare:
            assert_guards(buffers)
        return out, lse

    def matches(self, case: Case, exact: Result | None = None, bound: float | None = None, **more: object) -> Result:
        """Run a case and hold the result against float64 on the same inputs."""
        got = case.run(self, **more)
        want = exact_on_device(case) if exact is None else exact
        if want[0].numel() and bool(want[0].norm() > 0):
            self.worst = max(self.worst, float((got[0].double() - want[0]).norm() / want[0].norm()))
        assert_matches(case, got, want, RELATIVE_ERROR_FLAT[torch.bfloat16] if bound is None else bound)
        return got


def assert_guards(buffers: dict[str, torch.Tensor]) -> None:
    """The bytes after the workspace and the gaps between the rows of ``out`` are as they were."""
    workspace, out = buffers["workspace"], buffers["out"]
    after = workspace.as_strided((GUARD_BYTES,), (1,), workspace.storage_offset() + workspace.numel())
    assert bool((after == GUARD_BYTE).all()), "written past the workspace"
    gaps = out.as_strided((*out.shape[:2], GAP), out.stride(), LATENT)
    assert bool(gaps.isnan().all()), "written between the rows of out"


def exact_on_device(case: Case) -> Result:
    """The float64 reference on the case's own device: plain torch, no code of ours below it."""
    return tree_attention_reference(*case.tensors, **case.options)


def same_bits(a: Result, b: Result) -> None:
    assert torch.equal(a[0].view(torch.int16), b[0].view(torch.int16)), "out differs"
    assert torch.equal(a[1].view(torch.int32), b[1].view(torch.int32)), "lse differs"
