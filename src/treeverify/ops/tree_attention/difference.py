"""Compare two attention outputs: pattern of NaN and infinity first, then size of the error, and where it is worst.

One cosine figure for a whole tensor hides a wrong row, so the row (one token and head) is the unit here. ULP means the
spacing of the coarser of the two dtypes, counted in two ways: against the row's largest magnitude (how far off is this
row, in steps that its output can show?) and element by element (how many representable values lie between?). The second
is large near zero, where it says little. A ``Difference`` accumulates over calls by ``merge``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeverify.errors import ParityError

HISTOGRAM_BINS = 16
"""Bin 0 counts elements 0 ULP apart, bin i those 2**(i-1) to 2**i - 1 apart, the last one everything beyond."""
ROW_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Bin 0 counts rows that agree exactly, bin i those in (ROW_EDGES[i-1], ROW_EDGES[i]] ULP, the last one all beyond."""
_FRACTION_BITS = {torch.bfloat16: 7, torch.float32: 23}
_INTEGER = {torch.bfloat16: (torch.int16, torch.int32), torch.float32: (torch.int32, torch.int64)}


@dataclass(frozen=True)
class Worst:
    """One element: of which call (counted from 0), where, and its two values."""

    call: int
    token: int
    head: int
    dim: int
    expected: float
    got: float

    def __str__(self) -> str:
        """Return ``call 0 [token 3, head 1, dim 17]: expected 0.5, got 0.25``."""
        place = f"call {self.call} [token {self.token}, head {self.head}, dim {self.dim}]"
        return f"{place}: expected {self.expected:.9g}, got {self.got:.9g}"


@dataclass(frozen=True)
class Difference:
    """How far ``got`` is from ``expected``; ``Difference()`` is the empty sum."""

    calls: int = 0
    elements: int = 0
    mismatched: int = 0
    """Elements of which one is NaN or infinite and the other is not the same; all figures below leave them out."""
    max_abs: float = 0.0
    max_relative: float = 0.0
    """Largest norm(got - expected) / norm(expected) of a row; ``inf`` where only the expected row is all zero."""
    max_row_ulp: float = 0.0
    """Largest abs(got - expected) in ULP of its row's largest expected magnitude."""
    max_ulp: int = 0
    """Largest element-wise ULP distance."""
    square_error: float = 0.0
    square_expected: float = 0.0
    histogram: tuple[int, ...] = (0,) * HISTOGRAM_BINS
    mismatched_rows: int = 0
    """Rows with a mismatched element."""
    row_histogram: tuple[int, ...] = (0,) * (len(ROW_EDGES) + 1)
    """Rows by their ``max_row_ulp``; bins as ``ROW_EDGES`` says."""
    worst: Worst | None = None
    """A mismatched element if there is one, else the element with the largest ``max_row_ulp``; None if all agree."""

    @property
    def rows(self) -> int:
        """Rows compared."""
        return sum(self.row_histogram)

    @property
    def relative(self) -> float:
        """norm(got - expected) / norm(expected) over everything seen."""
        if self.square_error == 0:
            return 0.0
        return float("inf") if self.square_expected == 0 else float((self.square_error / self.square_expected) ** 0.5)

    def merge(self, later: Difference) -> Difference:
        """Add the calls of ``later``, which are numbered after the calls of ``self``."""
        theirs = later.worst
        if theirs is not None:
            theirs = Worst(self.calls + theirs.call, theirs.token, theirs.head, theirs.dim, theirs.expected, theirs.got)
        key, later_key = (self.mismatched > 0, self.max_row_ulp), (later.mismatched > 0, later.max_row_ulp)
        mine_is_worse = self.worst is not None and (self.mismatched > 0 or key >= later_key)
        return Difference(
            calls=self.calls + later.calls,
            elements=self.elements + later.elements,
            mismatched=self.mismatched + later.mismatched,
            max_abs=max(self.max_abs, later.max_abs),
            max_relative=max(self.max_relative, later.max_relative),
            max_row_ulp=max(self.max_row_ulp, later.max_row_ulp),
            max_ulp=max(self.max_ulp, later.max_ulp),
            square_error=self.square_error + later.square_error,
            square_expected=self.square_expected + later.square_expected,
            histogram=tuple(a + b for a, b in zip(self.histogram, later.histogram, strict=True)),
            mismatched_rows=self.mismatched_rows + later.mismatched_rows,
            row_histogram=tuple(a + b for a, b in zip(self.row_histogram, later.row_histogram, strict=True)),
            worst=self.worst if mine_is_worse else theirs,
        )

    def __str__(self) -> str:
        """One line for a log: figures, then the worst element."""
        figures = (
            f"{self.calls} calls, {self.elements} elements: max abs {self.max_abs:.3g}, "
            f"relative {self.relative:.3g} (worst row {self.max_relative:.3g}), "
            f"ULP {self.max_row_ulp:.3g} of the row's largest, {self.max_ulp} element-wise"
        )
        broken = f"; NaN/Inf differ in {self.mismatched}" if self.mismatched else ""
        return f"{figures}{broken}; worst: {self.worst or 'none'}"


def compare(expected: torch.Tensor, got: torch.Tensor, *, unit: torch.dtype | None = None) -> Difference:
    """Compare ``got [tokens, heads, dim]`` with ``expected``; bfloat16, float32 or float64, not necessarily the same.

    ``unit``: bfloat16 or float32, the dtype whose spacing is one ULP; None: the coarser of the two. Raises
    ``ParityError`` for shapes, ranks, dtypes or devices that cannot be compared. Waits for the device.
    """
    coarser = _comparable(expected, got)
    if unit is None:
        unit = coarser
    elif unit not in _FRACTION_BITS:
        raise ParityError(f"compare: unit: expected bfloat16 or float32, got {unit}")
    if expected.numel() == 0:
        return Difference(calls=1)
    wide = torch.float64 if torch.float64 in (expected.dtype, got.dtype) else torch.float32
    want, have = expected.detach().to(wide), got.detach().to(wide)
    error = (have - want).abs_()
    broken = None
    if not bool(error.sum().isfinite()):  # the rare case: NaN or infinity somewhere
        odd = ~(want.isfinite() & have.isfinite())
        broken = odd & ~((want == have) | (want.isnan() & have.isnan()))
        want, have, error = (value.masked_fill(odd, 0.0) for value in (want, have, error))
    row_error, row_norm = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (error, want))
    relative = torch.where(row_error == 0, 0.0, row_error / row_norm)  # x / 0 = inf, as documented
    scaled = error / _spacing(want.abs().amax(dim=-1, keepdim=True), unit)
    distance = _ulp_distance(want.to(unit), have.to(unit))
    bins = _bit_length(distance).clamp_(max=HISTOGRAM_BINS - 1)
    mismatched = 0 if broken is None else int(broken.sum())
    row_ulp = scaled.amax(dim=-1).flatten()
    max_row_ulp = float(row_ulp.max())
    row_bins = torch.bucketize(row_ulp, torch.tensor(ROW_EDGES, dtype=row_ulp.dtype, device=row_ulp.device))
    flat: int | None = None
    if broken is not None and mismatched:
        flat = int(broken.flatten().int().argmax())
    elif max_row_ulp > 0:
        row = int(row_ulp.argmax())
        flat = row * scaled.shape[-1] + int(scaled.flatten(0, 1)[row].argmax())
    return Difference(
        calls=1,
        elements=expected.numel(),
        mismatched=mismatched,
        max_abs=float(error.max()),
        max_relative=float(relative.max()),
        max_row_ulp=max_row_ulp,
        max_ulp=int(distance.max()),
        square_error=float(row_error.square().sum()),
        square_expected=float(row_norm.square().sum()),
        histogram=tuple(torch.bincount(bins.flatten(), minlength=HISTOGRAM_BINS).tolist()),
        mismatched_rows=0 if broken is None else int(broken.any(dim=-1).sum()),
        row_histogram=tuple(torch.bincount(row_bins, minlength=len(ROW_EDGES) + 1).tolist()),
        worst=None if flat is None else _element(expected, got, flat),
    )


def _comparable(expected: torch.Tensor, got: torch.Tensor) -> torch.dtype:
    """Return the dtype whose spacing counts: the coarser one, float32 at the finest."""
    if expected.ndim != 3 or expected.shape != got.shape:
        shapes = f"{list(expected.shape)} and {list(got.shape)}"
        raise ParityError(f"compare: expected two tensors of the same shape [tokens, heads, dim], got {shapes}")
    if expected.device != got.device:
        raise ParityError(f"compare: expected tensors on one device, got {expected.device} and {got.device}")
    dtypes = (expected.dtype, got.dtype)
    if any(dtype not in (torch.bfloat16, torch.float32, torch.float64) for dtype in dtypes):
        raise ParityError(f"compare: expected bfloat16, float32 or float64, got {dtypes[0]} and {dtypes[1]}")
    return torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32


def _spacing(magnitude: torch.Tensor, unit: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring values of ``unit`` at ``magnitude``; that of the smallest normal number at 0."""
    exponent = torch.frexp(magnitude.clamp(min=2.0**-126)).exponent
    return torch.ldexp(torch.ones_like(magnitude), exponent - 1 - _FRACTION_BITS[unit]).clamp_(min=2.0**-149)


def _ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many steps through the representable values lead from a to b; -0 and +0 are the same value."""
    return (_ordinal(a) - _ordinal(b)).abs_()


def _ordinal(value: torch.Tensor) -> torch.Tensor:
    """Map floats to integers, twice as wide, so that neighbours differ by 1 and both zeros are 0."""
    integer, wider = _INTEGER[value.dtype]
    bits = value.contiguous().view(integer)
    sign = bits >> (8 * value.element_size() - 1)  # 0 or -1
    return ((bits ^ (sign & torch.iinfo(integer).max)) - sign).to(wider)


def _bit_length(distance: torch.Tensor) -> torch.Tensor:
    """0 for 0, else 1 + floor(log2(distance)), read off the exponent of a float32 (exact below 2**24)."""
    return ((distance.float().view(torch.int32) >> 23) - 126).clamp_(min=0)


def _element(expected: torch.Tensor, got: torch.Tensor, flat: int) -> Worst:
    _, heads, dim = expected.shape
    token, head, column = flat // (heads * dim), flat // dim % heads, flat % dim
    return Worst(0, token, head, column, float(expected[token, head, column]), float(got[token, head, column]))
