import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from safetensors.torch import load_file
from training.drafter import Drafter
from training.shapes import BLOCK, DrafterShape, TargetShape
from training.target import Target
from training.train import main

from training import checkpoint, corpus, loops, optim, tokenizer

SMALL = TargetShape(vocab=300, hidden=64, latent=64, dense=64, expert_width=16)
DRAFT = DrafterShape(vocab=300, hidden=64, layers=1, width=64)
SETTINGS = (
    "shape.vocab=300 shape.hidden=64 shape.latent=64 shape.dense=64 shape.expert_width=16 "
    "draft.vocab=300 draft.hidden=64 draft.layers=1 draft.width=64 prompts=2 walk=8 loss_windows=1 "
    "target.steps=2 target.rows=2 target.length=64 target.check_windows=1 "
    "drafter.steps=2 drafter.rows=2 drafter.length=64 drafter.anchors=4 "
    "generation.rounds=1 generation.rows=2 generation.new=24"
)


def texts(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(2, 299, size))


def test_tokenizer_round_trip_leaves_the_last_id_free() -> None:
    source = [Path(tokenizer.__file__).read_text().replace("<|", "<"), "naïve = '→'\n"]
    made = tokenizer.train_tokenizer(source, 300)
    assert [made.decode(made.encode(text).ids) for text in source] == source
    assert made.get_vocab_size() == 299
    assert made.token_to_id("<|bos|>") == 0


def test_a_changed_corpus_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="differs"):
        corpus.read_files(tmp_path, [{"path": "a.py", "sha256": "0" * 64, "split": "library"}])
    with pytest.raises(SystemExit, match="cannot be read"):
        corpus.read_files(tmp_path, [{"path": "b.py", "sha256": "0" * 64, "split": "library"}])


def test_no_held_out_file_is_trained_on() -> None:
    rows = json.loads(corpus.LIST.read_text())["files"]
    assert len({row["path"] for row in rows}) == len(rows)
    digests = {split: {row["sha256"] for row in rows if row["split"] == split} for split in corpus.SPLITS}
    assert len(digests["heldout"]) == corpus.HELD_FILES
    assert not digests["heldout"] & (digests["library"] | digests["tests"] | digests["valid"])


def test_full_size_fits_the_budget(tmp_path: Path) -> None:
    size = checkpoint.save_pair(Target(TargetShape()), Drafter(DrafterShape()), tmp_path)
    assert size <= checkpoint.BUDGET


def test_checkpoint_keeps_names_shapes_and_logits(tmp_path: Path) -> None:
    target, drafter = Target(SMALL).eval(), Drafter(DRAFT).eval()
    for module in (target, drafter):  # so that rounding to bfloat16 loses nothing
        module.bfloat16().float()
    checkpoint.save_pair(target, drafter, tmp_path)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.15.down_proj.weight"].shape == (64, 16)
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (64 + 64, 64)
    assert stored["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    again = checkpoint.load_target(tmp_path, SMALL).eval()
    draft_again = checkpoint.load_drafter(tmp_path, DRAFT, again)
    ids = texts(40, 0)[None]
    logits, features = target(ids, (0, 1, 2))
    logits_again, features_again = again(ids, (0, 1, 2))
    assert torch.equal(logits, logits_again)
    anchors = torch.tensor([5, 20])
    assert torch.equal(drafter(target, features, ids, anchors), draft_again(again, features_again, ids, anchors))


def test_generation_with_a_cache_equals_whole_forwards() -> None:
    torch.manual_seed(0)
    target = Target(SMALL).eval()
    ids = texts(12, 1)[None]
    for _ in range(6):
        ids = torch.cat([ids, target(ids)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(target.generate(ids[:, :12], 6), ids)


def test_a_draft_sees_nothing_from_its_anchor_on() -> None:
    torch.manual_seed(0)
    target, drafter = Target(SMALL).eval(), Drafter(DRAFT).eval()
    ids = texts(40, 2)[None]
    changed = ids.clone()
    changed[:, 21:] = 7
    anchors = torch.tensor([8, 20])
    first, second = (drafter(target, target(x, (0, 1, 2))[1], x, anchors) for x in (ids, changed))
    assert first.shape == (1, 2, BLOCK - 1, 300)
    torch.testing.assert_close(first, second)
    changed[:, 20] = (changed[:, 20] + 1) % 299
    third = drafter(target, target(changed, (0, 1, 2))[1], changed, anchors)
    torch.testing.assert_close(first[:, 0], third[:, 0])
    assert (first[:, 1] - third[:, 1]).abs().max() > 1e-3


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    target = Target(SMALL)
    source = {name: texts(16, 3).repeat(40) for name in ("library", "tests", "valid")}
    before = loops.evaluate(target, source["valid"], 64)["loss"]
    recipe = loops.TargetRecipe(steps=12, rows=2, length=64, check_windows=1)
    loops.train_target(target, source, recipe, torch.float32, lambda *_: None)
    assert loops.evaluate(target, source["valid"], 64)["loss"] < before - 0.5


def test_clock_runs_down() -> None:
    clock = optim.Clock(1e9, 100)
    factors = []
    for clock.done in range(100):
        factors.append(clock.factor)
    assert factors[0] < 0.1
    assert max(factors) == pytest.approx(1.0)
    assert factors[-1] < 0.03


def test_train_and_restart_give_the_same_loss(tmp_path: Path) -> None:
    arrays = {name: texts(1200, i).numpy().astype(np.uint16) for i, name in enumerate(corpus.SPLITS)}
    arrays["heldout_prompts"] = texts(4 * 288, 9).numpy().astype(np.uint16).reshape(4, 288)
    corpus.pack(arrays, tmp_path / "corpus.npz.xz")
    common = ["--data", str(tmp_path / "corpus.npz.xz"), *(word for s in SETTINGS.split() for word in ("--set", s))]
    main(["--out", str(tmp_path / "one"), *common])
    main(["--phase", "drafter", "--restart", str(tmp_path / "one"), "--out", str(tmp_path / "two"), *common])
    first, second = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "two"))
    assert second["loss"]["heldout"]["loss"] == pytest.approx(first["loss"]["heldout"]["loss"], abs=2e-3)
    assert first["acceptance_heldout"]["free_running"]["16"] >= 1.0
    assert (tmp_path / "two" / "drafter" / "model.safetensors").exists()
