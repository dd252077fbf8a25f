"""Checks of one operator's arguments: type, dtype, shape, device, layout. None reads a value of a tensor.

Every refusal is a ``ContractError`` that names the operator, the tensor, what was expected and what came.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import ContractError

INDEX_DTYPES = (torch.int32, torch.int64)
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Checker:
    """Checks for one call of ``operator``, all of whose tensors are on ``device``."""

    operator: str
    device: torch.device

    @classmethod
    def of(cls, operator: str, name: str, first: object) -> Checker:
        """Start with the call's first tensor, whose device (CPU or CUDA) all others must share."""
        if not isinstance(first, torch.Tensor):
            raise ContractError.of(operator, name, "a torch.Tensor", type(first).__name__)
        if first.device.type not in DEVICES:
            raise ContractError.of(operator, f"{name}: device", " or ".join(DEVICES), first.device)
        return cls(operator, first.device)

    @property
    def on_gpu(self) -> bool:
        """Does the compiled kernel serve this call? The torch reference does on a CPU."""
        return self.device.type == "cuda"

    def refuse(self, name: str, expected: object, got: object) -> ContractError:
        """The error to raise."""
        return ContractError.of(self.operator, name, expected, got)

    def integer(self, name: str, value: object, low: int, high: int) -> int:
        """An ``int`` (no bool, no numpy scalar) in ``low..high``, both inclusive."""
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an int in {low}..{high}", repr(value))
        return value

    def tensor(
        self, name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
    ) -> torch.Tensor:
        """A contiguous tensor of one of ``dtypes`` and of ``shape`` (None: any size) on the call's device."""
        tensor = self._sized(name, value, dtypes, shape)
        if not tensor.is_contiguous():
            raise self.refuse(f"{name}: strides", "contiguous", list(tensor.stride()))
        return tensor

    def rows(
        self, name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
    ) -> torch.Tensor:
        """As `tensor`, but only the last dimension must be contiguous; rows do not overlap."""
        tensor = self._sized(name, value, dtypes, shape)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise self.refuse(f"{name}: stride of the last dimension", 1, tensor.stride(-1))
        for dim in range(tensor.ndim - 1):
            if tensor.shape[dim] > 1 and tensor.stride(dim) < tensor.shape[-1]:
                raise self.refuse(f"{name}: stride of dimension {dim}", f">= {tensor.shape[-1]}", tensor.stride(dim))
        return tensor

    def _sized(
        self, name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
    ) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self.refuse(name, "a torch.Tensor", type(value).__name__)
        if value.ndim != len(shape):
            raise self.refuse(f"{name}: rank", len(shape), f"{value.ndim} {list(value.shape)}")
        if value.dtype not in dtypes:
            raise self.refuse(f"{name}: dtype", " or ".join(map(str, dtypes)), value.dtype)
        if any(want is not None and want != got for want, got in zip(shape, value.shape, strict=True)):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.refuse(f"{name}: shape", f"[{expected}]", list(value.shape))
        if value.device != self.device:
            raise self.refuse(f"{name}: device", self.device, value.device)
        return value
