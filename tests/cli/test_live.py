"""``mode``, ``probe`` and ``replay`` as an operator runs them: text, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from tests.control.stub import BACKEND, Stub, rank, serving, state

from treeverify.control import client
from treeverify.observe.calls import load, save

LIVE = Path(__file__).parents[1] / "data" / "live_verify_eager.safetensors"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.delenv("TREEVERIFY_API_KEY", raising=False)
    monkeypatch.setattr(client, "SETTLE_S", 0.2)
    with serving(Stub(state(), state())) as running:
        yield running


def test_mode_switches_every_rank_and_says_so(run, stub: Stub) -> None:
    code, out, _ = run("mode", stub.url, "on")
    assert (code, out) == (0, "mode on: 4 ranks in 2 groups, since step 40\n")
    assert {r["mode"] for group in stub.groups for r in group["treeverify"]["ranks"]} == {"on"}


def test_a_switch_that_a_rank_does_not_follow_has_exit_code_1(run, stub: Stub) -> None:
    stub.deaf_ranks = 1
    code, out, err = run("mode", stub.url, "on")
    assert (code, out) == (1, "")
    assert "group 1, rank 1: validate" in err


def test_an_unknown_mode_asks_for_nothing(run, stub: Stub) -> None:
    for arguments in (("mode", stub.url, "maybe"), ("probe", stub.url, "--expect", "ON")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert "expected one of off, validate, on" in err
        assert err.count("\n") == 1
    assert stub.posts == []


@pytest.mark.parametrize("arguments", [("probe", "http://127.0.0.1:1"), ("mode", "http://127.0.0.1:1", "on")])
def test_a_server_that_is_not_there_is_one_line_and_exit_code_2(run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("treeverify: http://127.0.0.1:1/server_info: ")
    assert err.count("\n") == 1


def test_a_server_without_the_plugin_has_exit_code_2(run, stub: Stub) -> None:
    stub.groups[0] = {"max_total_num_tokens": 5}
    code, _, err = run("probe", stub.url, "--interval", "0")
    assert code == 2
    assert "the plugin is not loaded" in err


def test_the_key_is_sent(run, stub: Stub) -> None:
    stub.key = "secret"
    assert run("probe", stub.url, "--interval", "0")[0] == 2
    assert run("probe", stub.url, "--interval", "0", "--api-key", "secret")[0] == 0


def test_probe_shows_what_every_rank_serves(run, stub: Stub) -> None:
    code, out, err = run("probe", stub.url, "--interval", "0", "--expect", "validate")
    assert (code, err) == (0, "")
    assert "group 1: treeverify 0.1.0 in sglang 0.5.17" in out
    for expected in (
        "portable",
        "validate 4",
        "on 7",
        "1024 rows, NaN/Inf differ in 0",
        "worst 1 of 2 ULP",
        "layer 0, node 3, head 7",
        "0 breaches, 0 dumped",
        "torch.uint8",
    ):
        assert expected in out
    assert "problem" not in out


def test_probe_as_json_repeats_the_state(run, stub: Stub) -> None:
    code, out, _ = run("probe", stub.url, "--interval", "0", "--json")
    report = json.loads(out)
    assert (code, report["exit_code"], report["problems"], report["breaches"]) == (0, 0, [], 0)
    assert report["groups"] == [group["treeverify"] for group in stub.groups]


def test_probe_fails_where_the_mode_is_not_the_expected_one(run, stub: Stub) -> None:
    code, out, _ = run("probe", stub.url, "--interval", "0", "--expect", "on")
    assert code == 1
    assert "problem: group 0, rank 0: mode validate, expected on" in out


def test_probe_fails_where_nothing_of_ours_serves(run, stub: Stub) -> None:
    stub.groups = [{"treeverify": state(rank(0, mode="on", backends=[]))}]
    code, out, _ = run("probe", stub.url, "--interval", "0")
    assert code == 1
    assert "no backend of ours" in out


def test_probe_watches_for_calls_that_are_left_to_the_parent(run, stub: Stub) -> None:
    def grow(stub: Stub) -> None:
        left = stub.groups[0]["treeverify"]["ranks"][0]["backends"][0]["left_to_parent"]
        left["option sinks"] = left.get("option sinks", 0) + 1

    stub.on_read = grow
    assert run("probe", stub.url, "--interval", "0")[0] == 0
    code, out, _ = run("probe", stub.url, "--interval", "0.01")
    assert code == 1
    assert "1 calls left to SGLang's kernel" in out


def test_breaches_have_an_exit_code_of_their_own(run, stub: Stub) -> None:
    bad = {**BACKEND, "breaches": 2, "dumps": 1}
    stub.groups = [{"treeverify": state(rank(0, backends=[bad]))}]
    code, out, _ = run("probe", stub.url, "--interval", "0")
    assert code == 3
    assert "problem: 2 validate calls beyond the bound" in out
    assert json.loads(run("probe", stub.url, "--interval", "0", "--json")[1])["exit_code"] == 3
    assert run("probe", stub.url, "--interval", "0", "--expect", "on")[0] == 1


@pytest.mark.parametrize("interval", ["-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(run, stub: Stub, interval: str) -> None:
    assert run("probe", stub.url, "--interval", interval)[0] == 2


@pytest.mark.slow
def test_the_embedded_server_is_probed_and_switched(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    monkeypatch.setenv("KDTREE_VERIFY_ALLOW", "off,validate")
    monkeypatch.delenv("TREEVERIFY_API_KEY", raising=False)
    command = [sys.executable, "-m", "treeverify", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(line.rsplit(maxsplit=1)[1] for line in server.stderr if " at http://" in line)
            assert run("probe", url, "--expect", "off", "--interval", "0")[0] == 0
            assert run("mode", url, "validate")[0] == 0
            body = {"text": "import os\n", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
            assert httpx.post(f"{url}/generate", json=body, timeout=None).status_code == 200
            code, out, _ = run("probe", url, "--expect", "validate", "--interval", "0", "--json")
            backend = json.loads(out)["groups"][0]["ranks"][0]["backends"][0]
            assert (code, backend["served"]["off"]["calls"]) == (0, 0)
            assert backend["served"]["validate"]["calls"] > 0
            assert sum(layer["rows"] for layer in backend["layers"]) > 0
            code, _, err = run("mode", url, "on")
            assert code == 1
            assert "allows off, validate" in err
        finally:
            server.terminate()


def test_replay_measures_the_live_case(run) -> None:
    code, out, _ = run("replay", str(LIVE), "--device", "cpu")
    assert code == 0
    assert "16 nodes, 8 heads, 37 prefix rows, torch.bfloat16" in out
    assert "recorded baseline" in out
    assert "split_kv stands for ours" in out
    code, out, _ = run("replay", str(LIVE), "--device", "cpu", "--json")
    report = json.loads(out)
    assert (code, report["worse"], report["judged"], report["prefix"]) == (0, False, "split_kv", 37)
    assert [result["name"] for result in report["results"]][:2] == ["recorded baseline", "split_kv"]


def test_replay_of_a_wrong_result_has_exit_code_1(run, tmp_path: Path) -> None:
    call = load(LIVE)
    wrong = call.baseline.clone()
    wrong[4, 2] *= 1.1
    path = tmp_path / "dump.safetensors"
    save(replace(call, ours=wrong, notes={"layer": "3"}), path)
    code, out, _ = run("replay", str(path), "--device", "cpu", "--json")
    report = json.loads(out)
    assert (code, report["worse"], report["notes"]) == (1, True, {"layer": "3"})
    assert (report["results"][1]["node"], report["results"][1]["head"]) == (4, 2)


def test_replay_json_is_json_where_a_figure_is_infinite(run, tmp_path: Path) -> None:
    call = load(LIVE)
    blind = replace(call, kbuf=call.kbuf[:0], visible=torch.zeros(16, 16, dtype=torch.bool))
    path = tmp_path / "dump.safetensors"
    save(replace(blind, ours=torch.zeros_like(call.baseline)), path)
    code, out, _ = run("replay", str(path), "--device", "cpu", "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert (code, found["results"][0]["relative"]) == (0, None)


@pytest.mark.parametrize("keep", [0, 1000])
def test_replay_of_a_bad_file_is_one_line_and_exit_code_2(run, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(LIVE.read_bytes()[:keep])
    for file in (path, tmp_path / "none.safetensors"):
        code, out, err = run("replay", str(file))
        assert (code, out) == (2, "")
        assert err.startswith(f"treeverify: {file}: not a readable safetensors file")
        assert err.count("\n") == 1


def test_replay_refuses_a_device_that_is_not_here(run) -> None:
    assert run("replay", str(LIVE), "--device", "tpu")[0] == 2
    if not torch.cuda.is_available():
        assert run("replay", str(LIVE), "--device", "cuda")[0] == 2
