"""What test_ddtree_simulated.py looks at, as a script: ``ddtree_simulated.py FOLDER`` prints one JSON object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.integrations.sglang.ddtree_scenarios import PROMPTS, texts, tree
from tests.integrations.sglang.processes import say

NEW = 40


def main(folder: Path) -> dict[str, Any]:
    """Texts under simulated acceptance, and how many rows the commits moved."""
    from treeverify.integrations.sglang.ddtree import plugin
    from treeverify.integrations.sglang.names import version
    from treeverify.step import step

    server = tree(folder, attention_backend="treeverify")
    slots, stock, moved = server.free_slots(), step.kv_compact, list[int]()

    def move(table: Any, window: Any, path: Any, lengths: Any) -> None:
        for row, length in zip(path.tolist(), lengths.tolist(), strict=True):
            moved.append(sum(node != place for place, node in enumerate(row[:length])))
        stock(table, window, path, lengths)

    step.kv_compact = move
    texts(server, PROMPTS[:2], NEW)
    return {
        "version": version(),
        "report": plugin.report(),
        "slots": [slots, server.free_slots()],
        "moved": sum(moved),
    }


if __name__ == "__main__":
    say(main(Path(sys.argv[1])))
