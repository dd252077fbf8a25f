"""The binding refuses the same bad calls as the API, in host memory: no GPU, no driver, and no launch in sight."""

from __future__ import annotations

import re
from dataclasses import replace

import bad_calls
import pytest
import torch

from treeverify.jit import compiler
from treeverify.jit.modules import TARGETS, module_named

PYTHON_ONLY = ("not a tensor", "a list", " device", "nodes ", "scale missing", "scale None", "scale a", "fixed_split")
"""Parts of the names of calls that a C++ signature cannot express, or that only Python refuses."""
CALLS = {
    name: call
    for name, call in bad_calls.CALLS.items()
    if not any(part in name for part in PYTHON_ONLY) and not name.startswith(("F28", "unknown"))
}


@pytest.fixture(scope="module")
def library():
    return compiler.load(module_named("tree_attention.naive"), TARGETS["90a"])


@pytest.fixture(scope="module")
def run(library):
    function = library.function("run")

    def call(arguments, **more):
        given = {**arguments, **more}
        tokens, heads = given["q"].shape[:2]
        out = given.get("out", torch.empty(tokens, heads, 512, dtype=torch.bfloat16))
        lse = given.get("lse", torch.empty(tokens, heads))
        optional = [given.get(name) for name in ("mask", "mask_indptr", "tree_bits")]
        names = ("q", "draft_kv", "kv_pool", "kv_indptr", "kv_indices")
        numbers = (given["nodes"], given["scale"], given.get("fixed_split", 0), given.get("max_prefix", 40))
        function(*(given[name] for name in names), *optional, out, lse, given.get("workspace"), *numbers)

    return call


def good(**more):
    return bad_calls.good_case(dtype=torch.bfloat16, **more)


def refusal(run, arguments, **more) -> str:
    with pytest.raises(ValueError, match=r"^tree_attention: ") as caught:
        run(arguments, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls_are_refused_by_name_before_the_device_is_looked_at(run, name):
    change, message = CALLS[name]
    case = good()
    text = refusal(run, bad_calls.arguments(case, change))
    argument = re.split(r"[:\\ ,]", message)[0]
    assert re.match(rf"tree_attention: {argument}\b.*: expected .*, got ", text), text
    assert "device" not in text


@pytest.mark.parametrize("form", ["mask", "bits", "ubits", "chain"])
@pytest.mark.parametrize("rank3", [False, True])
def test_a_good_call_in_host_memory_is_refused_for_its_device_only(run, form, rank3):
    case = good(form=form, rank3=rank3)
    text = refusal(run, bad_calls.arguments(case, lambda c: {}))
    assert text == "tree_attention: q: device: expected cuda, got cpu"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"nodes": 0}, r"nodes: expected 1\.\.260, got 0"),
        ({"nodes": 261}, r"nodes: expected 1\.\.260, got 261"),
        ({"scale": float("inf")}, "scale: expected a finite float > 0, got inf"),
        ({"fixed_split": -1}, "fixed_split: expected 0"),
        ({"max_prefix": -1}, "max_prefix: expected 0"),
        ({"q": torch.empty(10, 129, 576, dtype=torch.bfloat16)}, r"q: dimension 1 .*: expected 1\.\.128, got 129"),
        ({"q": torch.empty(10, 2, 576)}, "q: dtype: expected bfloat16, got float32"),
        ({"draft_kv": torch.empty(10, 576, dtype=torch.float8_e4m3fn)}, "draft_kv: .*fp8 KV is not supported yet"),
        ({"draft_kv": torch.empty(9, 576, dtype=torch.bfloat16)}, r"draft_kv: dimension 0 .*: expected 10"),
        ({"workspace": torch.empty(17, dtype=torch.uint8)[1:]}, "workspace: address: expected a multiple of 16 bytes"),
    ],
)  # fmt: skip
def test_limits(run, more, message):
    case = good()
    assert re.search(message, refusal(run, bad_calls.arguments(case, lambda c: {}), **more))


@pytest.mark.parametrize("name", ["q", "draft_kv", "kv_pool"])
def test_alignment_of_strides_and_addresses(run, name):
    case = good(pad=4)
    arguments = bad_calls.arguments(good(), lambda c: {})
    tensor = bad_calls.t(case, name)
    text = refusal(run, arguments, **{name: tensor})
    dimension = 1 if name == "q" else 0
    assert f"{name}: stride of dimension {dimension}: expected >= 576 elements and a multiple of 16 bytes" in text
    aligned = bad_calls.t(good(), name)
    shifted = torch.empty(aligned.numel() + 1, dtype=torch.bfloat16)[1:].view(aligned.shape)
    assert f"{name}: address: expected a multiple of 16 bytes, got 0x" in refusal(run, arguments, **{name: shifted})


def test_every_tensor_is_named_in_turn_when_its_rank_is_wrong(run):
    case = replace(good(), options={**good().options})
    arguments = bad_calls.arguments(case, lambda c: {})
    arguments |= {"out": torch.empty(10, 2, 512, dtype=torch.bfloat16), "lse": torch.empty(10, 2)}
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and name != "q":
            wrong = tensor.reshape(1, 1, 1, *tensor.shape)
            assert refusal(run, arguments, **{name: wrong}).startswith(f"tree_attention: {name}: rank: expected "), name


def test_the_naive_kernel_states_its_limits(library):
    limit = library.function("shared_bytes")()
    assert limit <= TARGETS["90a"].shared_limit
    assert library.function("prefix_limit")(9) == limit // 4 - 9
    assert library.function("workspace_bytes")(64, 65, 16, 132, 0, 262_144) == 0
