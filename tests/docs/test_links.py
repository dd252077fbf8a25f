"""Every link of a page, and every path of a page that code names, leads somewhere."""

from __future__ import annotations

import re
import subprocess

import pytest
from tests.docs.prose import PAGES, ROOT, without_code

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
NAMED = re.compile(r"\bdocs/[\w./@-]+\.(?:md|svg|png|html|yml|env|service)\b")
TEXTS = (
    ".py",
    ".md",
    ".sh",
    ".toml",
    ".cu",
    ".cuh",
    ".cc",
    ".h",
    ".j2",
    ".yml",
    ".service",
    ".env",
    "Makefile",
    "Dockerfile",
)
EXTRA = [ROOT / "CONTRIBUTING.md", ROOT / "src/treeverify/assets/README.md"]


def anchors(text):
    """The anchors that a Markdown viewer makes of the headings."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(without_code(text))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *EXTRA], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_what_the_repository_names_of_the_pages_exists():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = []
    for name in listed.splitlines():
        if name.endswith(TEXTS):
            text = (ROOT / name).read_text(encoding="utf-8")
            missing += [f"{name}: {path}" for path in NAMED.findall(text) if not (ROOT / path).exists()]
    assert missing == []


def test_every_page_can_be_reached_from_the_readme():
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
            path = link.partition("#")[0]
            if path.endswith(".md") and "://" not in path:
                pending.append((page.parent / path).resolve())
    assert set(PAGES) <= reached
