"""What a request may say: fields that ask for nothing, two forms of one prompt, and one shape for every error."""

from __future__ import annotations

import json
import threading

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from treeverify.serve import body
from treeverify.serve.app import build
from treeverify.serve.protocol import GenerateRequest, SetState
from treeverify.serve.server import Setup, load

SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDTREE_VERIFY", "off")
        patch.delenv("TREEVERIFY_FAULT", raising=False)
        return load(Setup())


@pytest.fixture(scope="module")
def client(served):
    with TestClient(build(served), raise_server_exceptions=False) as started:
        yield started


def tokens(client, **fields):
    answer = client.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def message(answer, status):
    """The one line of an error, whose body has nothing else."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().items()
    assert error[0] == "error"
    assert set(error[1]) == {"message"}
    assert "\n" not in error[1]["message"]
    return error[1]["message"]


def test_what_asks_for_nothing_changes_nothing(client):
    plain = tokens(client, text="def f(", sampling_params=SHORT)
    off = {
        "lora_path": None,
        "return_routed_experts": False,
        "routed_experts_start_len": 0,
        "image_data": [],
        "session_params": {},
        "extra_key": "",
        "token_ids_logprob": None,
        "log_metrics": True,
        "priority": None,
        "stream": None,
        "return_logprob": None,
        "logprob_start_len": None,
        "top_logprobs_num": None,
        "input_ids": None,
        "rid": None,
        "a_field_of_next_year": None,
    }
    sampling = {
        "n": 1,
        "stop": [],
        "regex": "",
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "stop_token_ids": None,
        "sampling_seed": None,
    }
    assert tokens(client, text="def f(", sampling_params=SHORT | sampling, **off) == plain


def test_null_stands_for_sglangs_default(client):
    assert len(tokens(client, text="x", sampling_params=SHORT | {"temperature": None})) == 4
    assert 1 <= len(tokens(client, text="x", sampling_params=None)) <= 128
    context = 4096
    answer = client.post(
        "/generate", json={"input_ids": [9] * (context - 3), "sampling_params": SHORT | {"max_new_tokens": None}}
    )
    assert len(answer.json()["output_ids"]) == 3  # null: no limit but the context


def test_an_empty_prompt_beside_another_is_none(client, served):
    ids = served.tokenizer.encode("import os")
    plain = tokens(client, text="import os", sampling_params=SHORT)
    assert tokens(client, text="", input_ids=ids, sampling_params=SHORT) == plain
    assert tokens(client, text="import os", input_ids=[], sampling_params=SHORT) == plain


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_generate_takes_the_methods_of_sglang(client, method):
    assert client.request(method, "/generate", json={"text": "x", "sampling_params": SHORT}).status_code == 200


BODIES = [
    (b'{"text": "caf\xe9"}', "body: expected UTF-8: "),
    ('{"text": "x"}'.encode("utf-16"), "body: expected UTF-8: "),
    (b'{"text": "x"', "body: expected JSON: "),
    (b"", "body: expected JSON: "),
    (b"[" * 100_000, "body: expected JSON: "),
    (b'{"text": "x", "top_logprobs_num": ' + b"9" * 5000 + b"}", "body: expected JSON: "),
    (b'{"text": "x", "sampling_params": {"temperature": NaN}}', "body: expected JSON: NaN"),
    (b"[1, 2]", "body: "),
    (b'{"text": "x \\ud83d y"}', r"text: expected text in UTF-8, got '\ud83d' at character 2"),
    (b'{"text": "\\udce9"}', r"text: expected text in UTF-8, got '\udce9' at character 0"),
    (b'{"text": "x", "rid": "\\ude00\\ud83d"}', r"rid: expected text in UTF-8, got '\ude00' at character 0"),
    (b'{"text": "x", "\\ud83d": 1}', "body: Input should be a valid string"),
    (b'{"text": "x", "lora_path": "\\ud83d"}', r"lora_path: not a field that this server serves, got '\ud83d'"),
    (json.dumps({"text": "x", "lora_path": "y" * 5000}).encode(), "lora_path: not a field"),
    (json.dumps({"text": "x", "z" * 5000: 1}).encode(), "zzzz"),
]


@pytest.mark.parametrize(("raw", "words"), BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_not_such_a_request_is_refused_in_one_line(client, raw, words):
    line = message(client.post("/generate", content=raw), 400)
    assert line.startswith(words)
    assert len(line) < 1100


def test_a_pair_of_surrogates_is_a_character(client):
    raw = json.dumps({"text": "x \N{GRINNING FACE} y", "sampling_params": SHORT})
    assert "\\ud83d\\ude00" in raw
    assert client.post("/generate", content=raw).status_code == 200


@pytest.mark.parametrize("server_args", [{"\ud83d": 1}, {"treeverify_mode": "\ud83d"}])
def test_surrogates_in_a_switch_are_refused(client, server_args):
    line = message(client.post("/set_internal_state", content=json.dumps({"server_args": server_args})), 400)
    assert r"\ud83d" in line


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nothing/here", 404, "GET /nothing/here: Not Found"),
        ("POST", "/generate/", 404, "POST /generate/"),
        ("GET", "/generate", 405, "GET /generate: Method Not Allowed"),
        ("DELETE", "/health", 405, "DELETE /health"),
        ("GET", "/docs", 404, "GET /docs"),
        ("GET", "/caf%E9", 404, "GET /caf"),
    ],
)
def test_what_is_not_served_has_the_same_shape(client, method, path, status, words):
    answer = client.request(method, path, follow_redirects=False)
    assert message(answer, status).startswith(words)
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("route", ["/generate", "/set_internal_state"])
def test_a_body_above_the_limit_is_refused(client, monkeypatch, route):
    monkeypatch.setattr(body, "LIMIT", 100)
    exact = json.dumps({"text": "x", "sampling_params": SHORT}).encode().ljust(100)
    assert client.post("/generate", content=exact).status_code == 200
    assert message(client.post(route, content=exact + b" "), 413) == "body: expected at most 100 bytes, got 101"
    chunked = client.post(route, content=iter([exact, exact]))
    assert "content-length" not in chunked.request.headers
    assert message(chunked, 413) == "body: expected at most 100 bytes, got 200"


def test_a_fault_of_the_server_has_the_same_shape_and_a_traceback_in_its_log(served, client, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(served.worker._engine, "submit", broken)
    line = message(client.post("/generate", json={"text": "x"}), 500)
    assert line == "unexpected RuntimeError: two lines; the log has more"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.undo()
    assert client.post("/generate", json={"text": "x", "sampling_params": SHORT}).status_code == 200


def test_a_large_text_is_cut_into_tokens_beside_the_event_loop(served, client, monkeypatch):
    """The server answers meanwhile: many times, where it would be once or not at all behind the GIL."""
    encode, cutting, cut, answers = served.tokenizer.encode, threading.Event(), threading.Event(), []

    def watched(text):
        cutting.set()
        try:
            return encode(text)
        finally:
            cut.set()

    monkeypatch.setattr(served.tokenizer, "encode", watched)
    text = "def parse(path):\n    return path + 1\n" * 50_000
    asking = threading.Thread(target=lambda: answers.append(client.post("/generate", json={"text": text})))
    asking.start()
    cutting.wait()
    healthy = 0
    while not cut.is_set():
        healthy += client.get("/health").status_code == 200
    asking.join()
    assert healthy >= 5
    assert "context" in message(answers[0], 400)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (GenerateRequest, {"input_ids": ["a"] * 1000}),
        (GenerateRequest, {"text": "x", "sampling_params": {"stop_token_ids": ["a"] * 1000}}),
        (GenerateRequest, {"text": "x"} | {f"k{number}": 1 for number in range(1000)}),
        (GenerateRequest, {"text": "x", "sampling_params": {f"k{number}": 1 for number in range(1000)}}),
        (SetState, {"server_args": {f"k{number}": "a" for number in range(1000)}}),
    ],
)
def test_only_the_first_faults_of_a_request_are_looked_for(model, fields):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert 1 <= caught.value.error_count() <= 16  # a number of two kinds has two errors
