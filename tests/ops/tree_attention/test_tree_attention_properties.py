"""Random ragged batches, trees, cuts and types: split-KV equals the reference."""

from __future__ import annotations

from unittest import mock

import torch
from cases import assert_matches, build
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS

CALL = st.fixed_dictionaries(
    {
        "prefixes": st.lists(st.integers(0, 90), min_size=1, max_size=5),
        "nodes": st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 63, 64, 65, 70])),
        "heads": st.integers(1, 4),
        "form": st.sampled_from(["mask", "bits", "ubits", "chain"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "index_dtype": st.sampled_from([torch.int32, torch.int64]),
        "mask_dtype": st.sampled_from([torch.bool, torch.uint8]),
        "pad": st.integers(0, 17),
        "rank3": st.booleans(),
        "seed": st.integers(0, 2**20),
    }
)


@settings(max_examples=120)
@given(call=CALL, fixed_split=st.none() | st.integers(1, 100), tile=st.integers(1, 64), sparse=st.booleans())
def test_split_kv_equals_the_reference(call, fixed_split, tile, sparse):
    if sparse:  # not a tree: rows and columns that are empty included
        g = torch.Generator().manual_seed(call["seed"])
        shape = (len(call["prefixes"]), call["nodes"], call["nodes"])
        call = call | {"visible": torch.rand(shape, generator=g) < 0.2}
    case = build(**call)
    with mock.patch("treeverify.ops.tree_attention.split_kv.TILE_ROWS", tile):
        assert_matches(case, case.run(IMPLEMENTATIONS["split_kv"], fixed_split=fixed_split))
