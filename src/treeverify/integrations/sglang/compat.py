"""The only file that names SGLang's internals; every name and signature is checked before it is used.

SGLang logs what a plugin raises and goes on without it. So nothing here is trusted to have happened: ``check`` is run
again by the backend factory, where an exception stops the server. An error names what was looked for, what was
expected and what was found. SGLang is imported inside functions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

from treeverify.integrations.sglang.names import check_parameters, find, mismatch, read, version
from treeverify.ops.tree_attention.contract import CUDA_LIMITS, LATENT, ROPE, ROW

BACKEND = "treeverify"
CLASS_NAME = "TreeverifyAttnBackend"
OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)

_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_TRITON = "sglang.srt.layers.attention.triton_backend"
_DFLASH = "sglang.srt.speculative.dflash_utils"
_DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_WRITE_LOC = "sglang.srt.mem_cache.memory_pool.KVWriteLoc"
_LAYER = "sglang.srt.layers.radix_attention.RadixAttention"

_PARAMETERS: Mapping[str, str] = {
    f"{_REGISTRY}.register_attention_backend": "name",
    "sglang.srt.server_args.add_attention_backend_choices": "choices|iterable",
    f"{_TRITON}.TritonAttnBackend.__init__": "self model_runner skip_prefill kv_indptr_buf",
    f"{_TRITON}.TritonAttnBackend.forward_extend": "self q k v layer forward_batch save_kv_cache",
    f"{_TRITON}.TritonAttnBackend.init_cuda_graph_state": "self max_bs max_num_tokens",
    f"{_TRITON}.TritonAttnBackend._set_kv_buffer": "self forward_batch layer loc_info k v",
    f"{_DFLASH}.resolve_dflash_verify_mask_policy": "attn_backend",
    f"{_DRAFT_FACTORY}._create_backend": "self backend_name backend_map error_template",
    f"{_SCHEDULER}.get_internal_state": "self recv_req",
    f"{_LAYER}.__init__": "self num_heads head_dim scaling num_kv_heads layer_id logit_cap v_head_dim "
    "sliding_window_size is_cross_attention",
}
"""What is called or replaced, with the parameters that it must begin with (``|``: either name)."""
_AT_REGISTRATION = tuple(_PARAMETERS)[:2]
_FIELDS: Mapping[str, str] = {
    f"{_TRITON}.ForwardMetadata": "max_extend_len kv_indptr kv_indices qo_indptr custom_mask mask_indptr",
    _WRITE_LOC: "loc swa_loc full_loc",
}


class Call(NamedTuple):
    """The tensors of one verify call, as SGLang holds them: nothing is copied."""

    q: torch.Tensor
    draft_kv: torch.Tensor
    kv_pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    slots: torch.Tensor
    """``[batch*nodes]``: where SGLang stores the draft rows; 0 marks the padding of a CUDA graph."""
    nodes: int
    scale: float
    layer: int


class Facts(NamedTuple):
    """What a server fixes at its start."""

    device: torch.device
    heads: int
    nodes: int
    max_prefix: int
    first_layer: int
    layers: int
    """One more than the largest layer number of this rank."""


def check_registration() -> None:
    """Check what the plugin needs to register; raises ``ConfigError``."""
    _check_version()
    for path in _AT_REGISTRATION:
        check_parameters(path, _PARAMETERS[path])


def check() -> None:
    """Check every name and signature; raises ``ConfigError``."""
    _check_version()
    for path in _PARAMETERS:
        check_parameters(path, _PARAMETERS[path])
    for path, names in _FIELDS.items():
        owner = find(path)
        found = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        for name in names.split():
            if name not in found:
                raise mismatch(path, f"a field {name}", sorted(found))
    known = getattr(import_module(_DFLASH), "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS", None)
    if not isinstance(known, frozenset) or "TritonAttnBackend" not in known:
        expected = "a frozenset that holds TritonAttnBackend"
        raise mismatch(f"{_DFLASH}._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS", expected, known)


def register(factory: Callable[[Any], Any]) -> None:
    """Register the attention backend and let the command line accept its name."""
    registry = import_module(_REGISTRY)
    arguments = import_module("sglang.srt.server_args")
    if BACKEND not in registry.ATTENTION_BACKENDS:
        arguments.add_attention_backend_choices([BACKEND])
    registry.register_attention_backend(BACKEND)(factory)


def install_hooks(report: Callable[[], dict[str, object]]) -> None:
    """Make SGLang treat our class as its parent, and add ``report()`` to the server's info; once per process."""
    dflash: Any = import_module(_DFLASH)
    dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= {CLASS_NAME}  # compared with type(backend).__name__
    drafts = find(_DRAFT_FACTORY)
    _wrap(drafts, "_create_backend", _drafts_stay_with_triton)
    _wrap(find(_SCHEDULER), "get_internal_state", lambda stock: _with_report(stock, report))


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


def refusals(backend: Any, runner: Any) -> Iterator[str]:
    """Yield what this server is set to do that ``tree_attention`` does not compute, one line each."""
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
    if nodes is None:
        yield "no speculative algorithm is set, so nothing is ever verified"
    elif not 1 <= nodes <= (CUDA_LIMITS.max_nodes or nodes):
        yield f"{nodes} draft tokens, more than {CUDA_LIMITS.max_nodes}"
    if heads > (CUDA_LIMITS.max_heads or heads):
        yield f"{heads} heads per rank, more than {CUDA_LIMITS.max_heads}"
    if read(backend, "dcp_size") > 1:
        yield "decode context parallelism (--dcp-size)"
    if read(backend, "enable_deterministic"):
        yield "--enable-deterministic-inference"
    window = read(backend, "sliding_window_size")
    if window is not None and window > 0:
        yield f"sliding window of {window}"
    if getattr(backend, "_translate_kv_loc", None) is not None:
        yield "the unified memory pool (slots that need translation)"
    for layer in _layers(runner):
        option = layer_option(layer)
        if option is not None:
            yield f"layer {layer.layer_id}: {option}"


def facts(backend: Any, runner: Any) -> Facts:
    """Read what sizes the buffers of ``backend``."""
    table, pool = read(backend, "req_to_token"), read(backend, "token_to_kv_pool")
    numbers = [layer.layer_id for layer in _layers(runner)]
    first = min(numbers, default=read(pool, "start_layer"))
    last = max(numbers, default=first + read(pool, "layer_num") - 1)
    heads, nodes = read(backend, "num_head"), read(backend, "num_draft_tokens")
    return Facts(table.device, heads, nodes, table.shape[1], first, last + 1)


def kv_dtype(backend: Any) -> torch.dtype:
    """Return the dtype of the KV pool."""
    found: torch.dtype = read(read(backend, "token_to_kv_pool"), "dtype")
    return found


def layer_option(layer: Any) -> str | None:
    """Name the first option of an attention layer that ``tree_attention`` does not compute, None if there is none."""
    if (layer.logit_cap or 0) > 0:
        return f"logit cap {layer.logit_cap}"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return f"sliding window of {layer.sliding_window_size}"
    if layer.is_cross_attention:
        return "cross-attention"
    if (getattr(layer, "xai_temperature_len", None) or -1) > 0:
        return f"xai temperature length {layer.xai_temperature_len}"
    if layer.k_scale is not None or layer.v_scale is not None:
        return "scaled KV (k_scale, v_scale)"
    return None


def is_verify(batch: Any) -> bool:
    """Tell whether ``batch`` is a target-verify call."""
    return bool(batch.forward_mode.is_target_verify())


def verify_call(backend: Any, q: torch.Tensor, k: torch.Tensor, layer: Any, batch: Any) -> Call:
    """Gather the views of one verify call."""
    metadata = backend.forward_metadata
    mask = metadata.custom_mask
    return Call(
        q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        draft_kv=k,
        kv_pool=backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
        kv_indptr=metadata.kv_indptr,
        kv_indices=metadata.kv_indices,
        mask=mask,
        mask_indptr=None if mask is None else metadata.mask_indptr,
        slots=batch.out_cache_loc,
        nodes=metadata.max_extend_len,
        scale=1.0 if layer.scaling is None else float(layer.scaling),
        layer=layer.layer_id,
    )


def output(q: torch.Tensor, layer: Any, batch: Any) -> torch.Tensor:
    """Return the tensor that the parent would fill: the caller's, or a new one."""
    given: torch.Tensor | None = getattr(batch, "_attn_output", None)
    return q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim)) if given is None else given


def write_kv(backend: Any, batch: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store the draft rows in the pool, as the parent does before it attends."""
    place = find(_WRITE_LOC)
    if hasattr(place, "for_batch"):  # 0.5.23: the batch says whether its slots are physical
        where = place.for_batch(batch, swa_loc=backend.forward_metadata.swa_out_cache_loc)
    else:
        where = place(batch.out_cache_loc, backend.forward_metadata.swa_out_cache_loc)
    backend._set_kv_buffer(batch, layer, where, k, v)


def _layers(runner: Any) -> Iterator[Any]:
    """Yield the absorbed MLA layers of the loaded model: those that a verify call can come from."""
    kind, model = find(_LAYER), getattr(runner, "model", None)
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, kind) and (module.qk_head_dim, module.v_head_dim) == (ROW, LATENT):
            yield module


def _drafts_stay_with_triton(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The factory of draft backends refuses names that it does not know: ours means Triton there."""

    def create(factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **options: Any) -> Any:
        return stock(factory, backend_name, {**backend_map, BACKEND: backend_map["triton"]}, *rest, **options)

    return create


def _with_report(stock: Callable[..., Any], report: Callable[[], dict[str, object]]) -> Callable[..., Any]:
    def get_internal_state(scheduler: Any, recv_req: Any) -> Any:
        answer = stock(scheduler, recv_req)
        answer.internal_state[BACKEND] = report()
        return answer

    return get_internal_state


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    stock = getattr(owner, name)
    if not hasattr(stock, "treeverify_stock"):
        wrapped = wrapper(stock)
        wrapped.treeverify_stock = stock  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _check_version() -> None:
    parts = tuple(int(part) for part in version().split(".")[:3] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise mismatch("sglang.version", f"{oldest} to {newest}", version())
