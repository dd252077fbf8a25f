"""What the machine can do at most, measured beside the kernels, and the floor that follows from it.

Three ceilings: a large device-to-device copy (bytes read plus bytes written), a large bf16 matrix product through torch
(``wgmma`` on Hopper), and a register-resident loop of ``mma.sync``, which bounds every kernel built on that
instruction. All on random data.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from treeverify.bench.timing import Replay, make_replay
from treeverify.bench.workloads import Point
from treeverify.env import cache_dir
from treeverify.errors import BuildError
from treeverify.jit.toolkit import find_toolkit, run

MATMUL, COPY, MMA_SYNC = "wgmma", "copy", "mma-sync"
UNITS = {COPY: "B/s", MATMUL: "flop/s", MMA_SYNC: "flop/s"}
_REPEATS = 4
_MMA_ITERATIONS = 12_000


@dataclass(frozen=True)
class Rates:
    """Measured ceilings: bytes and floating-point operations per second (``mma_sync``: None if not measured)."""

    copy: float
    matmul: float
    mma_sync: float | None = None

    def floor(self, point: Point) -> tuple[float, str]:
        """Return the least time for ``point`` in microseconds, and ``mem`` or ``mma``, whichever term is larger."""
        memory, arithmetic = point.bytes / self.copy * 1e6, point.flops / self.matmul * 1e6
        return (memory, "mem") if memory >= arithmetic else (arithmetic, "mma")


@dataclass(frozen=True)
class Ceiling:
    """A timed loop and the work that one of its calls does."""

    name: str
    work: float
    replay: Replay

    def rate(self, us: float) -> float:
        """Work per second of a call that took ``us`` microseconds."""
        return self.work / us * 1e6


def copy_ceiling(device: torch.device) -> Ceiling:
    """Negated copy of 1 GiB (16 MiB on a CPU): a plain copy in a graph may go to the slower copy engine."""
    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return Ceiling(COPY, 2.0 * size, make_replay([lambda: torch.neg(source, out=target)] * _REPEATS, device))


def matmul_ceiling(device: torch.device) -> Ceiling:
    """Product of two 8192 x 8192 bf16 matrices (256 x 256 fp32 on a CPU)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    c = torch.empty_like(a)
    return Ceiling(MATMUL, 2.0 * size**3, make_replay([lambda: torch.mm(a, b, out=c)] * _REPEATS, device))


def mma_sync_ceiling(device: torch.device) -> Ceiling:
    """Best of 1, 2 and 4 blocks of eight warps per multiprocessor; raises ``BuildError`` if it cannot be compiled."""
    if device.type != "cuda":
        raise BuildError("mma.sync ceiling: needs a CUDA device")
    library = ctypes.CDLL(str(build_mma_library(torch.cuda.get_device_capability(device))))
    library.treeverify_mma_ceiling_flops.restype = ctypes.c_int64
    library.treeverify_mma_ceiling_sink.restype = ctypes.c_int64
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    candidates = [_mma_ceiling(library, per * multiprocessors, device) for per in (1, 2, 4)]
    return max(candidates, key=lambda ceiling: ceiling.rate(min(ceiling.replay.run() for _ in range(3))))


def build_mma_library(capability: tuple[int, int], folder: Path | None = None) -> Path:
    """Compile the mma.sync loop for one GPU generation unless ``folder`` has it; return the shared library.

    The file's name carries a hash of source, target and the CPU's architecture; it appears atomically. ``folder``
    defaults to the kernel cache. Raises ``BuildError`` with the compiler's message.
    """
    source = resources.files("treeverify") / "csrc/bench/mma_ceiling.cu"
    target = f"{capability[0]}{capability[1]}"
    digest = hashlib.sha256(source.read_bytes() + target.encode() + platform.machine().encode()).hexdigest()[:16]
    folder = folder or cache_dir()
    library = folder / f"mma_ceiling-sm{target}-{digest}.so"
    if library.is_file():
        return library
    toolkit = find_toolkit()
    folder.mkdir(parents=True, exist_ok=True)
    with resources.as_file(source) as path, tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / library.name
        gencode = f"-gencode=arch=compute_{target},code=sm_{target}"
        flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", gencode]
        files = [f"-L{toolkit.library}", str(path), "-o", str(built)]
        run(toolkit.device_command(*flags, *files), "the mma.sync ceiling does not compile")
        os.replace(built, library)
    return library


def _mma_ceiling(library: ctypes.CDLL, blocks: int, device: torch.device) -> Ceiling:
    sink = torch.empty(int(library.treeverify_mma_ceiling_sink(blocks)), dtype=torch.float32, device=device)
    work = float(library.treeverify_mma_ceiling_flops(blocks, _MMA_ITERATIONS))

    def launch() -> torch.Tensor:
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        status = library.treeverify_mma_ceiling(ctypes.c_void_p(sink.data_ptr()), blocks, _MMA_ITERATIONS, stream)
        if status:
            raise BuildError(f"mma.sync ceiling: the launch failed with CUDA error {status}")
        return sink

    return Ceiling(MMA_SYNC, work, make_replay([launch], device))
