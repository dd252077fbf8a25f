"""Checks of one argument at a time: type, dtype, device, strides. ``contract.check`` puts them together.

Each raises ``ContractError`` naming operator, tensor, dimension, what was expected and what came. None reads a value of
a tensor.
"""

from __future__ import annotations

import torch

from treeverify.errors import ContractError

OPERATOR = "tree_attention"


def expect_tensor(name: str, value: object) -> torch.Tensor:
    """Return ``value``, known to be a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ContractError.of(OPERATOR, name, "a torch.Tensor", type(value).__name__)
    return value


def expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """On ``device``, that of ``q``."""
    if tensor.device != device:
        raise ContractError.of(OPERATOR, f"{name}: device", f"{device} (that of q)", tensor.device)


def expect_int(name: str, value: object, low: int, high: int | None) -> None:
    """An ``int`` (no bool, no numpy scalar) in ``low..high``, both inclusive."""
    expected = f"an int >= {low}" if high is None else f"an int in {low}..{high}"
    if type(value) is not int:
        raise ContractError.of(OPERATOR, name, expected, repr(value))
    if value < low or (high is not None and value > high):
        raise ContractError.of(OPERATOR, name, expected, value)


def expect_float(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """One of ``dtypes``; fp8 is refused by name."""
    if str(tensor.dtype).startswith("torch.float8"):
        raise ContractError.of(
            OPERATOR, f"{name}: dtype", names(dtypes), f"{tensor.dtype} (fp8 KV is not supported yet)"
        )
    if tensor.dtype not in dtypes:
        raise ContractError.of(OPERATOR, f"{name}: dtype", names(dtypes), tensor.dtype)


def expect_strides(name: str, tensor: torch.Tensor, row: int, alignment: int) -> None:
    """Last dimension contiguous; every other stride (of a dimension longer than 1) at least ``row`` elements."""
    if tensor.stride(-1) != 1:
        raise ContractError.of(OPERATOR, f"{name}: stride of the last dimension", 1, tensor.stride(-1))
    step = max(1, alignment // tensor.element_size())
    for dim in range(tensor.ndim - 1):
        stride = tensor.stride(dim)
        if tensor.shape[dim] > 1 and (stride < row or stride % step):
            expected = f">= {row} elements" + (f" and a multiple of {alignment} bytes" if alignment > 1 else "")
            raise ContractError.of(OPERATOR, f"{name}: stride of dimension {dim}", expected, stride)
    if alignment > 1 and tensor.numel() and tensor.data_ptr() % alignment:
        raise ContractError.of(OPERATOR, f"{name}: address", f"a multiple of {alignment} bytes", hex(tensor.data_ptr()))


def expect_vector(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device, length: int | None = None
) -> None:
    """Contiguous, rank 1, one of ``dtypes``, on ``device``; of exactly ``length`` elements if that is given."""
    tensor = expect_tensor(name, value)
    if tensor.ndim != 1:
        raise ContractError.of(OPERATOR, f"{name}: rank", 1, f"{tensor.ndim} {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ContractError.of(OPERATOR, f"{name}: dtype", names(dtypes), tensor.dtype)
    if length is not None and tensor.shape[0] != length:
        raise ContractError.of(OPERATOR, f"{name}: dimension 0", length, tensor.shape[0])
    expect_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ContractError.of(OPERATOR, f"{name}: stride of dimension 0", 1, tensor.stride(0))


def expect_shaped(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device, shape: tuple[int, ...]
) -> torch.Tensor:
    """Of exactly ``shape``, one of ``dtypes``, on ``device``; strides are the caller's affair."""
    tensor = expect_tensor(name, value)
    if tensor.dtype not in dtypes:
        raise ContractError.of(OPERATOR, f"{name}: dtype", names(dtypes), tensor.dtype)
    if tuple(tensor.shape) != shape:
        raise ContractError.of(OPERATOR, f"{name}: shape", list(shape), list(tensor.shape))
    expect_device(name, tensor, device)
    return tensor


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Join dtypes for a message."""
    return " or ".join(str(dtype) for dtype in dtypes)
