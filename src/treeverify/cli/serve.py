"""``treeverify serve``: the embedded engine behind SGLang's HTTP routes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    host: Annotated[
        str, typer.Option(help="Name or address to listen on, ::1 too; '::': all, IPv4 as well.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one, named in the log.")] = 30000,
    model: Annotated[Path | None, typer.Option(help="Folder with target/ and drafter/; default: packaged.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 | bfloat16")] = "float32",
    draft: Annotated[str, typer.Option(help="none | chain | tree")] = "tree",
    budget: Annotated[int | None, typer.Option(help="Draft nodes beside the root, for every request.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="KV rows of the pool.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
) -> None:
    """Serve the embedded engine over HTTP. KDTREE_VERIFY and KDTREE_VERIFY_ALLOW pick its mode and live switches."""
    from treeverify.serve.server import Setup
    from treeverify.serve.server import serve as run

    run(Setup(host, port, model, dtype, draft, budget, slots, max_batch))
