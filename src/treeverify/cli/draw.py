"""A picture of one draft tree in the terminal; the SVG is ``tree.drawing``'s."""

from __future__ import annotations

from rich.text import Text
from rich.tree import Tree as RichTree

from treeverify.cli.report import DrawnStep
from treeverify.tree.drawing import children_of, label


def terminal_tree(step: DrawnStep) -> RichTree:
    """The step as a rich tree: accepted nodes bold green, the rest dim, the bonus token under the last accepted one."""
    children = children_of(step.parents)
    accepted = set(step.path)

    def text(node: int) -> Text:
        style = "bold green" if node in accepted else "dim"
        return Text(f"{label(step.tokens[node])}", style=style)

    root = RichTree(text(0), guide_style="dim")
    branches = {0: root}
    pending = [0]
    while pending:
        node = pending.pop()
        for child in children[node]:
            branches[child] = branches[node].add(text(child))
            pending.append(child)
        if node == step.path[-1]:
            branches[node].add(Text(f"{label(step.bonus)}  ← bonus token", style="bold cyan"))
    return root
