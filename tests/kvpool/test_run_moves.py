"""Moves in real tensors, every layer, bit for bit. Covers F5 and F19 of the field faults."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_move_plan import commits

from treeverify.errors import ContractError
from treeverify.kvpool.execute import run_moves
from treeverify.kvpool.plan import MovePlan, plan_batch_moves, plan_moves

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn]


def noise(shape, dtype, seed=0):
    """Random bits: NaN with payloads, infinities and subnormals included."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8))
    return raw.view(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def moved(before, path, slots):
    """The definition: a plain index_select of the accepted rows, written to the front."""
    after = bits(before).clone()
    after[..., slots[: len(path)], :] = bits(before).index_select(-2, torch.tensor(slots[path]))
    return after


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accepted_path_of_33_nodes_equals_index_select_in_every_layer(dtype):
    path = np.array([0, 3, 9, 17], np.int32)
    slots = np.random.default_rng(1).permutation(np.arange(1, 101))[:33]
    layers = [noise((101, 576), dtype, seed) for seed in range(5)]
    expected = [moved(layer, path, slots) for layer in layers]
    run_moves(plan_moves(path, slots), layers)
    for layer, want in zip(layers, expected, strict=True):
        assert torch.equal(bits(layer), want)


@settings(max_examples=60)
@given(commits())
def test_a_batch_moves_as_each_request_alone_and_touches_nothing_else(commit):
    paths, slots = commit
    stacked, single = noise((3, 200, 4), torch.bfloat16), noise((200, 6), torch.float32)
    want_stacked, want_single = stacked.clone(), single.clone()
    for path, own in zip(paths, slots, strict=True):
        want_stacked = moved(want_stacked, path, own).view(torch.bfloat16)
        want_single = moved(want_single, path, own).view(torch.float32)
    run_moves(plan_batch_moves(paths, slots), [stacked, single])
    assert torch.equal(bits(stacked), bits(want_stacked))
    assert torch.equal(bits(single), bits(want_single))


@pytest.mark.parametrize("path", [[0, 2, 3, 5], [0, *range(2, 33)], [0, 32]])
def test_overlapping_moves_are_identical_each_of_100_times(path):
    # [1, 2, 4] onto [0, 1, 2] behind a root, the shift of a whole chain, and the last row alone.
    path = np.array(path, np.int32)
    slots = np.arange(1, 34)
    before = noise((40, 64), torch.float32)
    expected = moved(before, path, slots)
    for _ in range(100):
        buffer = before.clone()
        run_moves(plan_moves(path, slots), [buffer])
        assert torch.equal(bits(buffer), expected)


def test_rows_1_2_4_onto_0_1_2_of_a_pool():
    plan = MovePlan(np.array([11, 12, 14]), np.array([10, 11, 12]))
    buffer = torch.arange(20.0).reshape(20, 1)
    run_moves(plan, [buffer])
    assert buffer[10:15, 0].tolist() == [11, 12, 14, 13, 14]


def test_strided_buffers_are_moved_in_place_and_their_neighbours_are_left_alone():
    whole = noise((30, 4, 8), torch.bfloat16)
    before = whole.clone()
    path, slots = np.array([0, 2, 4]), np.array([3, 9, 6, 20, 12])
    run_moves(plan_moves(path, slots), [whole[:, 1, ::2], whole.transpose(0, 1)[2:]])
    expected = before.clone()
    expected[:, 1, ::2] = moved(before[:, 1, ::2], path, slots).view(torch.bfloat16)
    expected[:, 2:] = moved(before.transpose(0, 1)[2:], path, slots).view(torch.bfloat16).transpose(0, 1)
    assert torch.equal(bits(whole), bits(expected))


def test_parameters_that_require_gradients_are_moved_too():
    buffer = torch.arange(8.0).reshape(4, 2).requires_grad_()
    run_moves(plan_moves(np.array([0, 2]), np.array([1, 2, 3])), [buffer])
    assert buffer.detach()[2].tolist() == [6, 7]


def test_no_moves_and_no_buffers_are_fine():
    buffer = torch.ones(2, 2)
    run_moves(plan_moves(np.array([0, 1]), np.array([7, 8])), [buffer])
    run_moves(plan_moves(np.array([0, 2]), np.array([7, 8, 9])), [])
    assert torch.equal(buffer, torch.ones(2, 2))


good = torch.zeros(10, 2)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (torch.zeros(2, 10, 2), r"buffers: expected a sequence of tensors, got one tensor"),
        ([good, torch.zeros(9, 2)], r"buffers\[1\]: slots: expected > 9, got 9"),
        ([good, torch.zeros(10, 1, 2)], r"buffers\[1\]: slots: expected > 9, got 1"),
        ([good, torch.zeros(10)], r"buffers\[1\]: rank: expected 2"),
        ([good, torch.zeros(1, 1, 10, 2)], r"buffers\[1\]: rank: expected 2"),
        ([good, torch.zeros(10, 2, dtype=torch.complex128)], r"buffers\[1\]: dtype: expected 1, 2, 4 or 8 bytes"),
        ([good, good.view(10, 2)], r"buffers\[1\]: expected memory of its own, got the memory of buffers\[0\]"),
        ([good, np.zeros((10, 2))], r"buffers\[1\]: expected a tensor, got ndarray"),
    ],
)
def test_bad_buffers_are_refused_before_the_first_row_moves(buffers, message):
    good.copy_(torch.arange(20.0).reshape(10, 2))
    with pytest.raises(ContractError, match=message):
        run_moves(plan_moves(np.array([0, 2]), np.array([7, 8, 9])), buffers)
    assert torch.equal(good, torch.arange(20.0).reshape(10, 2))
