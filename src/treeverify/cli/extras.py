"""Commands that need more than the plain install: which extra brings it, said in one line."""

from __future__ import annotations

OPERATOR, LAB = "operator", "lab"
EXTRA_OF = {"cutover": OPERATOR, "serve": LAB, "generate": LAB, "demo": LAB, "bench": LAB, "parity": LAB}
"""By command; the others are served by the plain install."""
MODULES = {
    OPERATOR: ("jinja2", "markupsafe", "matplotlib", "scipy"),
    LAB: ("fastapi", "jinja2", "markupsafe", "matplotlib", "scipy", "starlette", "tokenizers", "uvicorn"),
}
"""What each extra brings, by the name that is imported."""


def advice(command: str, error: ModuleNotFoundError) -> str | None:
    """What to install for ``command``; None if no extra of it brings the missing module."""
    extra = EXTRA_OF.get(command)
    module = (error.name or "").partition(".")[0]
    if extra is None or module not in MODULES[extra]:
        return None
    editable = "-e " if extra == LAB else ""  # its model stays in the checkout
    install = f'pip install {editable}".[{extra}]"'
    return f"{command}: {module} is missing, which the extra {extra} brings: {install} in the checkout"
