"""Starts the server: reads the environment, loads the model, binds the port, serves until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI

from treeverify import env
from treeverify.engine.engine import Engine, EngineConfig
from treeverify.engine.request import DraftOptions
from treeverify.engine.verify import Implementation, ours
from treeverify.errors import ConfigError
from treeverify.models.pair import load_pair
from treeverify.serve.app import build
from treeverify.serve.faults import plant
from treeverify.serve.generation import Served
from treeverify.serve.tally import Tally
from treeverify.serve.worker import Worker
from treeverify.text import escaped

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GRACE = 10
"""Seconds that running requests get after SIGTERM; they then end with status 503."""
_LAST = 5
"""Seconds after that in which a client has to take its answer."""


@dataclass(frozen=True)
class Setup:
    """What the command line asked for."""

    host: str = "127.0.0.1"
    port: int = 30000
    model: Path | None = None
    dtype: str = "float32"
    draft: str = "tree"
    budget: int | None = None
    slots: int = 8192
    max_batch: int = 16


def load(setup: Setup) -> Served:
    """A freshly loaded engine and what belongs to it; reads KDTREE_VERIFY, KDTREE_VERIFY_ALLOW and TREEVERIFY_FAULT.

    Raises ConfigError or WeightsError, one line each.
    """
    mode, allowed = env.verify_mode(), env.allowed_modes()
    mine = _mine()
    DraftOptions.of(setup.draft, setup.budget)
    if setup.dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}; got {setup.dtype!r}")
    torch.set_num_threads(env.cpu_threads())
    target, drafter, tokenizer = load_pair(setup.model, dtype=DTYPES[setup.dtype])
    config = EngineConfig(slots=setup.slots, max_batch=setup.max_batch, verify=mode)
    engine = Engine(target, drafter, tokenizer, config, mine=mine)
    tally = Tally(target.config.num_attention_heads, "split_kv", target.device)
    model = "packaged" if setup.model is None else escaped(str(setup.model))
    worker = Worker(engine, tally, allowed)
    return Served(worker, tokenizer, target.eos_token_ids, model, setup.draft, setup.budget)


def application(setup: Setup) -> FastAPI:
    """The application over a freshly loaded engine; errors are those of ``load``."""
    return build(load(setup))


class Server(uvicorn.Server):
    """uvicorn's, with requests that end after the grace: each gets an answer, where uvicorn would cancel it."""

    def __init__(self, served: Served) -> None:
        """Over ``build(served)``. A client that does not take its answer in the end is cut off."""
        cut = GRACE + _LAST
        super().__init__(
            uvicorn.Config(build(served), log_level="warning", access_log=False, timeout_graceful_shutdown=cut)
        )
        self._worker = served.worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let requests run for the grace, then end them."""
        timer = asyncio.get_running_loop().call_later(GRACE, self._worker.end)
        await super().shutdown(sockets)
        timer.cancel()


def serve(setup: Setup) -> None:
    """Serve until SIGINT or SIGTERM; ConfigError, before the model is loaded, where the port cannot be had."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with _bind(setup.host, setup.port) as listener:
        server = Server(load(setup))
        url = f"http://{_place(setup.host, listener.getsockname()[1])}"
        log.info("serving %s, KDTREE_VERIFY=%s, at %s", setup.model or "the packaged model", env.verify_mode(), url)
        # uvicorn raises the signal again once it has shut down; a stop that was asked for is not a failure
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        server.run([listener])


def _mine() -> Implementation:
    """Our kernel, or what the fault hook makes of it."""
    fault = env.planted_fault()
    if fault is None:
        return ours(None)
    log.error("TREEVERIFY_FAULT=%s: OUR KERNEL IS BROKEN ON PURPOSE; modes on and validate show it", fault)
    return plant(fault, ours(None))


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket at a name or an address (IPv6 ones with brackets or without); ``::`` takes IPv4 as well."""
    try:
        found = socket.getaddrinfo(_bare(host), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, (address, _, *rest) = min(found, key=lambda info: info[0] != socket.AF_INET)  # a name's IPv4 first
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server((address, port, *rest), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"{_place(host, port)}: cannot be bound: {error}") from None


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _place(host: str, port: int) -> str:
    """``HOST:PORT`` as a URL has it."""
    bare = _bare(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
