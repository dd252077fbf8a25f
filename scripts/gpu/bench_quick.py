"""Check and time the portable attention kernel's depths, row tiles and cuts on a GPU, without binding or build system.

The shim is compiled where nvcc is (no GPU needed) and carried along, or built on the spot:

    python scripts/gpu/bench_quick.py --build .carry/quick.so
    python scripts/gpu/bench_quick.py --library .carry/quick.so --out results.json

Every point is checked once against float64 and then timed by CUDA-graph replay over rotated KV sets, scattered int64
slots, random trees as bits. Floors: 4.27 TB/s, 808 TFLOP/s; the mma.sync ceiling is measured here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from treeverify.bench.workloads import Point, parse_point, random_visibility  # noqa: E402
from treeverify.tree.packing import pack_rows  # noqa: E402

CSRC = ROOT / "src/treeverify/csrc"
LATENT, ROW, SCALE = 512, 576, 192**-0.5
COPY_RATE, MATMUL_RATE = 4.27e12, 808e12
DEPTHS = {"99k": 1, "deep": 2}
POINTS = (
    "1/9/8/1k 1/9/8/4k 1/9/8/16k 1/9/8/64k 1/9/8/128k 4/9/8/128k 1/9/16/64k 1/17/16/16k 1/65/16/16k 1/9/128/16k "
    "4/9/16/16k 16/9/8/1k 16/9/16/4k 16/9/16/ragged 16/65/16/4k 16/17/128/16k"
)
FA2_US = {
    "1/9/8/1k": 15.04, "1/9/8/16k": 41.6, "1/9/8/64k": 97.1, "1/9/128/16k": 190.5, "1/17/16/16k": 65.8,
    "4/9/16/16k": 156.3, "16/9/16/4k": 169.4, "16/9/16/ragged": 532.6, "16/17/128/16k": 5581.3,
}  # fmt: skip


class Params(ctypes.Structure):
    """``TreeAttentionParams`` of params.h, field by field."""

    _fields_ = [
        ("q", ctypes.c_void_p), ("q_token_stride", ctypes.c_int64), ("q_head_stride", ctypes.c_int64),
        ("draft_kv", ctypes.c_void_p), ("draft_stride", ctypes.c_int64),
        ("kv_pool", ctypes.c_void_p), ("pool_stride", ctypes.c_int64),
        ("kv_indptr", ctypes.c_void_p), ("kv_indices", ctypes.c_void_p),
        ("mask", ctypes.c_void_p), ("mask_indptr", ctypes.c_void_p),
        ("out", ctypes.c_void_p), ("out_token_stride", ctypes.c_int64), ("out_head_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_int64),
        ("batch", ctypes.c_int32), ("nodes", ctypes.c_int32), ("heads", ctypes.c_int32), ("mask_words", ctypes.c_int32),
        ("mask_kind", ctypes.c_int32),
        ("indptr_is_64", ctypes.c_bool), ("indices_is_64", ctypes.c_bool), ("mask_indptr_is_64", ctypes.c_bool),
        ("scale", ctypes.c_float), ("fixed_split", ctypes.c_int32),
        ("max_prefix", ctypes.c_int64), ("multiprocessors", ctypes.c_int32),
    ]  # fmt: skip


class Variant(NamedTuple):
    """One way to run the kernel; zeros mean the launcher's choice."""

    depth: str
    tile_rows: int = 0
    early_merge: int = 1
    parts: int = 1

    def __str__(self) -> str:
        """Write as in the table: ``deep r48 u4``."""
        parts = [
            self.depth,
            f"r{self.tile_rows}" if self.tile_rows else "",
        ]
        parts += ["" if self.early_merge else "late", "" if self.parts else "cut"]
        return " ".join(part for part in parts if part)


class Problem:
    """Inputs of one point: a query, draft rows and tree per request, several sets of slots over one pool."""

    def __init__(self, point: Point, pool: torch.Tensor, sets: int, seed: int = 0) -> None:
        """Draw everything from ``seed``."""
        device = pool.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens, prefix_rows = point.bs * point.nodes, sum(point.prefixes)
        self.point, self.pool = point, pool
        self.q = torch.randn(tokens, point.heads, ROW, device=device, dtype=torch.bfloat16, generator=generator)
        self.draft = torch.randn(tokens, ROW, device=device, dtype=torch.bfloat16, generator=generator)
        self.visible = torch.stack([random_visibility(point.nodes, seed + request) for request in range(point.bs)])
        self.bits = torch.from_numpy(pack_rows(self.visible.numpy()).view("int64")).to(device)
        self.visible = self.visible.to(device)
        self.indptr = torch.tensor((0, *point.prefixes), device=device).cumsum(0).to(torch.int32)
        order = torch.randperm(pool.shape[0], device=device, generator=generator)
        self.sets = [
            order[(s * prefix_rows) % max(1, pool.shape[0] - prefix_rows) :][:prefix_rows].clone() for s in range(sets)
        ]
        self.out = torch.full((tokens, point.heads, LATENT), torch.nan, device=device, dtype=torch.bfloat16)
        self.lse = torch.full((tokens, point.heads), torch.nan, device=device)
        self.workspace = torch.full((200 << 20,), 255, device=device, dtype=torch.uint8)

    def params(self, number: int, fixed_split: int = 0) -> Params:
        """Arguments of a call over KV set ``number``."""
        p = Params()
        p.q, p.q_token_stride, p.q_head_stride = self.q.data_ptr(), self.q.stride(0), self.q.stride(1)
        p.draft_kv, p.draft_stride = self.draft.data_ptr(), self.draft.stride(0)
        p.kv_pool, p.pool_stride = self.pool.data_ptr(), self.pool.stride(0)
        p.kv_indptr, p.kv_indices = self.indptr.data_ptr(), self.sets[number].data_ptr()
        p.mask, p.mask_words, p.mask_kind = self.bits.data_ptr(), self.bits.shape[-1], 2
        p.out, p.out_token_stride, p.out_head_stride = self.out.data_ptr(), self.out.stride(0), self.out.stride(1)
        p.lse, p.workspace, p.workspace_bytes = self.lse.data_ptr(), self.workspace.data_ptr(), self.workspace.numel()
        p.batch, p.nodes, p.heads = self.point.bs, self.point.nodes, self.point.heads
        p.indices_is_64, p.scale, p.fixed_split = True, SCALE, fixed_split
        p.max_prefix = max(self.point.prefixes)
        p.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        return p

    def reference(self, number: int, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output ``[nodes, heads, 512]`` and LSE ``[nodes, heads]`` of one request."""
        nodes = self.point.nodes
        begin, end = self.indptr[request : request + 2].tolist()
        tokens = slice(request * nodes, (request + 1) * nodes)
        keys = torch.cat([self.pool[self.sets[number][begin:end]], self.draft[tokens]]).double()
        scores = torch.einsum("nhd,kd->nhk", self.q[tokens].double(), keys) * SCALE
        scores[:, :, end - begin :].masked_fill_(~self.visible[request][:, None, :], -torch.inf)
        lse = scores.logsumexp(-1)
        return torch.einsum("nhk,kd->nhd", (scores - lse[..., None]).exp_(), keys[:, :LATENT]), lse


class Library:
    """The shim."""

    def __init__(self, path: Path) -> None:
        """Load it and compare the size of the parameter struct."""
        self._library = ctypes.CDLL(str(path.resolve()))
        assert self._library.quick_params_bytes() == ctypes.sizeof(Params), "params.h and Params differ"
        self._library.treeverify_mma_ceiling_flops.restype = ctypes.c_int64

    def launch(self, params: Params, variant: Variant) -> None:
        """Launch on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        options = (DEPTHS[variant.depth], variant.tile_rows, variant.early_merge, variant.parts)
        error = self._library.quick_launch(ctypes.byref(params), *options, stream)
        if error:
            raise RuntimeError(f"launch: CUDA error {error} ({variant})")

    def mma_ceiling(self) -> float:
        """TFLOP/s of mma.sync with all operands in registers."""
        blocks, iterations = 132 * 2, 4096
        sink = torch.empty(blocks * 256, device="cuda")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = (ctypes.c_void_p(sink.data_ptr()), blocks, iterations, stream)
        times = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._library.treeverify_mma_ceiling(*arguments)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return self._library.treeverify_mma_ceiling_flops(blocks, iterations) / statistics.median(times) * 1e-12


def build(path: Path, capability: str) -> None:
    """Compile the shim with every depth for one target."""
    sources = [
        ROOT / "scripts/gpu/quick_shim.cu",
        CSRC / "ops/tree_attention/portable_launch.cu",
        CSRC / "bench/mma_ceiling.cu",
    ]
    limit = {"80": 166912, "90a": 232448, "100": 232448}.get(capability, 101376)
    options = [
        "-std=c++17",
        "-O3",
        "-shared",
        "-Xcompiler=-fPIC",
        f"-gencode=arch=compute_{capability},code=sm_{capability}",
    ]
    defines = [f"-DTREEVERIFY_SHARED_LIMIT={limit}", "-DTREEVERIFY_ALL_DEPTHS"]
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["nvcc", *options, *defines, f"-I{CSRC}", "-o", str(path), *map(str, sources)], check=True)


def check(library: Library, problem: Problem, variant: Variant, fixed_split: int = 0) -> tuple[float, float, bool]:
    """Relative error, largest LSE error, and whether a second run gives the same bits."""
    problem.out.fill_(torch.nan)
    problem.lse.fill_(torch.nan)
    library.launch(problem.params(0, fixed_split), variant)
    first = problem.out.clone()
    library.launch(problem.params(0, fixed_split), variant)
    same = bool((first.view(torch.int16) == problem.out.view(torch.int16)).all())
    square_error = square = lse_error = 0.0
    requests = sorted({0, problem.point.bs // 2, problem.point.bs - 1})
    for request in requests:
        expected, lse = problem.reference(0, request)
        tokens = slice(request * problem.point.nodes, (request + 1) * problem.point.nodes)
        square_error += float((problem.out[tokens].double() - expected).square().sum())
        square += float(expected.square().sum())
        lse_error = max(lse_error, float((problem.lse[tokens].double() - lse).abs().max()))
    return (square_error / square) ** 0.5, lse_error, same


class Graph:
    """Calls of one variant over all KV sets, captured."""

    def __init__(self, library: Library, problem: Problem, variant: Variant) -> None:
        """Capture; at least eight calls."""
        self._count = max(len(problem.sets), 8)
        params = [problem.params(number % len(problem.sets)) for number in range(self._count)]
        library.launch(params[0], variant)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for one in params:
                library.launch(one, variant)

    def run(self) -> float:
        """Microseconds per call of one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self._count


def variants_of(point: str) -> list[Variant]:
    """Both depths, and for some points other row tiles and cuts."""
    variants = [Variant(name) for name in DEPTHS]
    if point in ("1/9/8/1k", "1/9/8/4k", "16/9/8/1k"):
        variants += [Variant("deep", early_merge=0), *(Variant("deep", rows) for rows in (40, 32, 16))]
    if point in ("16/9/8/1k", "4/9/16/16k", "16/9/16/4k", "16/9/16/ragged", "16/17/128/16k"):
        variants += [Variant("deep", parts=0)]
    if point in ("1/9/8/64k", "1/17/16/16k", "1/9/128/16k", "4/9/16/16k", "16/17/128/16k"):
        variants += [Variant("deep", 32)]
    return variants


def odd_shapes(library: Library, pool: torch.Tensor) -> list[str]:
    """Small and crooked shapes at both depths and in both modes; returns the failures."""
    failures = []
    for text in (
        "1/1/1/1",
        "3/9/8/33",
        "2/17/6/1000",
        "5/33/16/257",
        "1/65/3/4097",
        "2/260/1/77",
        "7/5/21/500",
        "2/9/128/300",
    ):
        problem = Problem(parse_point(text), pool, 1, seed=len(text))
        for depth in DEPTHS:
            for tile_rows in (16, 32, 40):
                for fixed_split in (0, 96):
                    variant = Variant(depth, tile_rows)
                    error, lse_error, same = check(library, problem, variant, fixed_split)
                    if not (error < 2.5e-3 and lse_error < 2e-2 and same):
                        failures.append(
                            f"{text} {variant} split {fixed_split}: {error:.2e} lse {lse_error:.1e} same {same}"
                        )
    return failures


def profile(library: Library, pool: torch.Tensor) -> None:
    """Print the two kernels' own durations at two points, as the profiler sees them."""
    for text in ("1/9/8/1k", "1/9/8/128k"):
        problem = Problem(parse_point(text), pool, 8)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as session:
            for number in range(8):
                library.launch(problem.params(number), Variant("deep", early_merge=0))
            torch.cuda.synchronize()
        for event in session.key_averages():
            print(f"profile {text}: {event.key[:90]} {event.device_time:.1f} us")


def main() -> None:
    """Build, or check and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--capability", default="90a")
    parser.add_argument("--library", type=Path, default=Path(".carry/quick.so"))
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds; points that do not fit are left out")
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build, arguments.capability)
        return
    started = time.monotonic()
    library = Library(arguments.library)
    pool = torch.randn(600_000, ROW, device="cuda", dtype=torch.bfloat16)
    ceiling = library.mma_ceiling()
    print(f"{torch.cuda.get_device_name()}, mma.sync ceiling {ceiling:.0f} TFLOP/s")
    failures = odd_shapes(library, pool)
    print(f"odd shapes: {len(failures)} failures", *failures[:12], sep="\n  ")
    print(f"[{time.monotonic() - started:.0f} s]")
    records: list[dict[str, Any]] = []
    for text in arguments.points.split():
        if time.monotonic() - started > arguments.budget:
            print(f"out of time before {text}")
            break
        point = parse_point(text)
        sets = min(64, max(2, -(-240 * 2**20 // point.kv_bytes)), pool.shape[0] // max(1, point.kv_tokens))
        problem = Problem(point, pool, max(1, sets))
        variants = variants_of(text)
        errors = {variant: check(library, problem, variant) for variant in variants}
        graphs = {variant: Graph(library, problem, variant) for variant in variants}
        times: dict[Variant, list[float]] = {variant: [] for variant in variants}
        for turn in range(6):
            for variant, graph in graphs.items():
                us = graph.run()
                if turn:
                    times[variant].append(us)
        floor = max(point.bytes / COPY_RATE, point.flops / MATMUL_RATE) * 1e6
        peer = FA2_US.get(text)
        print(f"{text}: floor {floor:.1f} us" + (f", fa2 {peer} us" if peer else ""))
        for variant in variants:
            us = statistics.median(times[variant])
            rate = point.flops / us * 1e-6
            error, lse_error, same = errors[variant]
            ok = "" if error < 2.0e-3 and same else "  WRONG" if error > 2.5e-3 or not same else "  error"
            print(
                f"  {variant!s:11} {us:8.1f} us x{us / floor:5.2f} {rate:4.0f} TF {rate / ceiling:4.0%} {error:.2e}{ok}"
            )
            records.append({"point": text, "variant": str(variant), "us": us, "runs": times[variant], "floor": floor,
                            "tflops": rate, "error": error, "lse_error": lse_error, "same": same})  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps({"ceiling": ceiling, "records": records, "failures": failures}))
    try:
        profile(library, pool)
    except RuntimeError as error:
        print(f"no profile: {error}")
    print(f"[{time.monotonic() - started:.0f} s]")


if __name__ == "__main__":
    main()
