"""The page of all settings, from the code: ``python scripts/settings_page.py`` writes ``docs/use/settings.md``.

Environment variables come from the docstrings of ``treeverify.env``, options from the commands themselves.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from treeverify import env
from treeverify.bench import attention, tree_ops
from treeverify.cli.main import app

PAGE = Path(__file__).parents[1] / "docs/use/settings.md"
PARSERS = {"bench attention": attention.parser, "bench tree-ops": tree_ops.parser}
"""Commands that hand their options on to a parser of their own."""
ENVIRONMENT = "environment"
_VARIABLE = re.compile(r"^``([A-Z][A-Z0-9_]*)``: (.*)$", re.DOTALL)
_INTRODUCTION = """\
# Settings

Every environment variable and every command-line option, in one table. For people who look up a name; the guides say
when to use it.

- Variables are read by the process that they are set for. A value that is not allowed is an error that names it.
- Options are those of `treeverify COMMAND`. "Required" means that the command does not run without it.
- Options of SGLang itself that matter here are in [SGLang](sglang.md) and [DDTREE](ddtree.md).

"""
_END = "\nMade by `python scripts/settings_page.py`. A test compares the page with the code.\n"


class Setting(NamedTuple):
    """A row: a variable or an option, the commands that have it, and what it means."""

    name: str
    of: str
    meaning: str


def variables() -> Iterator[Setting]:
    """Every function of ``env`` whose docstring begins with a variable: its first sentence, and that of its default."""
    functions = [function for _, function in inspect.getmembers(env, inspect.isfunction)]
    for function in sorted(functions, key=lambda entry: entry.__code__.co_firstlineno):
        found = _VARIABLE.match(inspect.getdoc(function) or "")
        if found and not function.__name__.startswith("_"):
            first, *others = re.split(r"(?<=\.)\s+", found[2])
            defaults = [sentence for sentence in others if sentence.lower().startswith("default")]
            yield Setting(found[1], ENVIRONMENT, " ".join(" ".join([first, *defaults]).split()).replace("``", "`"))


def options() -> Iterator[Setting]:
    """Every argument and option of every command, in the order of ``--help``."""
    commands: list[tuple[str, Any]] = [("", typer.main.get_command(app))]
    while commands:
        name, command = commands.pop(0)
        children = getattr(command, "commands", {})
        commands = [(f"{name} {child}".strip(), entry) for child, entry in children.items()] + commands
        if children:
            continue
        for entry in command.params:
            shown = entry.opts[0] if entry.param_type_name == "option" else entry.name.upper()
            yield Setting(shown, name, _meaning(entry.help or "", entry.default, entry.required))
        for action in PARSERS[name]()._actions if name in PARSERS else ():
            if not isinstance(action, argparse._HelpAction):
                yield Setting(action.option_strings[0], name, _meaning(action.help or "", action.default, False))


def page() -> str:
    """The whole page; a row that several commands have alike stands once."""
    rows: dict[tuple[str, str], list[str]] = {}
    for setting in [*variables(), *options()]:
        rows.setdefault((setting.name, setting.meaning), []).append(setting.of)
    lines = ["| setting | of | meaning |", "|---|---|---|"]
    for (name, meaning), of in rows.items():
        where = ENVIRONMENT if of == [ENVIRONMENT] else ", ".join(f"`{command}`" for command in of)
        lines.append(f"| `{name}` | {where} | {meaning.replace('|', chr(92) + '|')} |")
    return _INTRODUCTION + "\n".join(lines) + "\n" + _END


def _meaning(text: str, default: Any, required: bool) -> str:
    sentence = text.rstrip(".") + "." if text else ""
    if required:
        return f"{sentence} Required.".strip()
    if default is None or default is False or "default" in text:
        return sentence
    return f"{sentence} Default: {default}.".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
