"""Faults seen in the field, on the GPU: one function per row or kind, each given the implementation under test.

``CHECKS`` lists them by name for pytest and for the device check script; captured graphs are in ``gpu_graphs``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import SCALE, TABLE, Case, build, pack_bits, to_device
from gpu_kernel import Kernel, exact_on_device, same_bits

BF16 = torch.bfloat16


def make(kernel: Kernel, prefixes, nodes: int, heads: int = 2, **more: object) -> Case:
    return build(prefixes, nodes, heads, dtype=BF16, device=kernel.device, **more)


def f3_guards(kernel: Kernel) -> None:
    case = make(kernel, (3, 0, 11, 64, 30), 5)
    mask = case.options["mask"].view(torch.uint8)
    results = []
    for guard in (0, 1, 255):
        buffer = torch.full((mask.numel() + 256,), guard, dtype=torch.uint8, device=kernel.device)
        buffer[128:-128] = mask
        results.append(kernel.matches(case.with_options(mask=buffer[128:-128].view(torch.bool))))
        assert bool((buffer[:128] == guard).all())
        assert bool((buffer[-128:] == guard).all())
    for result in results[1:]:
        same_bits(results[0], result)


def f9_q_beyond_two_to_the_31(kernel: Kernel) -> None:
    batch, nodes, heads, stride = 14_566, 9, 1, 16_384  # the last token lies 2**31 elements behind the first
    case = make(kernel, (2,) * batch, nodes, heads, pad=0, form="chain")
    q, *rest = case.tensors
    buffer = torch.empty(len(q) * stride, dtype=BF16, device=kernel.device)
    far = buffer.as_strided((len(q), heads, 576), (stride, 576, 1))
    far.copy_(q)
    del q
    out, lse = Case((far, *rest), case.options, case.prefixes, case.visible).run(kernel)
    tail = one_request(case, batch - 1)
    exact = exact_on_device(tail)
    error = float((out[-nodes:].double() - exact[0]).norm() / exact[0].norm())
    assert error < 3e-3, f"relative error {error}"
    assert float((lse[-nodes:].double() - exact[1]).abs().max()) < 1e-2
    offset = build((17,), 4, heads, dtype=BF16, device=kernel.device, pad=0)
    view = buffer.as_strided((4, heads, 576), (stride, 576, 1), 131_073 * stride)
    view.copy_(offset.tensors[0])
    kernel.matches(Case((view, *offset.tensors[1:]), offset.options, offset.prefixes, offset.visible))


def f10_slots_beyond_two_to_the_31(kernel: Kernel) -> None:
    first = 3_728_271
    case = make(kernel, (700, 17), 9, 8, pad=0)
    q, draft, pool, indptr, indices = case.tensors
    far = torch.full((first + len(pool), 576), torch.nan, dtype=BF16, device=kernel.device)
    far[first:] = pool
    total = sum(case.prefixes)
    moved = Case((q, draft, far, indptr, indices[:total] + first), case.options, case.prefixes, case.visible)
    same_bits(kernel.matches(moved), case.run(kernel))


def f12_poison_in_unnamed_rows(kernel: Kernel) -> None:
    for prefixes in ((15, 2), (16, 0), (17, 1), (63, 65), (64, 129), (1000, 3)):
        results = [
            make(kernel, prefixes, 9, 8, poison=poison).run(kernel)
            for poison in (0.0, float("nan"), float("inf"), float("-inf"))
        ]
        for result in results[1:]:
            same_bits(results[0], result)


def f13_rows_that_nobody_sees(kernel: Kernel) -> None:
    visible = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    visible[:, :, [3, 5]] = False
    visible[0, 3] = False  # with P = 0 it sees nothing at all
    for form in ("mask", "bits", "ubits"):
        for prefixes in ((0, 5), (40, 5), (64, 1000)):
            results = []
            for poison in (0.0, float("nan"), float("inf")):
                case = make(kernel, prefixes, 6, form=form, visible=visible)
                case.tensors[1][[3, 5, 9, 11]] = poison
                results.append(kernel.matches(case))
            for result in results[1:]:
                same_bits(results[0], result)


def f13_a_poisoned_request_spoils_nobody_else(kernel: Kernel) -> None:
    case = make(kernel, (9, 1, 30), 4)
    clean = case.run(kernel)
    case.tensors[0][4:8] = torch.nan
    case.tensors[1][4:8] = torch.inf
    case.tensors[2][case.tensors[4][9]] = torch.nan
    dirty = case.run(kernel)
    for rows in (slice(0, 4), slice(8, 12)):
        same_bits((clean[0][rows], clean[1][rows]), (dirty[0][rows], dirty[1][rows]))


def f15_chain_differs_and_nodes_alone(kernel: Kernel) -> None:
    chain = make(kernel, (21,), 9, form="chain")
    everything = make(kernel, (21,), 9, visible=torch.ones(1, 9, 9, dtype=torch.bool))
    a, b = kernel.matches(chain)[0].float(), kernel.matches(everything)[0].float()
    assert bool(((a - b).flatten(1).norm(dim=-1) / a.flatten(1).norm(dim=-1) > 1e-3)[:-1].all())
    for form in ("mask", "bits"):
        case = make(kernel, (21,), 9, form=form, seed=2)
        out, lse = case.run(kernel)
        q, draft, *rest = case.tensors
        for node in range(9):
            path = case.visible[0, node].nonzero().flatten().tolist()
            triangle = torch.ones(1, len(path), len(path), dtype=torch.bool).tril()
            alone = Case((q[path], draft[path], *rest), {"nodes": len(path), "scale": SCALE}, (21,), triangle)
            alone_out, alone_lse = kernel.matches(alone)
            torch.testing.assert_close(out[node], alone_out[-1], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse[node], alone_lse[-1], rtol=1e-3, atol=4e-3)


def f16_the_output_spells_the_mask_back(kernel: Kernel) -> None:
    for nodes in (1, 9, 33, 64, 65, 130, 260):
        visible = torch.rand(2, nodes, nodes, generator=torch.Generator().manual_seed(1)) < 0.3
        for form in ("mask", "bits", "ubits"):
            case = make(kernel, (0, 0), nodes, 1, form=form, visible=visible)
            case.tensors[0].zero_()
            case.tensors[1].copy_(torch.eye(nodes, 576).repeat(2, 1))
            out, lse = case.run(kernel)
            spelled = out[:, 0, :nodes].view(2, nodes, nodes).float().cpu()
            assert torch.equal(spelled > 0, visible), (nodes, form)
            counts = visible.sum(-1)
            torch.testing.assert_close(spelled, visible / counts.clamp(min=1)[..., None], rtol=2**-7, atol=0)
            torch.testing.assert_close(lse.view(2, nodes).cpu(), counts.float().log(), rtol=1e-5, atol=1e-5)


def f17_a_sibling_is_never_seen(kernel: Kernel) -> None:
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    for changed in (1, 2):
        case = make(kernel, (5,), 3, visible=visible)
        before = kernel.matches(case)[0]
        case.tensors[1][changed] += 1.0
        after = kernel.matches(case)[0]
        assert torch.equal(before[3 - changed], after[3 - changed])
        assert not torch.equal(before[changed], after[changed])


def one_request(case: Case, request: int) -> Case:
    """The call for one request of a case (bits or chain)."""
    q, draft, pool, indptr, indices = case.tensors
    nodes = case.options["nodes"]
    rows = slice(nodes * request, nodes * (request + 1))
    begin, end = int(indptr[request]), int(indptr[request + 1])
    pointers = torch.tensor([0, end - begin], dtype=indptr.dtype, device=q.device)
    bits = case.options.get("tree_bits")
    options = dict(case.options) if bits is None else {**case.options, "tree_bits": bits[request : request + 1]}
    tensors = (q[rows], draft[rows], pool, pointers, indices[begin:end])
    return Case(tensors, options, (end - begin,), case.visible[request : request + 1])


def f21_fixed_split_does_not_depend_on_the_batch(kernel: Kernel) -> None:
    prefixes = (100, 3, 0, 4000, 570, 48, 49, 1)
    for nodes, heads in ((9, 8), (17, 16), (65, 16)):
        case = make(kernel, prefixes, nodes, heads, form="bits")
        for split in (64, 512):
            out, lse = kernel.matches(case, fixed_split=split)
            for request in range(8):
                rows = slice(nodes * request, nodes * (request + 1))
                same_bits((out[rows], lse[rows]), one_request(case, request).run(kernel, fixed_split=split))


def f22_bits_rewritten_in_place(kernel: Kernel) -> None:
    for nodes in (33, 65):
        case = make(kernel, (20, 7), nodes, form="bits")
        kernel.matches(case)
        eye = torch.eye(nodes, dtype=torch.bool).repeat(2, 1, 1)
        case.options["tree_bits"].copy_(pack_bits(eye))
        kernel.matches(Case(case.tensors, case.options, case.prefixes, eye))


def f23_draft_rows_count(kernel: Kernel) -> None:
    case = make(kernel, (0, 4), 3)
    exact = exact_on_device(case)[0]
    kernel.matches(case)
    q, draft, *rest = case.tensors
    forgotten = Case((q, torch.zeros_like(draft), *rest), case.options, case.prefixes, case.visible).run(kernel)[0]
    assert float((forgotten - exact).norm() / exact.norm()) > 0.5


def f25_prefix_columns_of_the_mask(kernel: Kernel) -> None:
    for mask_dtype in (torch.bool, torch.uint8):
        case = make(kernel, (21, 5), 9, mask_dtype=mask_dtype)
        before = case.run(kernel)
        cells, start = case.options["mask"].view(torch.uint8), 0
        for prefix in case.prefixes:
            rows = cells[start : start + 9 * (prefix + 9)].view(9, prefix + 9)
            rows[:, :prefix] = ~rows[:, :prefix]
            start += 9 * (prefix + 9)
        same_bits(before, case.run(kernel))


def f26_index_and_mask_types(kernel: Kernel) -> None:
    base = make(kernel, (7, 40), 9).run(kernel)
    for index_dtype in (torch.int32, torch.int64):
        for pointer_dtype in (torch.int32, torch.int64):
            for mask_dtype in (torch.bool, torch.uint8):
                case = make(
                    kernel, (7, 40), 9, index_dtype=index_dtype, indptr_dtype=pointer_dtype, mask_dtype=mask_dtype
                )
                pointers = case.options["mask_indptr"].to(index_dtype)
                same_bits(base, case.with_options(mask_indptr=pointers).run(kernel))
    case = make(kernel, (7, 40), 9, mask_dtype=torch.uint8)
    case.options["mask"].mul_(255)  # any byte but zero is true; prefix columns are garbage anyway
    same_bits(base, case.run(kernel))


def strides_and_the_widest_call(kernel: Kernel) -> None:
    kernel.matches(make(kernel, (33, 700), 260, 128, form="bits", pad=0))
    kernel.matches(make(kernel, (5, 70), 12, 21, pad=72, rank3=True))
    case = make(kernel, (50, 3), 9, 8)
    transposed = case.tensors[0].transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost
    kernel.matches(Case((transposed, *case.tensors[1:]), case.options, case.prefixes, case.visible))


def long_prefix(kernel: Kernel) -> None:
    lengths = (20_000, 3) if kernel.implementation == "naive" else (262_144, 1, 70_001)
    kernel.matches(make(kernel, lengths, 9, 8, form="bits", pad=0))


CHECKS: dict[str, Callable[[Kernel], None]] = {
    function.__name__: function
    for function in (
        f3_guards,
        f9_q_beyond_two_to_the_31,
        f10_slots_beyond_two_to_the_31,
        f12_poison_in_unnamed_rows,
        f13_rows_that_nobody_sees,
        f13_a_poisoned_request_spoils_nobody_else,
        f15_chain_differs_and_nodes_alone,
        f16_the_output_spells_the_mask_back,
        f17_a_sibling_is_never_seen,
        f21_fixed_split_does_not_depend_on_the_batch,
        f22_bits_rewritten_in_place,
        f23_draft_rows_count,
        f25_prefix_columns_of_the_mask,
        f26_index_and_mask_types,
        strides_and_the_widest_call,
        long_prefix,
    )
}
GRID = {name: {**arguments, "dtype": BF16} for name, arguments in TABLE.items()}
"""Rows F11, F18, F24, F27 and their neighbours: calls for ``build``, in bfloat16."""


def grid_case(name: str, device: torch.device) -> Case:
    return to_device(build(**GRID[name]), device)
