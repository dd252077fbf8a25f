"""Names and numbers on the wire between a server and its client: stated once, for both sides.

SGLang's ``POST /set_internal_state`` takes numbers only (``server_args: dict[str, int | float]`` in 0.5.17 to 0.5.23),
so a mode travels as a number. The answer is one boolean per data-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from treeverify.env import VerifyMode

STATE_KEY = "treeverify"
"""Key of the plugin's entry in ``/server_info``: ``internal_states[i]["treeverify"]``, a ``schema.PluginState``."""
ERROR_KEY = "error"
"""The only key of that entry where a rank could not say its state: why."""
MODE_KEY = "treeverify_mode"
"""Key of ``server_args`` in ``POST /set_internal_state``."""
MODE_NUMBERS: Mapping[VerifyMode, int] = MappingProxyType({VerifyMode.OFF: 0, VerifyMode.VALIDATE: 1, VerifyMode.ON: 2})
"""The value of ``MODE_KEY``, and of nothing else: metrics and files name modes by their word."""
