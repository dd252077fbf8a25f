"""The HTTP server over the packaged model: SGLang's form, live switches, refusals by name, failing steps."""

from __future__ import annotations

import json
import math
import re

import pytest
from fastapi.testclient import TestClient
from tests.serve.conftest import ask, rank, switch

from treeverify.control.schema import PluginState
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import SamplingParams
from treeverify.models.pair import load_pair
from treeverify.serve.faults import NAMES
from treeverify.serve.server import Setup, application


def test_an_answer_is_the_engines_in_sglangs_form(serve):
    client = serve()
    found = ask(client, return_logprob=True, top_logprobs_num=3, rid="mine").json()
    target, drafter, tokenizer = load_pair()
    engine = Engine(target, drafter, config=EngineConfig(verify="off"))
    params = SamplingParams(max_new_tokens=16, stop_token_ids=())
    request = engine.submit(tokenizer.encode("def parse(path):"), params, top_logprobs=3)
    result = engine.finish(request)
    meta = found["meta_info"]
    assert found["output_ids"] == result.tokens
    assert found["text"] == tokenizer.decode(result.tokens)
    assert meta["id"] == "mine"
    assert meta["completion_tokens"] == 16
    assert meta["finish_reason"] == {"type": "length", "length": 16}
    assert meta["spec_verify_ct"] == len(result.acceptance_lengths)
    assert meta["spec_accept_length"] == 16 / len(result.acceptance_lengths)
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum((n + 1) * count for n, count in enumerate(histogram)) == sum(result.acceptance_lengths)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == result.tokens
    for (logprob, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert (logprob, token) == (top[0][0], top[0][1])  # greedy: the token is the likeliest
        assert sum(math.exp(entry[0]) for entry in top) <= 1 + 1e-9
        assert [entry[0] for entry in top] == sorted((entry[0] for entry in top), reverse=True)


def test_log_probabilities_of_a_tree_are_those_of_plain_decoding(serve):
    tree, plain = (
        ask(serve(draft=draft), return_logprob=True).json()["meta_info"]["output_token_logprobs"]
        for draft in ("tree", "none")
    )
    # same tokens; the log-probabilities come from batches of other shapes, so fp32 sums in another order
    assert [entry[1] for entry in tree] == [entry[1] for entry in plain]
    assert [entry[0] for entry in tree] == pytest.approx([entry[0] for entry in plain], abs=1e-4)


def test_a_live_switch_takes_effect_and_is_counted(serve):
    client = serve(mode="off", allow="off,validate")
    before = ask(client).json()["output_ids"]
    assert rank(client)["backends"][0]["layers"] == []
    assert switch(client, 1) == [True]
    assert ask(client).json()["output_ids"] == before
    assert switch(client, 2) == [False]
    entry = client.get("/server_info").json()["internal_states"][0]["treeverify"]
    now = PluginState.model_validate_json(json.dumps(entry)).ranks[0]
    assert (now.mode, now.switches) == ("validate", 1)
    backend = now.backends[0]
    assert [layer.layer for layer in backend.layers] == [0, 1, 2, 3]
    assert {layer.rows for layer in backend.layers} == {backend.served["validate"].rows}
    assert backend.breaches == 0
    assert max(layer.max_row_ulp for layer in backend.layers) < 0.5
    assert {tuple(shape.modes) for shape in backend.shapes if shape.nodes == 17} == {("off", "validate")}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "x", "stop": "y"}, "stop: not a field"),
        ({"text": "x", "sampling_params": {"n": 2}}, "sampling_params.n: not a field"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"text": "x", "stream": "true"}, "stream: "),
        ({"text": ["x", "y"]}, "text: "),
        ({"text": "x", "lora_path": "adapter"}, "lora_path: not a field"),
        ({"text": "x", "return_routed_experts": True}, "return_routed_experts: not a field"),
        ({"text": "x", "routed_experts_start_len": 5}, "routed_experts_start_len: not a field"),
        ({"text": "x", "log_metrics": False}, "log_metrics: not a field"),
        ({"text": "x", "priority": 0}, "priority: not a field"),
        ({"text": "x", "sampling_params": {"stop": ["y"]}}, "sampling_params.stop: not a field"),
        ({"text": "x", "sampling_params": {"skip_special_tokens": False}}, "sampling_params.skip_special_tokens"),
        ({"text": "x", "sampling_params": {"frequency_penalty": 0.5}}, "sampling_params.frequency_penalty"),
        ({"text": "x", "sampling_params": {"stream_interval": 4}}, "sampling_params.stream_interval"),
        ({"text": "x", "sampling_params": {"temperature": False}}, "sampling_params.temperature"),
        ({"text": "x", "top_logprobs_num": 3}, "top_logprobs_num: needs return_logprob"),
        ({"text": "x", "return_logprob": False, "top_logprobs_num": 1}, "top_logprobs_num: needs return_logprob"),
        ({"text": "x", "return_logprob": None, "token_ids_logprob": [1]}, "token_ids_logprob: not a field"),
        ({"text": "x", "return_text_in_logprobs": True}, "return_text_in_logprobs: not a field"),
        ({"text": "x", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "x", "input_ids": [1]}, "text and input_ids|both"),
        ({}, "neither"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [99999]}, r"prompt_ids\[0\]"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 5000}, "top_logprobs"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 10**9}, "budget": 3}, "budget: not a field"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(shared, body, words):
    answer = shared.post("/generate", json=body)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize(
    "arguments", [{"treeverify_mode": "on"}, {"treeverify_mode": 3}, {"treeverify_mode": 1.5}, {}, {"other": 1}]
)
def test_a_switch_to_something_else_is_refused_and_changes_nothing(shared, arguments):
    before = rank(shared)["mode"]
    answer = shared.post("/set_internal_state", json={"server_args": arguments})
    assert answer.status_code == 400
    assert rank(shared)["mode"] == before


def test_metrics_name_the_mode_and_count_tokens(serve):
    client = serve(mode="validate")
    ask(client, tokens=8)
    text = client.get("/metrics").text
    assert 'treeverify_mode{group="0",mode="validate",rank="0"} 1.0' in text
    assert "treeverify_generated_tokens_total 8.0" in text
    assert 'treeverify_validate_rows_total{group="0",rank="0"}' in text


@pytest.mark.parametrize("fault", NAMES)
def test_each_fault_shows_in_validate_but_is_not_served(serve, shared, fault):
    right = ask(shared).json()["output_ids"]
    client = serve(fault, mode="validate")
    assert ask(client).json()["output_ids"] == right
    layers = {layer["layer"]: layer for layer in rank(client)["backends"][0]["layers"]}
    if fault == "nan-head":
        assert layers[1]["mismatched_rows"] == layers[1]["rows"] // 8
        assert layers[1]["worst_head"] == 7
    elif fault == "one-head-2ulp":
        assert layers[1]["max_row_ulp"] == pytest.approx(2, abs=0.5)
        assert (layers[1]["worst_head"], layers[0]["max_row_ulp"] < 0.5) == (0, True)
        assert sum(layers[1]["histogram"][3:]) == layers[1]["rows"] // 8
    else:
        assert layers[1]["max_row_ulp"] > 2


def test_a_step_that_raises_ends_its_requests_and_the_server_goes_on(serve):
    client = serve("nan-head", mode="on")
    answer = ask(client)
    assert answer.status_code == 500
    assert "logits: request" in answer.json()["error"]["message"]
    assert "treeverify_failed_requests_total 1.0" in client.get("/metrics").text
    assert client.get("/health").status_code == 200
    assert switch(client, 0) == [True]
    assert ask(client).status_code == 200


@pytest.fixture(scope="module")
def shared():
    """One healthy server for tests that change nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDTREE_VERIFY", "off")
        patch.delenv("TREEVERIFY_FAULT", raising=False)
        app = application(Setup())
    with TestClient(app) as client:
        yield client
