"""The acceptance and speed benchmarks over the packaged model, and their pages from records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.bench.conftest import ENVIRONMENT
from typer.testing import CliRunner

from treeverify.bench import acceptance, pages, record, speed
from treeverify.bench.walk import steps
from treeverify.cli.main import app
from treeverify.costs import CostTable
from treeverify.engine.budget import AutoBudget
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.errors import ConfigError
from treeverify.models.heldout import Heldout, load_heldout
from treeverify.models.pair import load_pair

NEW = 40
CASE = {
    "prompts": 2,
    "prompt_tokens": 128,
    "new_tokens": NEW,
    "depth": 7,
    "device": "cpu",
    "dtype": "float32",
    "threads": 2,
    "weights": "abc",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair():
    target, drafter, _ = load_pair()
    return target, drafter


@pytest.fixture
def acceptance_entry():
    values = {"chain": 2.0, "lookup": 1.4, "4": 2.2, "8": 2.4, "16": 2.6, "32": 2.8, "64": 3.0}
    table = {"free_running": {k: 2 * v for k, v in values.items()}, "forced_argmax": values, "forced_text": values}
    errors = {kind: dict.fromkeys(values, 0.125) for kind in acceptance.KINDS}
    measures = {"walk": table, "walk_standard_error": errors, "mean_over_starts": table}
    measures["repeated_8grams"] = {"free_running": 0.7, "true_text": 0.02}
    entry = {"benchmark": "acceptance", "impl": "treeverify", "case": CASE, "measures": measures, **ENVIRONMENT}
    record.check(entry)
    return entry


@pytest.fixture
def speed_entry():
    def mode(tokens, lengths):
        stages = {f"{name}_ms": 1.0 for name in ("draft", "tree", "verify", "accept", "commit", "other")}
        figures = {"tokens_per_second": tokens, "tokens_per_second_runs": [tokens] * 5, "acceptance_length": lengths}
        figures |= {"tokens_per_second_spread": 0.1, "tokens_per_second_with_prefill": tokens / 2}
        return {**figures, "step_ms": 6.0, "stages": stages, "prefill_ms_per_prompt": 30.0}

    modes = {"plain": mode(100.0, 1.0), "chain": mode(240.0, 4.0), "tree 16": mode(260.0, 5.0)}
    case = {**CASE, "runs": 5, "verify": "on"}
    measures = {"modes": modes, "load_average": [0.5, 2.25]}
    return {"benchmark": "speed", "impl": "treeverify", "case": case, "measures": measures, **ENVIRONMENT}


def test_the_free_running_walk_is_the_engines_own(pair):
    """Step by step, on three prompts: what the table walks over is what an engine accepts."""
    target, drafter = pair
    texts = load_heldout()[:3]
    options = acceptance.Options(NEW)
    with torch.inference_mode():
        free = list(acceptance.continuations(target, texts, NEW + drafter.depth, options))
        rows = [(own, own, len(text.prompt_ids)) for own, text in zip(free, texts, strict=True)]
        lengths = acceptance.all_lengths(target, drafter, rows, options)["free_running"]
    # Longer requests than the walk, so that the engine's last draft is as deep as the walk's.
    params = SamplingParams(max_new_tokens=NEW + drafter.depth + 1, stop_token_ids=())
    for column, draft, budget in (("chain", "chain", None), ("16", "tree", 16)):
        engine = Engine(target, drafter, config=EngineConfig(slots=512, verify="on"))
        for index, text in enumerate(texts):
            engine.metrics.reset()
            walked = steps(lengths[index, :, acceptance.COLUMNS.index(column)].tolist())
            request = engine.submit(text.prompt_ids, params, draft=draft, budget=budget)
            while sum(engine.metrics.acceptance.elements()) < NEW - 1:  # until the last start is behind
                engine.step()
            assert sum(walked) / len(walked) == engine.metrics.mean_acceptance
            assert engine.finish(request).acceptance_lengths[: len(walked)] == walked


def test_labels_of_the_targets_own_text_are_its_argmax(pair):
    """Teacher-forced on the free-running text, the argmax and the text are the same labels as free-running."""
    target, drafter = pair
    text = load_heldout()[5]
    options = acceptance.Options(12)
    with torch.inference_mode():
        (own,) = acceptance.continuations(target, [text], 12 + drafter.depth, options)
        lengths = acceptance.all_lengths(target, drafter, [(own, own, len(text.prompt_ids))], options)
    assert (lengths["free_running"] == lengths["forced_argmax"]).all()
    assert (lengths["free_running"] == lengths["forced_text"]).all()


def test_texts_that_are_too_short_are_refused(pair):
    short = Heldout("a.py", [1, 2, 3], [4] * (NEW + 6))
    with pytest.raises(ConfigError, match=r"a\.py: expected 47 tokens"):
        acceptance.measure(*pair, [short], acceptance.Options(NEW))
    with pytest.raises(ConfigError, match="at least one text"):
        acceptance.measure(*pair, [], acceptance.Options(NEW))


def test_the_command_leaves_a_record_a_page_and_a_plot(tmp_path):
    out, page = tmp_path / "r" / "acceptance.jsonl", tmp_path / "docs" / "acceptance.md"
    words = f"bench acceptance --prompts 1 --new-tokens 9 --json --out {out} --page {page}".split()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (entry,) = record.read(out, "acceptance")
    assert json.loads(done.stdout) == entry
    for kind in acceptance.KINDS:
        values = [entry["measures"]["walk"][kind][str(budget)] for budget in (4, 8, 16, 32, 64)]
        assert all(1 <= value <= 8 for value in values)
    assert "| free-running |" in page.read_text()
    assert (page.parent / "img" / "acceptance.svg").stat().st_size < 150_000


def test_the_speed_of_a_prompt_accounts_for_its_time(pair):
    flat = np.ones((2, 1, 1))
    policy = AutoBudget(CostTable((1, 9), (1,), (1,), flat, flat[0]))
    engine = Engine(*pair, config=EngineConfig(slots=512, verify="on"), policy=policy)
    modes = {name: speed.WITH_AUTO[name] for name in ("plain", "tree 8", "auto")}
    calls = []
    options = speed.Options(new_tokens=8, runs=2, modes=modes, advance=calls.append)
    found = speed.measure(engine, load_heldout()[:1], options)
    measures, auto = found["modes"], found["auto"]
    assert len(calls) == options.decodes(1) == 9
    assert auto["best"] in ("plain", "tree 8")
    assert auto["interval_95"][0] <= auto["ratio"] <= auto["interval_95"][1]
    assert measures["auto"]["acceptance_length"] == measures["tree 8"]["acceptance_length"]
    assert "9" in auto["widths"], "free nodes are all used"
    assert measures["plain"]["acceptance_length"] == 1.0
    for figures in measures.values():
        assert len(figures["tokens_per_second_runs"]) == 2
        assert sum(figures["stages"].values()) == pytest.approx(figures["step_ms"], abs=0.01)
        assert figures["stages"]["verify_ms"] > 0 <= figures["stages"]["other_ms"]
    with pytest.raises(ConfigError, match="at least one text"):
        speed.measure(engine, [], options)


def test_other_tokens_than_plain_decodings_are_no_result():
    tallies = {"plain": speed._Tally(tokens=[[1, 2]]), "tree 8": speed._Tally(tokens=[[1, 3]])}
    with pytest.raises(ConfigError, match="tree 8 gave other tokens"):
        speed._check_tokens(tallies)


def test_the_acceptance_page_shows_the_record(acceptance_entry):
    text = pages.acceptance_page(acceptance_entry, "img/a.svg")
    assert "| teacher-forced, true text | 2.00 ± 0.12 | 1.40 ± 0.12 | 2.20 ± 0.12 |" in text
    assert "| teacher-forced, argmax | 0.70x | 1.10x | 1.20x | 1.30x |" in text
    assert "abc" not in text, "the record names the commit"
    assert "![Acceptance length over the budget](img/a.svg)" in text
    assert "70% of the free-running" in text


def test_the_acceptance_plot_is_the_same_file_for_the_same_record(acceptance_entry, tmp_path):
    for name in ("a", "b"):
        pages.draw_acceptance(acceptance_entry, tmp_path / name / "plot.svg")
    first, second = ((tmp_path / name / "plot.svg").read_bytes() for name in ("a", "b"))
    assert first == second
    assert len(first) < 150_000


def test_the_speed_page_shows_the_record(speed_entry):
    record.check(speed_entry)
    text = pages.speed_page(speed_entry)
    assert "| tree 16 | 5.00 | 260 | 2.60x | 10% | 130 | 2.60x |" in text
    assert "The load average was 0.5 before and 2.2 after." in text
    assert "| chain | 6.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |" in text


def test_pages_are_made_from_the_newest_records(acceptance_entry, speed_entry, tmp_path):
    with pytest.raises(ConfigError, match="no acceptance"):
        pages.write_pages(tmp_path, tmp_path)
    for entry in (acceptance_entry | {"date": "older"}, acceptance_entry, speed_entry):
        record.append(tmp_path / f"{entry['benchmark']}.jsonl", entry)
    written = pages.write_pages(tmp_path, tmp_path / "docs")
    assert [path.name for path in written] == ["acceptance.svg", "acceptance.md", "speed.md"]
    assert written[1].read_text() == pages.acceptance_page(acceptance_entry, "img/acceptance.svg")
    assert written[2].read_text() == pages.speed_page(speed_entry)


@pytest.mark.parametrize(
    "words",
    [
        "bench attention",
        "bench acceptance --prompts 1000",
        "bench speed --verify maybe",
        "bench speed --model /nowhere",
    ],
)
def test_bad_requests_are_typed_errors(words):
    if words == "bench attention" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code != 0
    assert done.exception is not None
    assert type(done.exception).__name__ in {"ConfigError", "WeightsError"}


def test_the_page_says_how_auto_compares(speed_entry):
    assert "auto over" not in pages.speed_page(speed_entry)
    speed_entry["measures"]["auto"] = {
        "best": "chain",
        "ratio": 1.05,
        "interval_95": [0.98, 1.125],
        "widths": {"4": 30, "8": 10},
    }
    text = pages.speed_page(speed_entry)
    assert "auto over chain, the best of the others: 1.050x, 95% interval 0.980 to 1.125. The aim" in text
    assert "by share of steps: 4: 75%, 8: 25%." in text


def test_the_interval_of_auto_is_paired():
    slow = [1.0, 10.0, 100.0, 1000.0]
    tallies = {name: speed._Tally(decodes=[share * s for s in slow]) for name, share in (("auto", 1.0), ("plain", 2.0))}
    found = speed._against_best({**tallies, "chain": speed._Tally(decodes=[2000.0] * 4)})
    assert found["best"] == "plain"
    assert found["ratio"] == 2.0
    assert found["interval_95"] == [2.0, 2.0]
