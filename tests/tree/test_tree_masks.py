"""Visibility and bit packing against their definitions. Covers F17 and F22 of the field faults."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from test_tree_topology import make, trees

from treeverify.errors import ContractError
from treeverify.tree.build import chain_tree
from treeverify.tree.packing import pack_rows, unpack_rows
from treeverify.tree.visibility import visibility

WIDTHS = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]


@settings(max_examples=100)
@given(trees())
def test_a_node_sees_itself_and_its_ancestors_only(tree):
    mask = visibility(tree)
    assert mask.dtype == np.bool_
    for node in range(tree.width):
        line, at = set(), node
        while at != -1:
            line.add(at)
            at = int(tree.parents[at])
        assert set(np.flatnonzero(mask[node])) == line


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chain_sees_the_lower_triangle(width):
    assert (visibility(chain_tree(0, range(width - 1))) == np.tri(width, dtype=bool)).all()


def test_siblings_never_see_each_other():
    mask = visibility(make([0, 1, 2], [-1, 0, 0]))
    assert not mask[2, 1]
    assert not mask[1, 2]


@settings(max_examples=100)
@given(hnp.arrays(np.bool_, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=140)))
def test_bit_j_of_word_i_is_column_64_i_plus_j(rows):
    width = rows.shape[-1]
    words = pack_rows(rows)
    assert words.dtype == np.uint64
    assert words.shape == (*rows.shape[:-1], (width + 63) // 64)
    for column in range(words.shape[-1] * 64):
        bit = (words[..., column // 64] >> np.uint64(column % 64)) & np.uint64(1)
        expected = rows[..., column] if column < width else np.zeros(rows.shape[:-1], bool)
        assert (bit == expected).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_is_undone_for_a_batch_of_two_trees(width):
    rng = np.random.default_rng(width)
    rows = rng.random((2, width, width)) < 0.4
    words = pack_rows(rows)
    for same_bits in (words, words.view(np.int64), words[:, ::1, :].copy(order="F")):
        assert (unpack_rows(same_bits, width) == rows).all()


def test_strided_rows_pack_as_their_copy():
    wide = np.random.default_rng(1).random((70, 3, 130)) < 0.5
    view = wide[::2, :, ::-2].swapaxes(0, 1)
    assert (pack_rows(view) == pack_rows(view.copy())).all()
    words = pack_rows(wide)
    assert (unpack_rows(words[::-1, 1:], 130) == wide[::-1, 1:]).all()


@pytest.mark.parametrize("rows", [np.zeros((2, 2), np.uint8), np.zeros((2, 2)), np.array(True), [[True]]])
def test_only_bool_rows_are_packed(rows):
    with pytest.raises(ContractError, match="pack_rows: rows"):
        pack_rows(rows)


@pytest.mark.parametrize(
    ("words", "width", "message"),
    [
        (np.zeros((2, 1), np.uint64), 65, r"words: shape: expected \[..., 2\], got \[2, 1\]"),
        (np.zeros((2, 2), np.uint64), 64, r"words: shape: expected \[..., 1\]"),
        (np.zeros(2, np.uint32), 64, "dtype: expected uint64 or int64, got uint32"),
        (np.array(3, np.uint64), 64, "words: shape"),
        (np.array([1 << 33], np.uint64), 33, "no bit past width 33, got bit 33 set"),
        (np.zeros(1, np.uint64), -1, "width: expected >= 0"),
    ],
)
def test_words_that_do_not_fit_are_refused(words, width, message):
    with pytest.raises(ContractError, match=message):
        unpack_rows(words, width)
