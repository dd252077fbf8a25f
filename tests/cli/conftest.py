"""Runs the command in this process."""

from __future__ import annotations

import sys

import pytest

from treeverify.cli.main import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``treeverify ARGUMENTS``; returns (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["treeverify", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
