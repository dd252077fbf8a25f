"""Argument checks shared by the pure layers: refuse by name, never convert quietly."""

from __future__ import annotations

import operator as _operator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from treeverify.errors import ContractError

INT64_MAX = 2**63 - 1

Scalar = TypeVar("Scalar", bound=np.generic)


def require_array(
    operator: str, name: str, value: object, dtypes: tuple[DTypeLike, ...], ndim: int | None = None
) -> NDArray[Any]:
    """Return ``value`` if it is an ndarray of one of ``dtypes`` (native byte order) and of rank ``ndim`` (None: any).

    Raises ContractError that names the argument, what was expected and what came. Strides are not restricted.
    """
    if not isinstance(value, np.ndarray):
        raise ContractError.of(operator, name, "a numpy array", type(value).__name__)
    if value.dtype not in dtypes:
        allowed = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
        raise ContractError.of(operator, f"{name}: dtype", allowed, value.dtype)
    if ndim is not None and value.ndim != ndim:
        raise ContractError.of(operator, f"{name}: rank", ndim, f"{value.ndim} (shape {list(value.shape)})")
    return value


def require_int(operator: str, name: str, value: object, minimum: int = 0, maximum: int = INT64_MAX) -> int:
    """Return ``value`` as an int in ``[minimum, maximum]`` (both inclusive).

    Takes int and numpy integers. Raises ContractError for anything else, bool and float included.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else _operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ContractError.of(operator, name, "an integer", repr(value))
    if not minimum <= number <= maximum:
        bound = f">= {minimum}" if number < minimum else f"<= {maximum}"
        raise ContractError.of(operator, name, bound, number)
    return number


def frozen(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous, read-only copy of ``array``."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy
