"""Bit-packed masks: 64 columns to a word, for any number of columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeverify.errors import ContractError
from treeverify.tree._arrays import require_array, require_int

BITS = 64


def words_for(width: int) -> int:
    """Words that hold ``width`` bits: ceil(width / 64)."""
    return -(-width // BITS)


def pack_rows(rows: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Pack bool [..., width] into uint64 [..., ceil(width / 64)]: bit j of word i is column 64 * i + j.

    Bits past ``width`` are 0. Any strides. Raises ContractError for another dtype or a scalar.
    """
    rows = require_array("pack_rows", "rows", rows, (np.bool_,))
    if rows.ndim == 0:
        raise ContractError.of("pack_rows", "rows: rank", ">= 1", 0)
    packed = np.packbits(rows, axis=-1, bitorder="little")
    padded = np.zeros((*rows.shape[:-1], 8 * words_for(rows.shape[-1])), dtype=np.uint8)
    padded[..., : packed.shape[-1]] = packed
    return padded.view("<u8").astype(np.uint64, copy=False)


def unpack_rows(words: NDArray[np.uint64] | NDArray[np.int64], width: int) -> NDArray[np.bool_]:
    """Undo `pack_rows`: uint64 (or the same bits as int64) [..., ceil(width / 64)] into bool [..., width].

    Raises ContractError for another dtype, a number of words that does not fit ``width``, or a bit set past ``width``.
    """
    words = require_array("unpack_rows", "words", words, (np.uint64, np.int64))
    width = require_int("unpack_rows", "width", width)
    if words.ndim == 0 or words.shape[-1] != words_for(width):
        raise ContractError.of("unpack_rows", "words: shape", f"[..., {words_for(width)}]", list(words.shape))
    little = np.ascontiguousarray(words).view(np.uint64).astype("<u8", copy=False)
    bits = np.unpackbits(little.view(np.uint8), axis=-1, bitorder="little").view(np.bool_)
    if bits[..., width:].any():
        row = np.argwhere(bits[..., width:])[0]
        column = width + int(row[-1])
        raise ContractError.of("unpack_rows", "words", f"no bit past width {width}", f"bit {column} set")
    return bits[..., :width]
