"""Registration of DDTREE with SGLang, and what this process says of it in the info query under the key ``ddtree``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeverify.errors import ConfigError
from treeverify.integrations.sglang.additions import Failed, attempt
from treeverify.integrations.sglang.compat import metrics_enabled, place
from treeverify.integrations.sglang.ddtree import algorithm, compat, draft_backend, hooks
from treeverify.integrations.sglang.ddtree.exported import Exported
from treeverify.integrations.sglang.ddtree.metrics import Metrics

KEY = "ddtree"
_block: int | None = None
_workers: list[Metrics] = []


def register() -> None:
    """Register the algorithm; touches no device and loads no kernel. Called by ``plugin.activate`` in each process."""
    hooks.register(algorithm.NAME, _factory, _fill, _known_block)


def report() -> dict[str, object] | None:
    """Return the counters of this process's worker, None if DDTREE does not run here."""
    return _workers[-1].report() if _workers else None


def _factory(server_args: Any) -> type:
    from treeverify.integrations.sglang.ddtree.worker import extend

    del server_args
    hooks.install(algorithm.NAME, algorithm.refuse_request)
    hooks.add_to_report(KEY, report)
    return extend(compat.worker_class(), _read_block, _add)


def _add(metrics: Metrics, runner: Any) -> Callable[[], None]:
    """Report ``metrics`` from now on; returns what exports them now and then, if this server does so."""
    _workers.append(metrics)
    exported = [Exported(*place(runner))] if metrics_enabled() else []

    def tick() -> None:
        for one in exported:
            one.tick(metrics)

    def export() -> None:
        if isinstance(attempt(tick), Failed):
            exported.clear()  # for good, or it would be tried after each step

    return export


def _fill(server_args: Any) -> None:
    algorithm.fill(server_args, _read_block(server_args), server_args.device)
    if server_args.speculative_draft_attention_backend is None:
        config = compat.draft_config(server_args)
        server_args.speculative_draft_attention_backend = draft_backend.default(server_args, config)


def _read_block(server_args: Any) -> int:
    """Read the block length, root included, from the drafter's configuration."""
    global _block
    if server_args.speculative_draft_model_path is None:
        raise ConfigError(
            f"--speculative-algorithm {algorithm.NAME}: expected --speculative-draft-model-path, got none"
        )
    config = compat.draft_config(server_args)
    architectures = getattr(config, "architectures", None)
    block = compat.block_size(config)
    if architectures != ["DFlashDraftModel"] or block is None or block < 2:
        raise ConfigError(
            f"{server_args.speculative_draft_model_path}: expected a DFlash drafter (architectures: DFlashDraftModel, "
            f"block_size >= 2), got architectures {architectures}, block_size {block}"
        )
    _block = block
    return block


def _known_block() -> int:
    if _block is None:
        raise ConfigError(f"{algorithm.NAME}: the drafter's block was asked for before its configuration was read")
    return _block
