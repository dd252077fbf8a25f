"""Streams in SGLang's form, and requests that end with their client or with the server."""

from __future__ import annotations

import json
import logging
import socket
import threading
from itertools import pairwise

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.serve.conftest import ask

from treeverify.engine.request import SamplingParams
from treeverify.serve import server as server_module
from treeverify.serve.app import build
from treeverify.serve.generation import EventStream
from treeverify.serve.server import Setup, load

LONG = {"max_new_tokens": None, "temperature": 0, "ignore_eos": True}


def events(answer):
    """The events of a stream, parsed; its last one says that it is complete."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in found)
    return [json.loads(event.removeprefix("data: ")) for event in found]


def without_time(answer):
    meta = {name: value for name, value in answer["meta_info"].items() if name != "e2e_latency"}
    return answer | {"meta_info": meta}


def test_the_payload_of_sglangs_benchmark_client_streams(serve):
    client = serve()
    payload = {
        "text": "def parse(path):",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    found = events(client.post("/generate", json=payload | {"rid": "mine"}))
    whole = client.post("/generate", json=payload | {"rid": "mine", "stream": False}).json()
    assert without_time(found[-1]) == without_time(whole)
    assert 1 < len(found) <= 1 + whole["meta_info"]["spec_verify_ct"]  # one for prefill's token and one for each step
    for earlier, later in pairwise(found):
        assert earlier["meta_info"]["finish_reason"] is None
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["completion_tokens"] == len(earlier["output_ids"]) < len(later["output_ids"])
        assert earlier["meta_info"]["prompt_tokens"] == later["meta_info"]["prompt_tokens"]
        assert earlier["meta_info"]["id"] == "mine"


def test_log_probabilities_stream_with_their_tokens(serve):
    client = serve()
    fields = {"return_logprob": True, "top_logprobs_num": 2, "rid": "same"}
    found = events(ask(client, stream=True, **fields))
    whole = ask(client, **fields).json()
    assert without_time(found[-1]) == without_time(whole)
    assert len(found) > 1
    for event in found:
        meta, told = event["meta_info"], len(event["output_ids"])
        assert meta["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:told]
        assert meta["output_top_logprobs"] == whole["meta_info"]["output_top_logprobs"][:told]


@pytest.mark.parametrize(
    ("fields", "words"), [({"input_ids": []}, "at least one token"), ({"text": "x " * 5000}, "context")]
)
def test_a_refusal_has_its_status_in_a_stream_too(serve, fields, words):
    answer = serve().post("/generate", json=fields | {"stream": True})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_step_that_raises_is_the_last_event_or_the_status_if_it_is_the_first(monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    served = load(Setup())
    step, steps, streamed = served.worker._engine.step, [], threading.Event()

    def breaks():
        steps.append(None)
        if len(steps) == 1:
            return step()
        streamed.wait()
        raise RuntimeError("broken")

    monkeypatch.setattr(served.worker._engine, "step", breaks)
    monkeypatch.setattr(EventStream, "__call__", _after(streamed, EventStream.__call__))
    with TestClient(build(served)) as client:
        *pieces, last = events(ask(client, stream=True))
        assert pieces
        assert last == {"error": {"message": "a step failed: RuntimeError: broken"}}
        answer = ask(client, stream=True)
        assert (answer.status_code, answer.json()) == (500, last)
        assert count(client, "treeverify_failed_requests_total") == 2
        assert client.get("/health").status_code == 200


def _after(streamed, call):
    """``call``, which first says that the stream has begun."""

    async def called(self, scope, receive, send):
        async def told(message):
            await send(message)
            if message.get("more_body"):
                streamed.set()

        await call(self, scope, receive, told)

    return called


def count(client, name):
    return float(client.get("/metrics").text.split(f"\n{name} ")[1].split("\n")[0])


def until_it_runs(client):
    """Return once a verify step has run; every reading waits for a step's end."""
    while 'treeverify_verify_passes_total{group="0",mode="off",rank="0"} 0.0' in client.get("/metrics").text:
        pass


def until_aborted(client):
    """Return once one request was aborted, which has to be before any has ended."""
    while count(client, "treeverify_aborted_requests_total") == 0:
        assert count(client, "treeverify_generated_tokens_total") == 0
    assert count(client, "treeverify_generated_tokens_total") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_when_its_client_hangs_up(live, caplog, stream):
    with live() as (server, client):
        raw = _connection(client, {"text": "import os", "sampling_params": LONG, "stream": stream})
        until_it_runs(client)
        if stream:
            assert b"data: " in raw.recv(1000)
        raw.close()
        until_aborted(client)
        assert server._worker._engine.busy is False
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_no_trace(live, caplog):
    with live() as (_, client):
        raw = _connection(client, {"text": "x"}, missing=10)
        raw.close()
        assert ask(client).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def _connection(client, fields, missing=0):
    """A connection that has sent a request, all but the last ``missing`` bytes of its body."""
    raw = socket.create_connection((client.base_url.host, client.base_url.port))
    body = json.dumps(fields).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body[: len(body) - missing])
    return raw


def test_a_cancelled_request_is_aborted_within_a_step_and_its_slots_are_free(monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    worker = load(Setup()).worker
    told, running = [], threading.Event()

    def listen(tokens, logprobs):
        told.extend(tokens)
        running.set()

    worker.start()
    params = SamplingParams(max_new_tokens=4000, stop_token_ids=())
    answer = worker.generate([5, 6, 7], params, listen=listen)
    waiting = worker.generate([5, 6, 7], params)
    running.wait()
    assert answer.cancel()
    assert waiting.cancel()
    worker.state().result()  # asked after the cancelling, between the same two steps
    audit = worker._engine.audit()
    worker.stop()
    assert (audit.available, audit.held) == (audit.capacity, {})
    assert not worker._engine.busy
    assert len(told) < 4000


def test_requests_get_503_when_the_server_has_to_end(live, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "GRACE", 0)
    answers: dict[bool, httpx.Response] = {}
    with live() as (server, client):

        def post(stream):
            fields = {"text": "import os", "sampling_params": LONG, "stream": stream}
            answers[stream] = client.post("/generate", json=fields)

        threads = [threading.Thread(target=post, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        until_it_runs(client)
        while len(server._worker._waiting) < 2:
            client.get("/server_info")
        server.should_exit = True
        for thread in threads:
            thread.join()
    assert answers[False].status_code == 503
    line = {"error": {"message": "the server is shutting down"}}
    assert answers[False].json() == line
    *pieces, last = events(answers[True])
    assert pieces
    assert last == line
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_client_that_never_finishes_its_request_is_cut_off_without_a_traceback(live, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "GRACE", 0)
    monkeypatch.setattr(server_module, "_LAST", 0)
    with live() as (server, client):
        raw = _connection(client, {"text": "x"}, missing=10)
        while not server.server_state.tasks:
            client.get("/health")
        server.should_exit = True
        answer = b"".join(iter(lambda: raw.recv(1000), b""))
        raw.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b'{"error":{"message":"the server is shutting down"}}')
    assert [record for record in caplog.records if record.exc_info] == []


def test_an_ended_worker_refuses_and_says_so(monkeypatch):
    monkeypatch.setenv("KDTREE_VERIFY", "off")
    served = load(Setup())
    with TestClient(build(served)) as client:
        assert ask(client).status_code == 200
        served.worker.end()
        served.worker.end()
        for answer in (ask(client), client.get("/health"), client.get("/server_info"), client.get("/metrics")):
            assert answer.status_code == 503
            assert answer.json() == {"error": {"message": "the server is shutting down"}}
