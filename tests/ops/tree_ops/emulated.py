"""The tree operators' own CUDA code on the CPU: launch code and kernels, compiled for the host (tests/emulator).

The functions have the signatures of the public API with ``out`` given, and fill it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from treeverify.jit import toolkit, units

EMULATOR = Path(__file__).resolve().parents[2] / "emulator"
LAUNCH = re.compile(r"(\w+(?:<\w+>)?)<<<(.+?), (\w+), 0, stream>>>\(\s*(.*?)\);", re.DOTALL)


def struct(name: str, **fields: type) -> type[Structure]:
    """A C struct with these members in order, as in the operator's params.h."""
    return type(name, (Structure,), {"_fields_": list(fields.items())})


P, L, I, B = c_void_p, c_int64, c_int32, c_bool  # noqa: E741
TopkTile = struct(
    "TopkTile",
    logits=P, request_stride=L, depth_stride=L, packed=P, batch=I, depth=I, vocab=I, k=I, tiles=I, first_id=I,
    is_bf16=B,
)  # fmt: skip
TopkMerge = struct("TopkMerge", parts=P, packed=P, log_probs=P, token_ids=P, count=I, rows=I, k=I)
Window = struct(
    "Window",
    request_rows=P, lengths=P, slot_table=P, roots=P, slots=P, block_slots=P, ids=P, positions=P, rows=L, columns=L,
    mask_token=L, batch=I, width=I, block=I, rows_is_64=B, lengths_is_64=B, roots_is_64=B,
)  # fmt: skip
Gather = struct(
    "Gather",
    features=P, path=P, lengths=P, slots=P, prefix_lengths=P, packed=P, packed_slots=P, positions=P, row_bytes=L,
    stride_bytes=L, rows=I, batch=I, width=I, columns=I, slots_is_64=B, prefix_is_64=B,
)  # fmt: skip
Compact = struct(
    "Compact",
    pools=P, slots=P, path=P, lengths=P, row_bytes=L, stride_bytes=L, layers=I, batch=I, width=I, columns=I, unit=I,
    slots_is_64=B,
)  # fmt: skip
Accept = struct(
    "Accept",
    tokens=P, parents=P, samples=P, path=P, lengths=P, new_tokens=P, bonus=P, batch=I, width=I, columns=I,
)  # fmt: skip
Sampled = struct(
    "Sampled",
    tree=Accept, logits=P, logits_stride=L, temperature=P, top_k=P, top_p=P, min_p=P, uniforms=P, groups=P, blocks=I,
    vocab=I, is_bf16=B,
)  # fmt: skip
Build = struct(
    "Build",
    log_probs=P, token_ids=P, roots=P, tokens=P, parents=P, depths=P, scores=P, widths=P, batch=I, depth=I, k=I,
    width=I,
)  # fmt: skip
Mask = struct(
    "Mask",
    parents=P, prefix_lengths=P, bits=P, positions=P, full_mask=P, qlen_mask=P, retrieve=P, batch=I, width=I,
    prefix_is_64=B,
)  # fmt: skip
FUNCTIONS = {
    "topk_tiles": TopkTile, "topk_merge": TopkMerge, "draft_window": Window, "feature_gather": Gather,
    "kv_compact": Compact, "tree_accept": Accept, "tree_accept_sampled": Sampled, "tree_build": Build,
    "tree_mask": Mask,
}  # fmt: skip


def compile_library(folder: Path, plants: Sequence[tuple[str, str, str]] = ()) -> Path:
    """Compile the emulated operators into ``folder``; ``plants`` (file, old, new) change the code first."""
    csrc = folder / "csrc"
    shutil.copytree(units.CSRC, csrc)
    for file, old, new in plants:
        path = csrc / file
        text = path.read_text()
        assert text.count(old) == 1, f"{path.name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))
    for path in csrc.glob("ops/*/*_launch.cu"):
        path.write_text(LAUNCH.sub(r"emulator::launch(\2, \3, [&] { \1(\4); });", path.read_text()))
    found = toolkit.find_toolkit()
    flags = ["-O2", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{EMULATOR}", f"-I{csrc}", f"-I{found.include}"]
    library = folder / "tree_ops.so"
    sources = [str(Path(__file__).with_suffix(".cc")), str(EMULATOR / "block.cc")]
    done = subprocess.run([str(found.cxx), *flags, *sources, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Emulated:
    """The operators of one compiled library, on CPU tensors."""

    name, device = "emulated", torch.device("cpu")

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, params in FUNCTIONS.items():
            getattr(self._library, name).argtypes = [POINTER(params)]

    def _run(self, name: str, **fields: object) -> None:
        given = {key: address(value) if isinstance(value, torch.Tensor) else value for key, value in fields.items()}
        assert getattr(self._library, name)(ctypes.byref(FUNCTIONS[name](**given))) == 0

    def tree_build(self, log_probs, token_ids, roots, *, budget, out):
        batch, depth, k = log_probs.shape
        sizes = {"batch": batch, "depth": depth, "k": k, "width": budget + 1}
        self._run("tree_build", log_probs=log_probs, token_ids=token_ids, roots=roots, **vars(out), **sizes)
        return out

    def draft_window(self, request_rows, lengths, slot_table, roots, *, block, width, mask_token, out):
        rows, columns = slot_table.shape
        sizes = {"rows": rows, "columns": columns, "mask_token": mask_token}
        sizes |= {"batch": len(request_rows), "width": width, "block": block}
        tensors = {"request_rows": request_rows, "lengths": lengths, "slot_table": slot_table, "roots": roots}
        wide = [tensor.dtype == torch.int64 for tensor in (request_rows, lengths, roots)]
        kinds = dict(zip(("rows_is_64", "lengths_is_64", "roots_is_64"), wide, strict=True))
        self._run("draft_window", **tensors, **vars(out), **sizes, **kinds)
        return out

    def tree_mask(self, parents, prefix_lengths, *, out):
        batch, width = parents.shape
        wide = prefix_lengths.dtype == torch.int64
        given = {"parents": parents, "prefix_lengths": prefix_lengths, "prefix_is_64": wide}
        self._run("tree_mask", **given, **vars(out), batch=batch, width=width)
        return out

    def tree_accept(self, tokens, parents, samples, *, depth, out):
        batch, width = tokens.shape
        given = {"tokens": tokens, "parents": parents, "samples": samples}
        self._run("tree_accept", **given, **vars(out), batch=batch, width=width, columns=depth + 1)
        return out

    def tree_accept_sampled(self, tokens, parents, logits, law, uniforms, *, out, workspace):
        batch, width = tokens.shape
        fields = {"tokens": tokens, "parents": parents, **vars(out)}
        tree = Accept(
            **{name: address(value) for name, value in fields.items()},
            batch=batch, width=width, columns=uniforms.shape[1],
        )  # fmt: skip
        row = {"logits": logits, "logits_stride": logits.stride(0), "vocab": logits.shape[1]}
        bf16 = logits.dtype == torch.bfloat16
        self._run(
            "tree_accept_sampled", tree=tree, **row, **vars(law), uniforms=uniforms, groups=workspace, is_bf16=bf16
        )
        return out

    def kv_compact(self, table, slots, path, lengths):
        sizes = {"row_bytes": table.row_bytes, "stride_bytes": table.stride_bytes, "unit": table.unit}
        batch, width = slots.shape
        sizes |= {"layers": len(table.buffers), "batch": batch, "width": width, "columns": path.shape[1]}
        tensors = {"pools": table.pointers, "slots": slots, "path": path, "lengths": lengths}
        self._run("kv_compact", **tensors, **sizes, slots_is_64=slots.dtype == torch.int64)

    def feature_gather(self, features, path, lengths, slots, prefix_lengths, *, out):
        batch, width = slots.shape
        size = features.element_size()
        sizes = {"row_bytes": features.shape[1] * size, "stride_bytes": features.stride(0) * size}
        sizes |= {"rows": len(out.slots), "batch": batch, "width": width, "columns": path.shape[1]}
        tensors = {"features": features, "path": path, "lengths": lengths, "slots": slots}
        tensors |= {"prefix_lengths": prefix_lengths, "packed": out.features, "packed_slots": out.slots}
        kinds = {"slots_is_64": slots.dtype == torch.int64, "prefix_is_64": prefix_lengths.dtype == torch.int64}
        self._run("feature_gather", **tensors, positions=out.positions, **sizes, **kinds)
        return out

    def _tiles(self, logits, k, first_id, workspace):
        batch, depth, vocab = logits.shape
        strides = {"request_stride": logits.stride(0), "depth_stride": logits.stride(1)}
        sizes = {"batch": batch, "depth": depth, "vocab": vocab, "k": k, "tiles": -(-vocab // 8192)}
        kinds = {"first_id": first_id, "is_bf16": logits.dtype == torch.bfloat16}
        self._run("topk_tiles", logits=logits, packed=workspace, **strides, **sizes, **kinds)
        return {"parts": workspace, "count": sizes["tiles"], "rows": batch * depth, "k": k}

    def draft_topk(self, logits, k, *, out, workspace):
        self._run("topk_merge", **self._tiles(logits, k, 0, workspace), **vars(out))
        return out

    def draft_topk_shard(self, logits, k, *, first_id, out, workspace):
        self._run("topk_merge", **self._tiles(logits, k, first_id, workspace), packed=out)
        return out

    def draft_topk_combine(self, shards, *, out):
        count, batch, depth, entries = shards.shape
        self._run("topk_merge", parts=shards, **vars(out), count=count, rows=batch * depth, k=entries - 1)
        return out
