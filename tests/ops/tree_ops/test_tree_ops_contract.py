"""Bad calls are refused by name, by the API and by the binding, and nothing is written. Covers F26, F30."""

from __future__ import annotations

import re

import pytest
import torch
import tree_bad_calls

import treeverify
from treeverify.errors import ContractError
from treeverify.jit import compiler
from treeverify.jit.modules import TARGETS, module_named
from treeverify.ops.kv_compact.contract import PoolTable

OPERATORS = (
    "draft_topk", "draft_topk_combine", "draft_topk_shard", "draft_window", "feature_gather", "kv_compact",
    "tree_accept", "tree_accept_sampled", "tree_build", "tree_mask",
)  # fmt: skip


def named(calls):
    return [pytest.param(*call, id=f"{call[0]}-{call[1]}-{number}") for number, call in enumerate(calls)]


def tensors_of(arguments):
    """Every tensor that a call could write, by name."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, PoolTable):
            found |= {f"pool {i}": pool for i, pool in enumerate(value.buffers)}
        elif hasattr(value, "__dict__"):
            found |= {f"{name}.{field}": tensor for field, tensor in vars(value).items() if tensor is not None}
    return {name: tensor for name, tensor in found.items() if tensor.device.type == "cpu"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_good_call_passes(operator):
    getattr(treeverify, operator)(**tree_bad_calls.good_call(operator))


@pytest.mark.parametrize(
    ("operator", "name", "value", "message"), named(tree_bad_calls.CALLS + tree_bad_calls.PYTHON_ONLY)
)
def test_the_api_refuses_and_writes_nothing(operator, name, value, message):
    arguments = tree_bad_calls.change(tree_bad_calls.good_call(operator), name, value)
    before = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    with pytest.raises(ContractError, match=f"^{operator}: {message}"):
        getattr(treeverify, operator)(**arguments)
    for name, tensor in tensors_of(arguments).items():
        assert tensor.contiguous().view(torch.uint8).equal(before[name].contiguous().view(torch.uint8)), name


def flat(operator, arguments):
    """The binding's positional arguments."""
    out = arguments.get("out")
    outputs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(vars(out).values())
    given = dict(arguments)
    law = list(vars(given["law"]).values()) if "law" in given else []
    if operator == "kv_compact":
        table = given.pop("table")
        return [table.pointers, *given.values(), table.row_bytes, table.stride_bytes, table.unit]
    orders = {
        "tree_build": ("log_probs", "token_ids", "roots"),
        "tree_mask": ("parents", "prefix_lengths"),
        "tree_accept": ("tokens", "parents", "samples"),
        "feature_gather": ("features", "path", "lengths", "slots", "prefix_lengths"),
        "draft_window": ("request_rows", "lengths", "slot_table", "roots", "mask_token"),
        "draft_topk": ("logits", "workspace"),
        "draft_topk_shard": ("logits", "first_id", "workspace"),
        "draft_topk_combine": ("shards",),
    }
    if operator == "tree_accept_sampled":
        return [
            given["tokens"],
            given["parents"],
            given["logits"],
            *law,
            given["uniforms"],
            given["workspace"],
            *outputs,
        ]
    return [*(given[name] for name in orders[operator]), *outputs]


@pytest.fixture(scope="module")
def library():
    return compiler.load(module_named("tree_ops"), TARGETS["90a"])


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_binding_refuses_a_good_call_in_host_memory_for_its_device_only(library, operator):
    with pytest.raises(ValueError, match=rf"^{operator}: \w+: device: expected cuda, got cpu$"):
        library.function(operator)(*flat(operator, tree_bad_calls.good_call(operator)))


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "name", "value", "message"), named(tree_bad_calls.CALLS))
def test_the_binding_refuses_by_name_before_the_device_is_looked_at(library, operator, name, value, message):
    arguments = tree_bad_calls.change(tree_bad_calls.good_call(operator), name, value)
    with pytest.raises(ValueError, match=f"^{operator}: ") as caught:
        library.function(operator)(*flat(operator, arguments))
    text = str(caught.value)
    assert re.match(rf"{operator}: [\w. ]+: .*expected .*, got ", text), text
    assert "device" not in text


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["draft_topk", "draft_topk_shard", "tree_accept_sampled"])
def test_the_binding_refuses_a_workspace_that_is_one_element_short(library, operator):
    arguments = tree_bad_calls.good_call(operator)
    least = arguments["workspace"].numel()
    arguments["workspace"] = arguments["workspace"][:-1]
    with pytest.raises(ValueError, match=rf"^{operator}: workspace: .*expected >= {least}, got {least - 1}$"):
        library.function(operator)(*flat(operator, arguments))


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([], "buffers: expected a sequence of at least one tensor"),
        (torch.zeros(3, 4), "buffers: expected a sequence"),
        ([torch.zeros(3)], r"buffers\[0\]: rank: expected at least 2"),
        ([torch.zeros(3, 4), torch.zeros(3, 5)], r"buffers\[1\]: expected shape, dtype"),
        ([torch.zeros(3, 4), torch.zeros(3, 4).half()], r"buffers\[1\]: expected shape, dtype"),
        ([torch.zeros(4, 3).T], r"buffers\[0\]: strides: expected contiguous rows"),
        ([torch.zeros(3, 4)] * 2, r"buffers\[1\]: expected memory of its own"),
        ([torch.zeros(4).expand(3, 4)], r"buffers\[0\]: strides"),
    ],
)
def test_a_pool_table_refuses_bad_buffers(buffers, message):
    with pytest.raises(ContractError, match=f"^kv_compact: {message}"):
        PoolTable.of(buffers)


@pytest.mark.parametrize(
    ("buffer", "unit"),
    [
        (torch.zeros(4, 1, 576, dtype=torch.bfloat16), 16),
        (torch.zeros(4, 6), 8),
        (torch.zeros(4, 6)[:, 1:5], 4),
        (torch.zeros(4, 3, dtype=torch.bfloat16), 2),
        (torch.zeros(4, 3, dtype=torch.uint8), 1),
    ],
)
def test_the_unit_is_what_addresses_and_rows_allow(buffer, unit):
    assert PoolTable.of([buffer]).unit == unit
