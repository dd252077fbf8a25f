"""Pictures of a draft tree: every node is there once, nothing overlaps, text is escaped."""

from __future__ import annotations

import io
from xml.etree import ElementTree

from rich.console import Console

from treeverify.cli.draw import terminal_tree
from treeverify.cli.report import DrawnStep
from treeverify.tree.drawing import BOX_HEIGHT, BOX_WIDTH, label, place, svg_tree

STEP = DrawnStep(
    tokens=["def", " f", "(", "<x>", " g", "self", ")"],
    parents=[-1, 0, 1, 2, 0, 2, 3],
    path=[0, 1, 2],
    bonus='"&',
)


def test_boxes_never_overlap_and_a_child_is_right_of_its_parent():
    boxes = place(STEP)
    assert sorted(box.node for box in boxes) == list(range(len(STEP.tokens) + 1))
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert abs(a.x - b.x) >= BOX_WIDTH or abs(a.y - b.y) >= BOX_HEIGHT
    centre = {box.node: box for box in boxes}
    assert all(box.x > centre[box.parent].x for box in boxes if box.parent >= 0)


def test_svg_is_well_formed_and_marks_the_path():
    root = ElementTree.fromstring(svg_tree(STEP))
    groups = [element.get("class") for element in root.iter("g")]
    assert groups.count("node accepted") == len(STEP.path)
    assert groups.count("node bonus") == 1
    assert len(groups) == len(STEP.tokens) + 1
    assert "<x>" in [element.text for element in root.iter("text")]


def test_terminal_tree_shows_every_node_and_the_bonus_under_the_last_accepted():
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(terminal_tree(STEP))
    lines = out.getvalue().splitlines()
    assert len(lines) == len(STEP.tokens) + 1
    assert sum("bonus token" in line for line in lines) == 1


def test_labels_make_white_space_visible_and_stay_short():
    assert label(" a\n\t") == "·a⏎⇥"
    assert label("") == "∅"
    assert len(label("x" * 40)) == 13
