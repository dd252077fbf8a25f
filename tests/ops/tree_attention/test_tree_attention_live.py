"""A real verify call, recorded from a live server: 16 nodes, 8 heads, 37 prefix tokens.

File: q, k, v (draft), kbuf (the named prefix rows), mask [16, 53], o (the server's bfloat16 output), ref (float32).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CPU, Case, pack_bits
from implementations import IMPLEMENTATIONS
from safetensors.torch import load_file

from treeverify.ops.tree_attention.reference import tree_attention_reference

FILE = Path(__file__).parents[2] / "data" / "live_verify_eager.safetensors"
SCALE = 0.07216878364870322
NODES, PREFIX = 16, 37


def live_case(dtype=torch.float32, form="mask", device=CPU) -> tuple[Case, dict[str, torch.Tensor]]:
    """Its prefix rows scattered over a pool of NaN, its prefix mask columns garbage."""
    data = load_file(FILE)
    g = torch.Generator().manual_seed(11)
    pool = torch.full((501, 1, 576), torch.nan, dtype=dtype)
    slots = torch.randperm(500, generator=g)[:PREFIX] + 1
    pool[slots] = data["kbuf"].to(dtype)
    visible = data["mask"][:, PREFIX:]
    cells = torch.randint(0, 256, (NODES, PREFIX + NODES), dtype=torch.uint8, generator=g)
    cells[:, PREFIX:] = visible
    options = {"nodes": NODES, "scale": SCALE}
    if form == "mask":
        options |= {
            "mask": cells.flatten().view(torch.bool).to(device),
            "mask_indptr": torch.tensor([0, cells.numel()]).to(device),
        }
    else:
        options["tree_bits"] = pack_bits(visible[None]).to(device)
    tensors = (data["q"].to(dtype), data["k"].to(dtype), pool, torch.tensor([0, PREFIX], dtype=torch.int32), slots)
    return Case(tuple(t.to(device) for t in tensors), options, (PREFIX,), visible[None]), data


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("form", ["mask", "bits"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_float32_implementations_meet_the_stored_reference(name, form):
    case, data = live_case(form=form)
    out, _ = case.run(IMPLEMENTATIONS[name])
    assert relative(out, data["ref"]) <= 1e-5
    torch.testing.assert_close(out, data["ref"], rtol=0, atol=1e-5)


def test_the_float64_reference_meets_the_stored_one():
    case, data = live_case()
    assert relative(case.run(tree_attention_reference)[0], data["ref"]) <= 1e-6


def test_the_servers_output_is_within_bfloat16_of_the_reference():
    case, data = live_case()
    assert relative(data["o"], data["ref"]) <= 4e-3
    assert relative(data["o"], case.run(tree_attention_reference)[0]) <= 4e-3


def test_bfloat16_split_kv_is_no_worse_than_the_server():
    case, data = live_case(torch.bfloat16)
    out, _ = case.run(IMPLEMENTATIONS["split_kv"])
    assert relative(out, data["ref"]) <= 2.0e-3


def test_the_values_are_the_first_columns_of_the_keys():
    _, data = live_case()
    assert torch.equal(data["k"][..., :512], data["v"])
