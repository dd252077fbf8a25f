"""Bugs planted in the kernels, one per operator and one build for all: the checks of that operator find each."""

from __future__ import annotations

import check_accept
import check_build
import check_commit
import check_mask
import check_topk
import check_window
import pytest
from emulated import Emulated, compile_library

pytestmark = pytest.mark.slow
OPS = "ops"
PLANTED = {
    "equal scores of two lanes go to the first": (
        f"{OPS}/tree_build/tree_build_kernel.cuh",
        "const uint32_t smallest = __reduce_min_sync(0xffffffffu, ranks);",
        "const uint32_t smallest = ranks;",
        check_build.all_equal,
    ),
    "a later child with the token is followed": (
        f"{OPS}/tree_accept/tree_accept_kernel.cuh",
        "child = min(child, other);",
        "child = other;",
        check_accept.greedy_walks,
    ),
    "all ties at a cut are kept": (
        f"{OPS}/tree_accept/draw.cuh",
        "(equal < room ? equal : room) * at_cut",
        "equal * at_cut",
        check_accept.the_draw_is_exact_where_all_weights_are_equal,
    ),
    "a block draws from its own share alone": (
        f"{OPS}/tree_accept/draw.cuh",
        "if (token < vocab) {",
        "if (token >= team.first && token < team.end) {",
        check_accept.vocabularies_as_large_as_they_come,
    ),
    "rows move from the last": (
        f"{OPS}/kv_compact/kv_compact_kernel.cuh",
        "for (int begin = 0; begin < end; begin += kMovesInFlight)",
        "for (int begin = (end - 1) / kMovesInFlight * kMovesInFlight; begin >= 0; begin -= kMovesInFlight)",
        check_commit.field_cases,
    ),
    "rows past the path are left unwritten": (
        f"{OPS}/feature_gather/feature_gather_kernel.cuh",
        "target[i] = accepted ? source[i] : Unit{};",
        "if (accepted) target[i] = source[i];",
        check_commit.gathers,
    ),
    "requests past the batch are taken for requests": (
        f"{OPS}/feature_gather/feature_gather_launch.cu",
        "int64_t{params.rows} * params.columns",
        "int64_t{params.batch} * params.columns",
        check_commit.requests_past_the_batch_are_padding,
    ),
    "the first of earlier prefixes is forgotten": (
        f"{OPS}/tree_mask/tree_mask_kernel.cuh",
        "for (int other = lane; other < request; other += 32) prefixes",
        "for (int other = lane + 1; other < request; other += 32) prefixes",
        check_mask.dtypes_and_batches,
    ),
    "the last column of the table is left out": (
        f"{OPS}/draft_window/draft_window_kernel.cuh",
        "length < p.columns - column;",
        "length < p.columns - column - 1;",
        check_window.index_dtypes_and_batches,
    ),
    "a tile's best are not compared with another's": (
        f"{OPS}/draft_topk/draft_topk_kernel.cuh",
        "for (int i = thread; i < entries; i += kRankThreads) {",
        "for (int i = thread; i < p.k; i += kRankThreads) {",
        check_topk.sizes,
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return Emulated(compile_library(tmp_path_factory.mktemp("broken"), [plant[:3] for plant in PLANTED.values()]))


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(broken, bug):
    with pytest.raises(AssertionError):
        PLANTED[bug][3](broken)
