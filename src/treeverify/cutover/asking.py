"""Takes a sample over HTTP: SGLang's ``/generate``, one request at a time."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from treeverify.control.client import read_state
from treeverify.control.http import OK, Connection, Response, excerpt
from treeverify.cutover.samples import Generation, Plan, Position, Probe, Progress, Prompt, Sample, Window
from treeverify.errors import AccessError, ConfigError, ServerError


class _UnusableError(Exception):
    """One request's answer cannot be used; the message says why."""


class Asking:
    """One sample in the making."""

    def __init__(self, url: str, plan: Plan, on_progress: Progress | None) -> None:
        self._plan, self._url = plan, url.rstrip("/")
        self._progress = on_progress or (lambda done, total, what: None)
        self._done, self._failures = 0, list[str]()
        self._probes = plan.probes if plan.logprobs else 0
        self._total = len(plan.prompts) * (plan.speed_passes + 1 + self._probes)

    def sample(self) -> Sample:
        """Ask everything; errors as ``samples.collect``."""
        plan = self._plan
        taken_at = datetime.now(UTC).isoformat(timespec="seconds")
        mode = served_mode(self._url, plan.timeout)
        with Connection(self._url, timeout=plan.timeout) as client:
            speed = [self._window(client, prompt, run) for run in range(plan.speed_passes) for prompt in plan.prompts]
            generations = [self._generation(client, prompt) for prompt in plan.prompts]
            probes = [
                self._probe(client, prompt, (i + 1) * len(prompt.forced) // (self._probes + 1))
                for prompt in plan.prompts
                for i in range(self._probes)
            ]
        return Sample(
            taken_at=taken_at,
            url=self._url,
            mode=mode,
            plan=plan,
            generations=[found for found in generations if found is not None],
            probes=[found for found in probes if found is not None],
            speed=[found for found in speed if found is not None],
            failures=self._failures,
        )

    def _window(self, client: Connection, prompt: Prompt, run: int) -> Window | None:
        began = perf_counter()
        found = self._ask(client, f"speed pass {run}, {prompt.name}", prompt.input, self._plan.new_tokens, False)
        if found is None:
            return None
        return Window(
            prompt=prompt.name,
            run=run,
            tokens=int(found["meta_info"]["completion_tokens"]),
            seconds=perf_counter() - began,
        )

    def _generation(self, client: Connection, prompt: Prompt) -> Generation | None:
        asked, tokens = self._plan.logprobs, self._plan.new_tokens
        found = self._ask(client, f"generation, {prompt.name}", prompt.input, tokens, asked)
        if found is None:
            return None
        meta = found["meta_info"]
        return Generation(
            prompt=prompt.name,
            positions=found["positions"] if asked else [],
            ids=[] if asked else found["output_ids"],
            verify_steps=meta.get("spec_verify_ct", 0),
            accepted=meta.get("spec_correct_drafts_histogram"),
        )

    def _probe(self, client: Connection, prompt: Prompt, offset: int) -> Probe | None:
        name = f"probe at {offset}, {prompt.name}"
        found = self._ask(client, name, prompt.upto(offset), self._plan.probe_tokens, True)
        if found is None:
            return None
        first, *rest = found["positions"]
        return Probe(prompt=prompt.name, offset=offset, first=first.token, positions=rest)

    def _ask(
        self, client: Connection, name: str, given: str | list[int], tokens: int, logprobs: bool
    ) -> dict[str, Any] | None:
        """One request; None, and a line of failures, where there is no usable answer."""
        body = _body(given, tokens, self._plan.top_logprobs if logprobs else None)
        found = None
        try:
            found = _answer(client.request("POST", "/generate", body), tokens)
            if logprobs:
                found["positions"] = positions(found["meta_info"])
            elif len(found.get("output_ids") or []) != tokens:
                raise _UnusableError(f"output_ids: expected {tokens} ids, got {found.get('output_ids')!r:.60}")
        except (ServerError, _UnusableError) as error:
            found = None
            self._failures.append(f"{name}: {error or type(error).__name__}")
        self._done += 1
        self._progress(self._done, self._total, name)
        return found


def refuses_logprobs(url: str, plan: Plan) -> str | None:
    """What the server says to a request for log-probabilities; None: it gives them, or ``plan`` wants none.

    Raises ServerError where it does not answer the same request without them either, or not at all.
    """
    given, tokens = plan.prompts[0].input, plan.probe_tokens
    with Connection(url, timeout=plan.timeout) as client:
        try:
            _answer(client.request("POST", "/generate", _body(given, tokens, None)), tokens)
        except _UnusableError as error:
            raise ServerError(f"{url}/generate: {error}") from None
        if not plan.logprobs:
            return None
        try:
            reply = client.request("POST", "/generate", _body(given, tokens, plan.top_logprobs))
            positions(_answer(reply, tokens)["meta_info"])
        except (AccessError, _UnusableError) as error:
            return str(error)
    return None


def _body(given: str | list[int], tokens: int, top_logprobs: int | None) -> dict[str, Any]:
    """One greedy request; ``top_logprobs`` None: without log-probabilities."""
    body: dict[str, Any] = {
        "text" if isinstance(given, str) else "input_ids": given,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    if top_logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    return body


def served_mode(url: str, timeout: float) -> str:
    """The mode of every rank; ConfigError if ranks differ, and the errors of ``control.client.read_state``."""
    modes = {rank.mode.value for state in read_state(url, timeout=timeout) for rank in state.ranks}
    if len(modes) != 1:
        raise ConfigError(f"{url}: expected one mode on all ranks, got {', '.join(sorted(modes))}")
    return modes.pop()


def positions(meta: dict[str, Any]) -> list[Position]:
    """Positions from ``meta_info``; raises where a log-probability is missing or not a number."""
    tokens, tops = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
    if not tokens or not tops or len(tokens) != len(tops):
        raise _UnusableError("the answer has no log-probabilities for its tokens")
    found = []
    for index, ((logprob, token, *_), top) in enumerate(zip(tokens, tops, strict=True)):
        values = [logprob, *(entry[0] for entry in top or [])]
        if not top or any(value is None or not math.isfinite(value) for value in values):
            raise _UnusableError(f"token {index}: a log-probability is missing or not finite")
        found.append(Position(token=token, logprob=logprob, top=[(entry[1], entry[0]) for entry in top]))
    return found


def _answer(reply: Response, tokens: int) -> dict[str, Any]:
    """The answer's object; raises for an HTTP error, another form or another number of tokens."""
    if reply.status_code != OK:
        raise _UnusableError(f"HTTP {reply.status_code}: {excerpt(' '.join(reply.text.split()))}")
    try:
        found = reply.json()
        count = found["meta_info"]["completion_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise _UnusableError(f"not an answer in SGLang's form: {error!r}") from None
    if count != tokens:
        raise _UnusableError(f"expected {tokens} tokens, got {count}")
    assert isinstance(found, dict)
    return found
