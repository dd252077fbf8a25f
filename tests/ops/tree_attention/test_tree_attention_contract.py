"""One table of bad calls, fed to every implementation: each refuses, and says where and why."""

from __future__ import annotations

import pytest
import torch
from bad_calls import CALLS, VALUE_CALLS, arguments, good_case
from implementations import IMPLEMENTATIONS

from treeverify.errors import ContractError
from treeverify.ops.tree_attention.api import choose
from treeverify.ops.tree_attention.contract import CUDA_LIMITS, check, refuse_options

ALL = CALLS | VALUE_CALLS


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", ALL)
def test_bad_calls_are_refused(bad, name):
    change, message = ALL[bad]
    with pytest.raises(ContractError, match=message) as error:
        IMPLEMENTATIONS[name](**arguments(good_case(), change))
    assert str(error.value).startswith("tree_attention: ")
    assert ", got " in str(error.value)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_good_call_is_good(name):
    IMPLEMENTATIONS[name](**arguments(good_case(), lambda case: {}))


@pytest.mark.parametrize("bad", ALL)
def test_a_refused_call_writes_nothing(bad):
    change, _ = ALL[bad]
    case = good_case()
    out, lse = torch.full((10, 2, 512), -7.0), torch.full((10, 2), -7.0)
    with pytest.raises(ContractError):
        IMPLEMENTATIONS["api"](**{"out": out, "lse": lse, **arguments(case, change)})
    assert bool((out == -7.0).all())
    assert bool((lse == -7.0).all())


@pytest.mark.parametrize("options", [{"logit_cap": 0.0}, {"sinks": None}, {"sliding_window": -1}, {"k_scale": 1.0}])
def test_f28_options_that_are_off_pass(options):
    refuse_options(options)
    case = good_case()
    assert torch.equal(case.run(IMPLEMENTATIONS["api"], **options)[0], case.run(IMPLEMENTATIONS["api"])[0])


@pytest.mark.parametrize("name", ["portable", "naive", "fastest", ""])
def test_an_implementation_that_the_device_lacks_lists_the_candidates(name):
    with pytest.raises(ContractError, match=r"implementation: expected one of split_kv, reference on cpu, got"):
        good_case().run(IMPLEMENTATIONS["api"], implementation=name)


def test_choice_is_by_device_and_never_falls_back():
    assert choose(torch.device("cpu"), None) == "split_kv"
    assert choose(torch.device("cuda"), None) == "portable"
    assert choose(torch.device("cuda"), "naive") == "naive"
    with pytest.raises(ContractError, match="one of portable, portable-99k, naive, split_kv, reference on cuda"):
        choose(torch.device("cuda"), "flashmla")
    with pytest.raises(ContractError, match="q: device: expected cpu or cuda, got meta"):
        choose(torch.device("meta"), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 261}, r"nodes: expected an int in 1\.\.260, got 261"),
        ({"heads": 129}, r"q: dimension 1 \(heads\): expected 1\.\.128, got 129"),
        ({"dtype": torch.float32}, "q: dtype: expected torch.bfloat16, got torch.float32"),
        ({"pad": 4}, "stride of dimension 0: expected >= 576 elements and a multiple of 16 bytes"),
    ],
)
def test_the_kernels_refuse_what_only_torch_supports(change, message):
    arguments = {"prefixes": (3,), "nodes": 5, "heads": 1, "dtype": torch.bfloat16, **change}
    case = build_case(**arguments)
    with pytest.raises(ContractError, match=message):
        case.run(check, limits=CUDA_LIMITS)


@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "message"),
    [
        (2048, 16, 128, None),  # 4,194,304 rows
        (2049, 16, 128, r"q: batch \* nodes \* heads: expected <= 4194304, got 4196352"),
        (126, 260, 128, None),
        (127, 260, 128, r"q: batch \* nodes \* heads: expected <= 4194304, got 4226560"),
        (64_527, 1, 1, None),
        (64_528, 1, 1, "q: batch: expected <= 64527, got 64528"),
    ],
)
def test_the_kernels_refuse_more_rows_than_they_can_count(batch, nodes, heads, message):
    """On a device without memory, so that nothing of this size is held."""
    tokens = batch * nodes
    q, draft = (torch.empty(tokens, *shape, dtype=torch.bfloat16, device="meta") for shape in ((heads, 576), (576,)))
    indptr, indices = (torch.empty(size, dtype=torch.int64, device="meta") for size in (batch + 1, 1))
    arguments = (q, draft, draft[:1], indptr, indices)
    assert check(*arguments, nodes=nodes, scale=0.1).tokens == tokens  # torch has no such limit
    if message is None:
        check(*arguments, limits=CUDA_LIMITS, nodes=nodes, scale=0.1)
    else:
        with pytest.raises(ContractError, match=message):
            check(*arguments, limits=CUDA_LIMITS, nodes=nodes, scale=0.1)


def test_the_kernels_refuse_unaligned_addresses():
    case = build_case(prefixes=(3,), nodes=5, heads=1, dtype=torch.bfloat16)
    q, draft, pool, *rest = case.tensors
    shifted = torch.zeros(pool.shape[0] * 584 + 8, dtype=pool.dtype)[1:].as_strided(pool.shape, (584, 1))
    assert shifted.data_ptr() % 16
    with pytest.raises(ContractError, match="kv_pool: address: expected a multiple of 16 bytes"):
        check(q, draft, shifted, *rest, limits=CUDA_LIMITS, **case.options)
    check(q, draft, pool, *rest, limits=CUDA_LIMITS, **case.options)


def build_case(**arguments):
    from cases import build

    return build(**arguments)


def test_check_reads_no_values_off_the_host():
    """On a device without memory any read of a value would raise, so passing means that none was read."""
    case = good_case(dtype=torch.bfloat16)
    options = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    problem = check(*(t.to("meta") for t in case.tensors), **options)
    assert (problem.batch, problem.nodes, problem.heads, problem.slots) == (2, 5, 2, 48)
    assert (problem.tokens, problem.words) == (10, 1)
