"""Names and signatures of SGLang, checked before any is used; what a server is set up for, read and judged.

SGLang logs what a plugin raises and goes on without it. So nothing here is trusted to have happened: ``check`` is run
again by the backend factory, where an exception stops the server. An error names what was looked for, what was
expected and what was found. SGLang is imported inside functions only. ``calls`` reads SGLang's tensors, ``hooks``
replaces its functions; what both touch is listed here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version

from treeverify.env import untested_sglang
from treeverify.integrations.sglang.calls import WRITE_LOC, layer_option
from treeverify.integrations.sglang.names import check_assigned, check_parameters, find, mismatch, read, version
from treeverify.ops.tree_attention.contract import CUDA_LIMITS, LATENT, ROPE, ROW

BACKEND = "treeverify"
CLASS_NAME = "TreeverifyAttnBackend"
OLDEST, NEWEST = "0.5.17", "0.5.23"
"""The first and the last release of SGLang that were tested."""
logger = logging.getLogger(__name__)

_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_TRITON = "sglang.srt.layers.attention.triton_backend"
DFLASH = "sglang.srt.speculative.dflash_utils"
DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTEXT = "sglang.srt.runtime_context"
_GRAPH_BACKENDS = "sglang.srt.model_executor.runner_backend"
FULL_GRAPHS = f"{_GRAPH_BACKENDS}.full_cuda_graph_backend.FullCudaGraphBackend"
BREAKABLE_GRAPHS = f"{_GRAPH_BACKENDS}.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
SWITCH_REPLY = "sglang.srt.managers.io_struct.SetInternalStateReqOutput"
_LAYER = "sglang.srt.layers.radix_attention.RadixAttention"

_PARAMETERS: Mapping[str, str] = {
    f"{_REGISTRY}.register_attention_backend": "name",
    "sglang.srt.server_args.add_attention_backend_choices": "choices|iterable",
    f"{_TRITON}.TritonAttnBackend.__init__": "self model_runner skip_prefill kv_indptr_buf",
    f"{_TRITON}.TritonAttnBackend.forward_extend": "self q k v layer forward_batch save_kv_cache",
    f"{_TRITON}.TritonAttnBackend.forward_decode": "self q k v layer forward_batch save_kv_cache",
    f"{_TRITON}.TritonAttnBackend.init_forward_metadata_out_graph": "self forward_batch in_capture",
    f"{_TRITON}.TritonAttnBackend.init_cuda_graph_state": "self max_bs max_num_tokens",
    f"{_TRITON}.TritonAttnBackend._set_kv_buffer": "self forward_batch layer loc_info k v",
    f"{DFLASH}.resolve_dflash_verify_mask_policy": "attn_backend",
    f"{_CONTEXT}.get_parallel": "",
    f"{_CONTEXT}.get_observability": "",
    f"{DRAFT_FACTORY}._create_backend": "self backend_name backend_map error_template",
    f"{DRAFT_FACTORY}._create_triton_prefill_backend": "self",
    f"{SCHEDULER}.get_internal_state": "self recv_req",
    f"{SCHEDULER}.set_internal_state": "self recv_req",
    f"{SCHEDULER}.run_batch": "self batch",
    SWITCH_REPLY: "rid http_worker_ipc updated",
    f"{FULL_GRAPHS}.capture_one": "self shape_key forward_fn",
    f"{FULL_GRAPHS}.capture_session": "self stream",
    f"{FULL_GRAPHS}.replay": "self shape_key static_forward_batch",
    f"{BREAKABLE_GRAPHS}.capture_one": "self shape_key forward_fn",
    f"{_LAYER}.__init__": "self num_heads head_dim scaling num_kv_heads layer_id logit_cap v_head_dim "
    "sliding_window_size is_cross_attention",
}
"""What is called or replaced, with the parameters that it must begin with (``|``: either name)."""
_AT_REGISTRATION = tuple(_PARAMETERS)[:2]
_FIELDS: Mapping[str, str] = {
    f"{_TRITON}.ForwardMetadata": "max_extend_len kv_indptr kv_indices qo_indptr custom_mask mask_indptr",
    f"{_GRAPH_BACKENDS[: _GRAPH_BACKENDS.rindex('.')]}.runner.shape_key.ShapeKey": "size variant_label",
    WRITE_LOC: "loc swa_loc full_loc",
}


class Facts(NamedTuple):
    """What a server fixes at its start."""

    device: torch.device
    heads: int
    nodes: int
    max_prefix: int
    first_layer: int
    layers: int
    """One more than the largest layer number of this rank."""


def check_version() -> None:
    """Check that SGLang's release was tested; raises ``ConfigError`` unless KDTREE_UNTESTED_SGLANG allows another.

    A local version (``+cu129``), a pre-release or a build from a commit counts as its release.
    """
    found, tested, allowed = version(), f"{OLDEST} to {NEWEST}", untested_sglang()
    try:
        within = Version(OLDEST) <= Version(Version(found).base_version) <= Version(NEWEST)
    except InvalidVersion:
        within = False
    if within:
        return
    if not allowed:
        switch = "KDTREE_UNTESTED_SGLANG=allow serves it if all names and signatures are as expected"
        raise mismatch("sglang.version", tested, f"{found}; {switch}")
    logger.warning("treeverify: SGLang %s was not tested, %s were; served by KDTREE_UNTESTED_SGLANG", found, tested)


def check_registration() -> None:
    """Check what the plugin needs to register; raises ``ConfigError``."""
    check_version()
    for path in _AT_REGISTRATION:
        check_parameters(path, _PARAMETERS[path])


def check() -> None:
    """Check every name and signature; raises ``ConfigError``."""
    check_version()
    for path in _PARAMETERS:
        check_parameters(path, _PARAMETERS[path])
    check_assigned(SCHEDULER, "server_args tp_cpu_group attn_tp_cpu_group forward_ct")
    for path, names in _FIELDS.items():
        owner = find(path)
        found = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        for name in names.split():
            if name not in found:
                raise mismatch(path, f"a field {name}", sorted(found))
    known = getattr(import_module(DFLASH), "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS", None)
    if not isinstance(known, frozenset) or "TritonAttnBackend" not in known:
        expected = "a frozenset that holds TritonAttnBackend"
        raise mismatch(f"{DFLASH}._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS", expected, known)


def register(factory: Callable[[Any], Any]) -> None:
    """Register the attention backend and let the command line accept its name."""
    registry = import_module(_REGISTRY)
    arguments = import_module("sglang.srt.server_args")
    if BACKEND not in registry.ATTENTION_BACKENDS:
        arguments.add_attention_backend_choices([BACKEND])
    registry.register_attention_backend(BACKEND)(factory)


def stock_backend(runner: Any) -> Any:
    """Build the backend that SGLang itself calls ``triton``."""
    return import_module(_REGISTRY).ATTENTION_BACKENDS["triton"](runner)


def stock_class() -> type:
    """Return the class that ours extends."""
    found: type = find(f"{_TRITON}.TritonAttnBackend")
    return found


def is_draft(runner: Any) -> bool:
    """Tell whether ``runner`` runs a draft model."""
    return bool(read(runner, "is_draft_worker"))


def place(runner: Any) -> tuple[int, int]:
    """Return the data-parallel group of this process, 0 where there is one, and its rank in it."""
    parallel = find(f"{_CONTEXT}.get_parallel")()
    owner = getattr(runner, "ps", parallel)  # 0.5.17 keeps the replica's number with the runner
    return read(owner, "dp_rank") or 0, read(parallel, "tp_rank")


def metrics_enabled() -> bool:
    """Tell whether the server exports metrics (--enable-metrics)."""
    return bool(read(find(f"{_CONTEXT}.get_observability")(), "enable_metrics"))


def refusals(backend: Any, runner: Any, switched: bool) -> Iterator[str]:
    """Yield what this server is set to do that ours does not serve, one line each; ``switched``: live switches too."""
    if torch.version.hip is not None:  # its device is called cuda too
        yield f"torch is a build for HIP (ROCm {torch.version.hip}), and the kernels are CUDA's"
        return
    if not read(backend, "use_mla"):
        yield "the model's attention is not MLA"
        return
    pool = read(backend, "token_to_kv_pool")
    for name, expected in (("kv_lora_rank", LATENT), ("qk_rope_head_dim", ROPE)):
        found = getattr(pool, name, None)
        if found != expected:
            yield f"KV pool {type(pool).__name__}: {name} is {found}, not {expected}"
    cpu = torch.device(read(backend, "device")).type == "cpu"
    if pool.dtype not in ((torch.bfloat16, torch.float32) if cpu else CUDA_LIMITS.dtypes):
        yield f"KV cache dtype is {pool.dtype}, not torch.bfloat16 (--kv-cache-dtype)"
    nodes, heads = read(backend, "num_draft_tokens"), read(backend, "num_head")
    if nodes is not None and not 1 <= nodes <= (CUDA_LIMITS.max_nodes or nodes):
        yield f"{nodes} draft tokens, more than {CUDA_LIMITS.max_nodes}"
    if heads > (CUDA_LIMITS.max_heads or heads):
        yield f"{heads} heads per rank, more than {CUDA_LIMITS.max_heads}"
    requests = read(read(runner, "req_to_token_pool"), "size")  # no batch is larger, padding included
    yield from _too_many(requests, nodes or 1, heads)
    if read(backend, "dcp_size") > 1:
        yield "decode context parallelism (--dcp-size)"
    if read(backend, "enable_deterministic"):
        yield "--enable-deterministic-inference"
    if switched and read(find(f"{_CONTEXT}.get_parallel")(), "pp_size") > 1:
        yield "pipeline parallelism: its stages would not switch at one step; allow one mode"
    window = read(backend, "sliding_window_size")
    if window is not None and window > 0:
        yield f"sliding window of {window}"
    if getattr(backend, "_translate_kv_loc", None) is not None:
        yield "the unified memory pool (slots that need translation)"
    for layer in _layers(runner):
        option = layer_option(layer)
        if option is not None:
            yield f"layer {layer.layer_id}: {option}"


def _too_many(requests: int, nodes: int, heads: int) -> Iterator[str]:
    """Refuse what ``tree_attention`` could not compute once the server is full."""
    rows = requests * nodes * heads
    if requests > (CUDA_LIMITS.max_batch or requests):
        yield f"{requests} running requests, more than {CUDA_LIMITS.max_batch} (--max-running-requests)"
    elif rows > (CUDA_LIMITS.max_rows or rows):
        yield (
            f"{requests} running requests of {nodes} draft tokens and {heads} heads are {rows} rows, more than "
            f"{CUDA_LIMITS.max_rows} (--max-running-requests)"
        )


def facts(backend: Any, runner: Any) -> Facts:
    """Read what sizes the buffers of ``backend``."""
    table, pool = read(backend, "req_to_token"), read(backend, "token_to_kv_pool")
    numbers = [layer.layer_id for layer in _layers(runner)]
    first = min(numbers, default=read(pool, "start_layer"))
    last = max(numbers, default=first + read(pool, "layer_num") - 1)
    heads, nodes = read(backend, "num_head"), read(backend, "num_draft_tokens") or 1
    return Facts(table.device, heads, nodes, table.shape[1], first, last + 1)


def kv_dtype(backend: Any) -> torch.dtype:
    """Return the dtype of the KV pool."""
    found: torch.dtype = read(read(backend, "token_to_kv_pool"), "dtype")
    return found


def _layers(runner: Any) -> Iterator[Any]:
    """Yield the absorbed MLA layers of the loaded model: those that a verify call can come from."""
    kind, model = find(_LAYER), getattr(runner, "model", None)
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, kind) and (module.qk_head_dim, module.v_head_dim) == (ROW, LATENT):
            yield module
