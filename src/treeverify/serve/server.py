"""Starts the server: reads the environment, loads the model, binds the port, serves until a signal."""

from __future__ import annotations

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
from treeverify.serve.app import Served, build
from treeverify.serve.faults import plant
from treeverify.serve.tally import Tally
from treeverify.serve.worker import Worker

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GRACE = 10
"""Seconds that running requests get after SIGTERM."""


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


def application(setup: Setup) -> FastAPI:
    """The application over a freshly loaded engine; reads KDTREE_VERIFY, KDTREE_VERIFY_ALLOW and TREEVERIFY_FAULT.

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
    model = "packaged" if setup.model is None else str(setup.model)
    worker = Worker(engine, tally, allowed)
    return build(Served(worker, tokenizer, target.eos_token_ids, model, setup.draft, setup.budget))


def serve(setup: Setup) -> None:
    """Serve until SIGINT or SIGTERM; ConfigError, before the model is loaded, where the port cannot be had."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with _bind(setup.host, setup.port) as listener:
        app = application(setup)
        place = f"http://{setup.host}:{listener.getsockname()[1]}"
        log.info("serving %s, KDTREE_VERIFY=%s, at %s", setup.model or "the packaged model", env.verify_mode(), place)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
        # uvicorn raises the signal again once it has shut down; a stop that was asked for is not a failure
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        uvicorn.Server(config).run([listener])


def _mine() -> Implementation:
    """Our kernel, or what the fault hook makes of it."""
    fault = env.planted_fault()
    if fault is None:
        return ours(None)
    log.error("TREEVERIFY_FAULT=%s: OUR KERNEL IS BROKEN ON PURPOSE; modes on and validate show it", fault)
    return plant(fault, ours(None))


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port}: cannot be bound: {error}") from None
