"""The drafter's attention backend where the command line names none: what SGLang takes for such attention on its GPU.

That is FA3 on Hopper with CUDA 12.3, else FlashInfer where it is installed, else Triton
(``ServerArgs._get_default_attn_backend``, 0.5.17 to 0.5.23). On sm_100 SGLang takes TRTLLM, which DFLASH replaces by
FlashInfer for drafters that see their whole block. Both libraries are taken for heads of 64, 128 and 256 and 16 bits.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, NamedTuple

from treeverify.integrations.sglang.names import find

_FA3 = "sgl_kernel.flash_ops"
_UTILS = "sglang.srt.utils.common"
_HEADS = (64, 128, 256)
_DTYPES = ("auto", "half", "float16", "bfloat16")
logger = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What the choice depends on."""

    cuda: bool
    hopper: bool
    """sm_90 and CUDA 12.3 or later."""
    fa3: bool
    """FA3's kernels are installed."""
    flashinfer: bool
    head_dim: int
    dtype: str
    """As ``--dtype``."""


class Chosen(NamedTuple):
    """A backend, and the words for why."""

    backend: str
    why: str


def choose(facts: Facts) -> Chosen:
    """Return the backend of a drafter on this machine."""
    if not facts.cuda:
        return Chosen("triton", "the only one without a GPU")
    if facts.head_dim not in _HEADS:
        return Chosen("triton", f"its heads of {facts.head_dim} are none of {_HEADS}")
    if facts.dtype not in _DTYPES:
        return Chosen("triton", f"its dtype {facts.dtype} is not of 16 bits")
    if facts.hopper and facts.fa3:
        return Chosen("fa3", "SGLang's choice on sm_90")
    if facts.flashinfer:
        missing = f"{_FA3} is not installed" if facts.hopper else "SGLang's choice on this GPU"
        return Chosen("flashinfer", missing)
    return Chosen("triton", f"{f'neither {_FA3} nor' if facts.hopper else 'no'} flashinfer is installed")


def default(arguments: Any, config: Any) -> str:
    """Choose for a server's arguments and its drafter's configuration, and log what was chosen and why."""
    chosen = choose(_facts(arguments, config))
    serial = chosen.backend == "triton" and arguments.device == "cuda"
    logger.log(
        logging.WARNING if serial else logging.INFO,
        "treeverify: the drafter's attention is %s: %s%s",
        chosen.backend,
        chosen.why,
        "; it reads a prefix serially, which at long contexts takes most of a step: "
        "--speculative-draft-window-size limits what it reads (docs/use/ddtree.md)"
        if serial
        else "",
    )
    return chosen.backend


def _facts(arguments: Any, config: Any) -> Facts:
    cuda = arguments.device == "cuda"
    hopper = cuda and bool(find(f"{_UTILS}.is_hopper_with_cuda_12_3")())
    return Facts(
        cuda=cuda,
        hopper=hopper,
        fa3=hopper and _installed(_FA3),
        flashinfer=cuda and bool(find(f"{_UTILS}.is_flashinfer_available")()),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=arguments.dtype,
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package that it is in
        return False
