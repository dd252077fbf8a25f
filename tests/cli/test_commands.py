"""The commands as a user runs them: what they print, and one clear line with exit code 2 for bad input."""

from __future__ import annotations

import json
import shutil

import pytest

from treeverify.bench import step_costs
from treeverify.models.packaged import assets


@pytest.fixture
def pair(tmp_path):
    """A copy of the packaged model that a test may damage."""
    folder = tmp_path / "pair"
    shutil.copytree(assets(), folder)
    return folder


def test_generate_streams_the_text_that_json_reports(run):
    arguments = ("generate", "def main(argv):\n", "--max-new-tokens", "24")
    code, text, log = run(*arguments)
    assert code == 0
    assert "tokens per step" in log
    code, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert code == 0
    assert text.rstrip("\n") == report["text"].rstrip("\n")
    assert len(report["tokens"]) == 24
    assert sum(report["acceptance_lengths"]) == 23
    assert report["verify_mode"] == "off"


def test_every_draft_and_mode_gives_the_same_tokens(run, monkeypatch):
    found = []
    for draft, mode in [("none", "off"), ("chain", "on"), ("tree", "validate"), ("tree", "on")]:
        monkeypatch.setenv("KDTREE_VERIFY", mode)
        code, out, _ = run("generate", "import os\n", "--draft", draft, "--max-new-tokens", "32", "--json")
        assert code == 0
        found.append(json.loads(out))
    assert all(report["tokens"] == found[0]["tokens"] for report in found)
    validate = found[2]["validate"]
    assert validate["calls"] > 0
    assert validate["mismatched"] == validate["failures"] == 0
    assert validate["max_relative"] < 1e-5


def test_a_seed_fixes_the_text(run):
    arguments = ("generate", "class A:\n", "--temperature", "1", "--seed", "7", "--max-new-tokens", "16", "--json")
    first, second = (json.loads(run(*arguments)[1]) for _ in range(2))
    plain = json.loads(run(*arguments, "--draft", "none")[1])
    assert first["tokens"] == second["tokens"] == plain["tokens"]


def test_prompt_from_a_file(run, tmp_path):
    file = tmp_path / "prompt.py"
    file.write_text("import os\n")
    _, direct, _ = run("generate", "import os\n", "--max-new-tokens", "8", "--json")
    _, read, _ = run("generate", "--file", str(file), "--max-new-tokens", "8", "--json")
    assert json.loads(direct)["tokens"] == json.loads(read)["tokens"]


def test_auto_measures_once_and_gives_the_same_tokens(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path))
    small = step_costs.Grid(widths=(1, 4, 9), contexts=(16,), rounds=1)
    monkeypatch.setattr(step_costs, "Grid", lambda: small)
    arguments = ("generate", "import os\n", "--max-new-tokens", "24", "--json")
    fixed = json.loads(run(*arguments)[1])
    code, out, _ = run(*arguments, "--budget", "auto")
    assert code == 0
    assert json.loads(out)["tokens"] == fixed["tokens"]
    assert {int(width) for width in json.loads(out)["widths"]} <= set(range(1, 10))
    (file,) = (tmp_path / "costs").iterdir()

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(step_costs, "measure", refuse)
    assert json.loads(run(*arguments, "--budget", "auto")[1])["tokens"] == fixed["tokens"]
    file.write_text("{")
    with pytest.raises(AssertionError, match="measured again"):
        run(*arguments, "--budget", "auto")


@pytest.mark.slow
def test_demo_reports_same_tokens_and_writes_a_self_contained_page(run, tmp_path):
    page = tmp_path / "demo.html"
    code, out, _ = run("demo", "--prompts", "2", "--new-tokens", "40", "--html", str(page), "--json")
    report = json.loads(out)
    assert code == 0
    assert [r["draft"] for r in report["runs"]] == ["none", "chain", "tree"]
    assert [r["same_tokens"] for r in report["runs"]] == [None, True, True]
    assert all(sum(n * (i + 1) for i, n in enumerate(r["histogram"])) == r["tokens"] for r in report["runs"])
    assert report["runs"][2]["acceptance_length"] > 1.5
    assert report["validate_run"]["same_tokens"]
    assert report["validate_run"]["calls"] > 0
    html = page.read_text()
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html
    assert html.count('class="node accepted"') == len(report["step"]["path"])


BAD = [
    (["generate"], "give either PROMPT or --file"),
    (["generate", "x", "--file", "y"], "give either PROMPT or --file"),
    (["generate", "--file", "no-such-file"], "no-such-file"),
    (["generate", "x", "--draft", "bush"], "none, chain, tree"),
    (["generate", "x", "--budget", "-1"], "budget: expected an integer 0..256"),
    (["generate", "x", "--budget", "large"], "budget: expected an integer or auto, got 'large'"),
    (["generate", "x", "--draft", "chain", "--budget", "auto"], "budget: auto needs draft tree"),
    (["demo", "--budget", "0"], "budget: expected an integer 1..256"),
    (["generate", "x", "--temperature", "-0.5"], "temperature: expected a finite number >= 0"),
    (["generate", "x", "--temperature", "nan"], "temperature"),
    (["generate", "x", "--top-p", "0"], "top_p"),
    (["generate", "x", "--top-k", "0"], "top_k"),
    (["generate", "x", "--min-p", "2"], "min_p"),
    (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens"),
    (["generate", "x", "--seed", "-3"], "seed"),
    (["generate", "a b " * 5000], "context"),
    (["generate", "x", "--model", "no-such-folder"], "target/ is missing"),
    (["demo", "--prompts", "5000"], "prompts: expected 1.."),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: None)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_unknown_verify_mode_lists_the_three(run, monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "On")
    code, _, err = run("generate", "x")
    assert code == 2
    assert "off, validate, on" in err


def test_damaged_models_are_refused(run, pair):
    weights = pair / "target" / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"not a safetensors file"):
        weights.write_bytes(damage)
        code, _, err = run("generate", "x", "--model", str(pair))
        assert code == 2
        assert "model.safetensors" in err
        assert len(err.strip().splitlines()) == 1
    weights.write_bytes(whole)
    config = pair / "target" / "config.json"
    changed = json.loads(config.read_text())
    del changed["kv_lora_rank"]
    config.write_text(json.dumps(changed | {"architectures": ["LlamaForCausalLM"]}))
    code, _, err = run("generate", "x", "--model", str(pair))
    assert code == 2
    assert "LlamaForCausalLM" in err
