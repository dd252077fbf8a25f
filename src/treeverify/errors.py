"""Typed errors: one class per kind of failure, so that callers and the CLI can tell them apart."""

from __future__ import annotations


class TreeverifyError(Exception):
    """Base of every error this package raises on purpose; the CLI prints it as one line and exits with its code."""

    exit_code = 2


class ContractError(TreeverifyError, ValueError):
    """An argument breaks an operator's or a function's contract.

    The message names the operator, the argument (and dimension), what was expected and what came.
    """

    @classmethod
    def of(cls, operator: str, name: str, expected: object, got: object) -> ContractError:
        """Build the standard message: ``operator: name: expected X, got Y``."""
        return cls(f"{operator}: {name}: expected {expected}, got {got}")


class ConfigError(TreeverifyError, ValueError):
    """A configuration, environment variable or option has a value that cannot be used."""


class WeightsError(TreeverifyError):
    """A checkpoint is missing, truncated, unreadable, or does not match its configuration."""


class CapacityError(TreeverifyError):
    """A request can never fit (context length or pool size), so it is refused rather than queued."""


class PoolCorruption(TreeverifyError):  # noqa: N818  (a state, named for what the operator sees)
    """The KV pool's ownership records contradict each other; nothing computed since can be trusted."""


class BuildError(TreeverifyError):
    """A kernel could not be compiled or loaded; the message says what to install or which file failed."""


class ParityError(TreeverifyError):
    """Two implementations that must agree do not, or a comparison cannot be made."""


class ServerError(TreeverifyError):
    """A live server does not answer as one that runs treeverify; the message says what was asked and what came."""


class ServerUnreachableError(ServerError):
    """Nothing answers at the address, or not in time."""


class AccessError(ServerError):
    """A server is there, and refuses the key or has a certificate that is not trusted: waiting does not help."""


class PluginMissingError(ServerError):
    """A server answers, but says nothing of treeverify: the plugin is not loaded in it."""


class SwitchError(ServerError):
    """A server refused a mode, or not every rank of it took the mode."""

    exit_code = 1


class CutoverError(TreeverifyError):
    """A cutover did not reach its target; the exit code says in which way (``cutover.exits``)."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)
