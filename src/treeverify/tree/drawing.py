"""A picture of one draft tree as SVG: what was accepted, what was not, and the bonus token."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Protocol

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN = 124, 30, 102, 22, 10
LONGEST_LABEL = 13


def label(token: str) -> str:
    """Token text with its white space made visible, cut to what a box holds."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def children_of(parents: list[int]) -> list[list[int]]:
    """Children of each node, in node order (the order in which the builder popped them)."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


class Drawn(Protocol):
    """One verify step: token texts and parents by node (node 0 is the root), the accepted path, the bonus token."""

    @property
    def tokens(self) -> list[str]:
        """Text of each node."""

    @property
    def parents(self) -> list[int]:
        """Parent of each node, -1 for the root."""

    @property
    def path(self) -> list[int]:
        """Accepted nodes, the root first."""

    @property
    def bonus(self) -> str:
        """Text of the bonus token."""


@dataclass(frozen=True)
class Placed:
    """A box of the drawing: node number (the bonus token is ``len(tokens)``), parent, centre."""

    node: int
    parent: int
    x: float
    y: float


def place(step: Drawn) -> list[Placed]:
    """Tidy layout: x by depth, leaves one below the other, a parent halfway between its first and last child."""
    parents = [*step.parents, step.path[-1]]
    children = children_of(parents)
    placed: dict[int, Placed] = {}
    next_row = 0
    order: list[tuple[int, int]] = [(0, 0)]
    visited: list[tuple[int, int]] = []
    while order:
        node, depth = order.pop()
        visited.append((node, depth))
        order.extend((child, depth + 1) for child in reversed(children[node]))
    rows: dict[int, float] = {}
    for node, _ in visited:
        if not children[node]:
            rows[node] = next_row
            next_row += 1
    for node, _ in reversed(visited):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    for node, depth in visited:
        x, y = MARGIN + depth * COLUMN + BOX_WIDTH / 2, MARGIN + rows[node] * ROW + BOX_HEIGHT / 2
        placed[node] = Placed(node, parents[node], x, y)
    return [placed[node] for node, _ in visited]


def svg_tree(step: Drawn) -> str:
    """The step as an SVG element; colours come from CSS classes `accepted`, `bonus` and `rejected` of the page."""
    boxes = place(step)
    centre = {box.node: box for box in boxes}
    accepted = set(step.path)
    texts = [*step.tokens, step.bonus]
    kind = {
        b.node: "bonus" if b.node == len(step.tokens) else "accepted" if b.node in accepted else "rejected"
        for b in boxes
    }
    width = max(b.x for b in boxes) + BOX_WIDTH / 2 + MARGIN
    height = max(b.y for b in boxes) + BOX_HEIGHT / 2 + MARGIN
    parts = [
        f'<svg class="tree" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="draft tree">'
    ]
    for box in boxes:
        if box.parent >= 0:
            x0, y0 = centre[box.parent].x + BOX_WIDTH / 2, centre[box.parent].y
            x1, middle = box.x - BOX_WIDTH / 2, (x0 + box.x - BOX_WIDTH / 2) / 2
            curve = f"M{x0:g} {y0:g} C{middle:g} {y0:g} {middle:g} {box.y:g} {x1:g} {box.y:g}"
            parts.append(f'<path class="edge {kind[box.node]}" d="{curve}"/>')
    for box in boxes:
        left, top = box.x - BOX_WIDTH / 2, box.y - BOX_HEIGHT / 2
        rect = f'<rect x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        text = f'<text x="{box.x:g}" y="{box.y + 4:g}">{escape(label(texts[box.node]))}</text>'
        parts.append(f'<g class="node {kind[box.node]}">{rect}{text}</g>')
    parts.append("</svg>")
    return "".join(parts)
