"""Names and files: the trained modules as Hugging Face checkpoints in bfloat16, and back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.drafter import Drafter
from training.shapes import DrafterShape, TargetShape
from training.target import Target

BUDGET = 12 * 2**20


def _target_views(model: Target) -> dict[str, Tensor]:
    """Checkpoint name -> view of the module's storage, so that one map serves writing and reading."""
    views = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm,
        "lm_head.weight": model.head,
    }
    for index, layer in enumerate(model.layers):
        base = f"model.layers.{index}."
        views[base + "input_layernorm.weight"] = layer.norm_in
        views[base + "post_attention_layernorm.weight"] = layer.norm_mid
        names = {"q_proj": "q", "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_b"}
        for theirs, ours in (names | {"o_proj": "out"}).items():
            views[f"{base}self_attn.{theirs}.weight"] = getattr(layer.attention, ours)
        ff = layer.ff
        for expert in range(ff.count):
            part = f"experts.{expert}." if expert + 1 < ff.count else "shared_experts."
            prefix = f"{base}mlp." + (part if ff.moe else "")
            views[prefix + "gate_proj.weight"] = ff.gate_up[expert]
            views[prefix + "up_proj.weight"] = ff.gate_up[ff.count + expert]
            views[prefix + "down_proj.weight"] = ff.down[expert].T
        if ff.moe:
            views[base + "mlp.gate.weight"] = ff.router
            views[base + "mlp.gate.e_score_correction_bias"] = ff.bias
    return views


def _drafter_views(model: Drafter) -> dict[str, Tensor]:
    views = {"fc.weight": model.fc, "hidden_norm.weight": model.context_norm, "norm.weight": model.norm}
    for index, layer in enumerate(model.layers):
        base = f"layers.{index}."
        views[base + "input_layernorm.weight"] = layer.norm_in
        views[base + "post_attention_layernorm.weight"] = layer.norm_mid
        names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "q_norm": "q_norm", "k_norm": "k_norm"}
        for theirs, ours in names.items():
            views[f"{base}self_attn.{theirs}.weight"] = getattr(layer, ours)
        views[base + "mlp.gate_proj.weight"] = layer.gate_up[0]
        views[base + "mlp.up_proj.weight"] = layer.gate_up[1]
        views[base + "mlp.down_proj.weight"] = layer.down[0].T
    return views


def _stored(name: str, value: Tensor) -> Tensor:
    kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return value.detach().to("cpu", kind, copy=True).contiguous()


def _write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size


def save_pair(target: Target, drafter: Drafter | None, folder: Path) -> int:
    """Write `target/` (with the MASK vector in its last embedding row) and `drafter/`; return the weights' bytes."""
    tensors = {name: _stored(name, view) for name, view in _target_views(target).items()}
    size = 0
    if drafter is not None:
        tensors["model.embed_tokens.weight"][target.s.mask_id] = _stored("mask", drafter.mask)
        draft = {name: _stored(name, view) for name, view in _drafter_views(drafter).items()}
        size += _write(folder / "drafter", drafter.s.hf_config(), draft)
    size += _write(folder / "target", target.s.hf_config(), tensors)
    if size > BUDGET:
        raise ValueError(f"target and drafter take {size} bytes, more than {BUDGET}")
    return size


def _fill(model: nn.Module, views: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    tensors = load_file(path)
    if tensors.keys() != views.keys():
        raise ValueError(f"{path}: unexpected or missing names {sorted(tensors.keys() ^ views.keys())[:4]}")
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(tensors[name])
    return tensors


def load_target(folder: Path, shape: TargetShape, drop: float = 0.0) -> Target:
    """Rebuild a target in float32 from `folder/target`."""
    model = Target(shape, drop)
    _fill(model, _target_views(model), folder / "target" / "model.safetensors")
    return model


def load_drafter(folder: Path, shape: DrafterShape, target: Target) -> Drafter:
    """Rebuild a drafter in float32; its MASK vector is the target's last embedding row."""
    model = Drafter(shape)
    _fill(model, _drafter_views(model), folder / "drafter" / "model.safetensors")
    with torch.no_grad():
        model.mask.copy_(target.embedding[target.s.mask_id])
    return model


def main() -> None:
    """Write a random pair in the final layout: `python -m training.checkpoint FOLDER`."""
    import sys

    torch.manual_seed(1)
    target, drafter = Target(TargetShape()), Drafter(DrafterShape())
    with torch.no_grad():
        for name, p in [*target.named_parameters(), *drafter.named_parameters()]:
            if name.endswith(("out", "down", "head")):
                p.mul_(6.0)  # so that attention, experts and the head matter in a comparison of logits
            if "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
        for layer in target.layers[1:]:
            layer.ff.router.mul_(8.0)
            layer.ff.bias.copy_(torch.randn_like(layer.ff.bias) * 0.1)
    print("bytes", save_pair(target, drafter, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
