"""Faults seen in the field, as calls; F numbers as in the issue. The table of cases is shared with the CUDA tests."""

from __future__ import annotations

import pytest
import torch
from cases import SCALE, TABLE, Case, assert_matches, build, pack_bits
from implementations import IMPLEMENTATIONS

PAIR = ["reference", "split_kv"]
BOTH = pytest.mark.parametrize("name", PAIR)


@pytest.fixture(scope="module")
def exact_of():
    known: dict[str, tuple[Case, tuple[torch.Tensor, torch.Tensor]]] = {}

    def get(key):
        if key not in known:
            known.clear()  # cases follow one another: one is enough, and some are large
            case = build(**TABLE[key])
            known[key] = case, case.exact()
        return known[key]

    return get


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("key", TABLE)
def test_table(key, name, exact_of):
    case, exact = exact_of(key)
    assert_matches(case, case.run(IMPLEMENTATIONS[name]), exact=exact)


@pytest.mark.parametrize("key", ["F3-mask-of-exact-size", "F11-empty-beside-4096", "F22-65-nodes-bits", "chain"])
def test_table_in_bfloat16(key):
    case = build(**TABLE[key], dtype=torch.bfloat16)
    assert_matches(case, case.run(IMPLEMENTATIONS["split_kv"]))


@BOTH
def test_f3_guard_cells_are_neither_read_nor_written(name):
    case = build((3, 0, 11, 64, 30), 5)
    mask = case.options["mask"]
    guards = mask.view(torch.uint8).as_strided((mask.numel() + 128,), (1,), 0)
    assert mask.storage_offset() == 64
    before = case.run(IMPLEMENTATIONS[name])
    kept = guards.clone()
    guards[:64] = ~guards[:64]
    guards[-64:] = ~guards[-64:]
    again = case.run(IMPLEMENTATIONS[name])
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    assert torch.equal(guards[64:-64], kept[64:-64])


def sparse(path, elements):
    """A bfloat16 tensor of 4 GB of which only the pages that are written exist."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.bfloat16)


@BOTH
def test_f9_q_beyond_two_to_the_31_elements(name, tmp_path):
    case = build((17,), 4, 8, dtype=torch.bfloat16, pad=0)
    first, stride = 131_073, 16_384
    buffer = sparse(tmp_path / "q", (first + 4) * stride)
    q = buffer.as_strided((4, 8, 576), (stride, 576, 1), first * stride)
    q.copy_(case.tensors[0])
    far = Case((q, *case.tensors[1:]), case.options, case.prefixes, case.visible)
    assert_matches(far, far.run(IMPLEMENTATIONS[name]), exact=case.exact())


@BOTH
def test_f10_slots_beyond_two_to_the_31_elements(name, tmp_path):
    case = build((17,), 4, 2, dtype=torch.bfloat16, pad=0)
    q, draft, pool, indptr, indices = case.tensors
    first = 3_728_271
    buffer = sparse(tmp_path / "pool", (first + len(pool)) * 576).view(-1, 576)
    buffer[first:] = pool
    far = Case((q, draft, buffer, indptr, indices[:17] + first), case.options, case.prefixes, case.visible)
    assert_matches(far, far.run(IMPLEMENTATIONS[name]), exact=case.exact())


@BOTH
def test_f11_prefilled_output_is_overwritten(name):
    case = build((0, 40), 3)
    out, lse = torch.full((6, 2, 512), torch.nan), torch.full((6, 2), torch.nan)
    result = case.run(IMPLEMENTATIONS["api" if name == "split_kv" else "api-reference"], out=out, lse=lse)
    assert_matches(case, result)


@BOTH
@pytest.mark.parametrize("prefix", [15, 16, 17, 63, 64, 65, 1023, 1024, 1025])
def test_f12_poison_in_unnamed_rows_changes_no_bit(name, prefix):
    results = [
        build((prefix, 2), 3, 1, poison=poison).run(IMPLEMENTATIONS[name])
        for poison in (0.0, float("nan"), float("inf"), float("-inf"))
    ]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@BOTH
@pytest.mark.parametrize("form", ["mask", "bits"])
@pytest.mark.parametrize("prefixes", [(0, 5), (40, 5)])
def test_f13_poison_in_draft_rows_that_nobody_sees_changes_no_bit(name, form, prefixes):
    visible = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    visible[:, :, [3, 5]] = False  # dead nodes: not even they see themselves
    visible[0, 3] = False  # with P = 0 this one sees nothing at all
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        case = build(prefixes, 6, form=form, visible=visible)
        case.tensors[1][[3, 5, 9, 11]] = poison
        results.append(case.run(IMPLEMENTATIONS[name]))
        assert_matches(case, results[-1])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@BOTH
def test_f13_a_poisoned_padded_request_spoils_nobody_else(name):
    case = build((9, 1, 30), 4)
    clean = case.run(IMPLEMENTATIONS[name])
    case.tensors[0][4:8] = torch.nan
    case.tensors[1][4:8] = torch.inf
    case.tensors[2][case.tensors[4][9]] = torch.nan
    dirty = case.run(IMPLEMENTATIONS[name])
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:4], b[:4])
        assert torch.equal(a[8:], b[8:])


def only(case: Case, path: list[int]) -> Case:
    """The call for a chain of some nodes of a one-request case."""
    q, draft, *rest = case.tensors
    options = {"nodes": len(path), "scale": SCALE}
    chain = torch.ones(1, len(path), len(path), dtype=torch.bool).tril()
    return Case((q[path], draft[path], *rest), options, case.prefixes, chain)


@BOTH
@pytest.mark.parametrize("form", ["mask", "bits"])
def test_f15_each_node_equals_running_it_alone_with_its_ancestors(name, form):
    case = build((21,), 9, form=form, seed=2)
    out, lse = case.run(IMPLEMENTATIONS[name])
    for node in range(9):
        path = case.visible[0, node].nonzero().flatten().tolist()
        alone_out, alone_lse = only(case, path).run(IMPLEMENTATIONS[name])
        torch.testing.assert_close(out[node], alone_out[-1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[node], alone_lse[-1], rtol=1e-5, atol=1e-5)


@BOTH
def test_f15_a_chain_differs_from_all_visible(name):
    chain = build((21,), 9, form="chain")
    everything = build((21,), 9, visible=torch.ones(1, 9, 9, dtype=torch.bool))
    a, b = (case.run(IMPLEMENTATIONS[name])[0] for case in (chain, everything))
    assert bool(((a - b).flatten(1).norm(dim=-1) / a.flatten(1).norm(dim=-1) > 1e-3)[:-1].all())
    torch.testing.assert_close(a[-1], b[-1])


@BOTH
@pytest.mark.parametrize("form", ["mask", "bits", "ubits"])
@pytest.mark.parametrize("nodes", [9, 33, 64, 65, 130])
def test_f16_the_output_spells_the_mask_back(name, form, nodes):
    visible = (torch.rand(2, nodes, nodes, generator=torch.Generator().manual_seed(1)) < 0.3).contiguous()
    case = build((0, 0), nodes, 1, form=form, visible=visible)
    case.tensors[0].zero_()
    case.tensors[1].copy_(torch.eye(nodes, 576).repeat(2, 1))
    out, _ = case.run(IMPLEMENTATIONS[name])
    assert torch.equal(out[:, 0, :nodes].view(2, nodes, nodes) > 0, visible)
    counts = visible.sum(-1).clamp(min=1)
    torch.testing.assert_close(out[:, 0, :nodes].view(2, nodes, nodes), visible / counts[..., None])


@BOTH
@pytest.mark.parametrize("changed", [1, 2])
def test_f17_a_sibling_is_never_seen(name, changed):
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    case = build((5,), 3, visible=visible)
    before = case.run(IMPLEMENTATIONS[name])[0].clone()
    case.tensors[1][changed] += 1.0
    after = case.run(IMPLEMENTATIONS[name])[0]
    assert torch.equal(before[3 - changed], after[3 - changed])
    assert not torch.equal(before[changed], after[changed])


@BOTH
@pytest.mark.parametrize("split", [None, 48])
def test_f21_a_request_does_not_depend_on_its_batch(name, split):
    prefixes = (100, 3, 0, 400, 57, 48, 49, 1)
    case = build(prefixes, 9, 8, form="bits")
    out, lse = case.run(IMPLEMENTATIONS[name], fixed_split=split)
    q, draft, pool, indptr, indices = case.tensors
    for request in range(8):
        rows = slice(9 * request, 9 * request + 9)
        begin, end = int(indptr[request]), int(indptr[request + 1])
        tensors = (q[rows], draft[rows], pool, torch.tensor([0, end - begin]), indices[begin:end])
        options = {**case.options, "tree_bits": case.options["tree_bits"][request : request + 1]}
        alone = Case(tensors, options, (end - begin,), case.visible[request : request + 1])
        alone_out, alone_lse = alone.run(IMPLEMENTATIONS[name], fixed_split=split)
        assert torch.equal(out[rows], alone_out)
        assert torch.equal(lse[rows], alone_lse)


@BOTH
@pytest.mark.parametrize("nodes", [33, 65])
def test_f22_bits_rewritten_in_place_are_followed(name, nodes):
    first = build((20, 7), nodes, form="bits")
    second = build((20, 7), nodes, form="bits", visible=torch.eye(nodes, dtype=torch.bool).repeat(2, 1, 1))
    first.run(IMPLEMENTATIONS[name])
    first.options["tree_bits"].copy_(pack_bits(second.visible))
    assert_matches(first, first.run(IMPLEMENTATIONS[name]))
    moved = Case(first.tensors, second.options, first.prefixes, second.visible)
    assert torch.equal(first.run(IMPLEMENTATIONS[name])[0], moved.run(IMPLEMENTATIONS[name])[0])


@BOTH
def test_f23_draft_rows_count(name):
    case = build((0, 4), 3)
    forgotten = Case(
        (case.tensors[0], torch.zeros_like(case.tensors[1]), *case.tensors[2:]), *list(vars(case).values())[1:]
    )
    want = case.exact()[0]
    assert float((forgotten.run(IMPLEMENTATIONS[name])[0] - want).norm() / want.norm()) > 0.5
    assert_matches(case, case.run(IMPLEMENTATIONS[name]))


@BOTH
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_f25_prefix_columns_of_the_mask_are_never_read(name, mask_dtype):
    case = build((21, 5), 9, mask_dtype=mask_dtype)
    before = case.run(IMPLEMENTATIONS[name])
    cells, start = case.options["mask"].view(torch.uint8), 0
    for prefix in case.prefixes:
        rows = cells[start : start + 9 * (prefix + 9)].view(9, prefix + 9)
        rows[:, :prefix] = ~rows[:, :prefix]
        start += 9 * (prefix + 9)
    after = case.run(IMPLEMENTATIONS[name])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@BOTH
def test_f26_index_and_mask_types_do_not_matter(name):
    base = build((7, 40), 9).run(IMPLEMENTATIONS[name])
    for index_dtype in (torch.int32, torch.int64):
        for mask_dtype in (torch.bool, torch.uint8):
            case = build((7, 40), 9, index_dtype=index_dtype, indptr_dtype=index_dtype, mask_dtype=mask_dtype)
            case.options["mask_indptr"] = case.options["mask_indptr"].to(index_dtype)
            got = case.run(IMPLEMENTATIONS[name])
            assert all(torch.equal(a, b) for a, b in zip(base, got, strict=True))


@BOTH
def test_a_true_cell_of_a_uint8_mask_is_any_byte_but_zero(name):
    case = build((7, 40), 9, mask_dtype=torch.uint8)
    before = case.run(IMPLEMENTATIONS[name])
    cells = case.options["mask"]
    cells.copy_(torch.where(cells != 0, 255, 0))
    assert torch.equal(before[0], case.run(IMPLEMENTATIONS[name])[0])
