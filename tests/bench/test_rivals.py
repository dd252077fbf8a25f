from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from treeverify.bench import rivals
from treeverify.bench.rivals import MOST_CALL_US, Implementation, Missing, TooSlowError, ours
from treeverify.bench.rivals.base import request_slots, slot_table, starts
from treeverify.bench.rivals.fa3 import expand_table
from treeverify.bench.workloads import LATENT, Point, make_pool, make_workload, pool_slots
from treeverify.errors import ConfigError
from treeverify.ops.tree_attention.reference import tree_attention_reference

HIDDEN = {
    "triton-extend": "sglang",
    "flashmla-causal": "flash_mla",
    "fa3-cascade": "sgl_kernel",
    "fa3-causal": "sgl_kernel",
    "fa2-mla": "flashinfer_batch_mla",
}


@pytest.mark.parametrize("name", sorted(HIDDEN))
def test_a_rival_that_is_not_installed_is_missing_with_the_import_error(monkeypatch, name):
    for module in [module for module in sys.modules if module.split(".")[0] == HIDDEN[name]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    found = rivals.load(name)
    assert isinstance(found, Missing)
    assert found.name == name
    assert HIDDEN[name] in found.reason
    assert "Error" in found.reason


def test_an_error_inside_a_rivals_import_is_the_reason(monkeypatch, tmp_path):
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    assert rivals.load("flashmla-causal") == Missing("flashmla-causal", "OSError: libcudart.so.13: cannot open")


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="fa3-cascade"):
        rivals.load("fa9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["treeverify-portable", "treeverify-portable-99k", "treeverify-naive"])
def test_our_kernels_are_missing_without_a_gpu(name):
    found = rivals.load(name)
    assert isinstance(found, Missing)
    assert "CUDA device" in found.reason


def test_the_naive_kernel_refuses_what_would_take_too_long():
    assert ours.naive_us(Point(1, 9, 8, 1024)) == pytest.approx(72 * 1033 * 2176 / 2e6)
    assert ours.naive_us(Point(1, 9, 128, 16384)) < MOST_CALL_US
    point = Point(16, 17, 128, 16384)
    work = make_workload(point._replace(heads=1, prefix=1), make_pool(2048, torch.device("cpu")), "scatter", sets=1)
    work.point = point
    with pytest.raises(TooSlowError, match="estimated 621 ms per call, the limit is 60 ms"):
        ours._prepare("naive", False, work)


def small_work(indices="scatter"):
    point = Point(2, 4, 2, 20)
    return make_workload(point, make_pool(pool_slots([point], 2), torch.device("cpu")), indices, sets=2)


def test_slot_tables_cover_prefix_and_draft():
    work = small_work()
    kv = work.sets[1]
    rows = request_slots(work, 1, with_draft=True)
    assert [row.numel() for row in rows] == [24, 24]
    assert torch.equal(rows[1], torch.cat([kv.prefix_slots[20:], kv.draft_slots[4:]]))
    ragged = slot_table([rows[0][:3], rows[1][:5]])
    assert ragged.dtype == torch.int32
    assert ragged[0].tolist() == [*rows[0][:3].tolist(), 0, 0]
    assert starts(torch.tensor([3, 5], dtype=torch.int32)).tolist() == [0, 3, 8]


def test_the_cascade_gives_the_reference_when_its_kernels_are_replaced_by_torch(monkeypatch):
    """The two passes, tables and merge are the adapter's own work; attention itself is a stand-in here."""
    work = small_work()
    kernel, glue = ModuleType("sgl_kernel.flash_attn"), ModuleType("sglang.kernels.ops.attention.merge_state")
    kernel.flash_attn_with_kvcache, glue.merge_state_triton = torch_paged_attention, torch_merge
    for module in (kernel, glue):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exact, _ = reference(work, 1, mask=work.mask, mask_indptr=work.mask_indptr)
    found = rivals.load("fa3-cascade")
    assert isinstance(found, Implementation)
    assert torch.allclose(found.prepare(work)[1]().double(), exact, atol=1e-5)
    chain, _ = reference(work, 1)
    found = rivals.load("fa3-causal")
    assert torch.allclose(found.prepare(work)[1]().double(), chain, atol=1e-5)


def reference(work, number, **visibility):
    kv, point = work.sets[number], work.point
    options = {"nodes": point.nodes, "scale": 192**-0.5, **visibility}
    return tree_attention_reference(work.q, kv.draft_kv, work.pool, work.kv_indptr, kv.prefix_slots, **options)


def torch_paged_attention(
    q,
    qv,
    k_cache,
    v_cache,
    softmax_scale,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    causal,
    return_softmax_lse=False,
    **_,
):
    queries, rows = torch.cat([qv, q], dim=-1).double(), torch.cat([v_cache, k_cache], dim=-1)[:, 0, 0].double()
    out, lse = [], []
    for request, length in enumerate(cache_seqlens.tolist()):
        own = queries[cu_seqlens_q[request] : cu_seqlens_q[request + 1]]
        keys = rows[page_table[request, :length].long()]
        scores = torch.einsum("nhd,kd->hnk", own, keys) * softmax_scale
        if causal:
            hidden = torch.ones(own.shape[0], length, dtype=torch.bool).triu(length - own.shape[0] + 1)
            scores.masked_fill_(hidden, -torch.inf)
        lse.append(scores.logsumexp(-1))
        out.append(torch.einsum("hnk,kd->nhd", scores.softmax(-1), keys[:, :LATENT]))
    return (torch.cat(out), torch.cat(lse, dim=1)) if return_softmax_lse else torch.cat(out)


def torch_merge(prefix, prefix_lse, suffix, suffix_lse):
    weight = torch.sigmoid(prefix_lse - suffix_lse)[..., None]
    return prefix * weight + suffix * (1 - weight), None


def test_the_expand_table_lists_visible_slots_first():
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    table = expand_table(torch.tensor([70, 80, 90]), visible)
    assert table.dtype == torch.int32
    assert [row[:count] for row, count in zip(table.tolist(), [1, 2, 2], strict=True)] == [[70], [70, 80], [70, 90]]
