"""The model that comes with the checkout: its weights are stored compressed and unpacked once, into the cache.

``assets/SHA256SUMS`` lists the model's files as they are when unpacked; the files themselves lie beside it, or packed
under their name and ``.xz``. Packed is the xz form of all bytes at even places, then all at odd ones: the exponents of
bfloat16 numbers stand together then, and two thirds of the size are left.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import tempfile
from pathlib import Path

from treeverify.env import cache_dir
from treeverify.errors import ConfigError, WeightsError

STORED = Path(__file__).resolve().parents[1] / "assets"
SUMS, PACKED = "SHA256SUMS", ".xz"


def assets() -> Path:
    """The folder with the packaged ``target/``, ``drafter/``, ``tokenizer.json`` and ``heldout.json``, as listed.

    What is not there yet, or damaged, is unpacked. Raises WeightsError where the package has no model or a damaged one,
    ConfigError where the cache cannot be written.
    """
    try:
        listed = (STORED / SUMS).read_text(encoding="utf-8")
    except OSError:
        raise WeightsError(
            f"{STORED}: no model: it comes with the checkout, not with a wheel; "
            'there: pip install -e ".[lab]", or name a folder with a model'
        ) from None
    folder = cache_dir() / "model" / hashlib.sha256(listed.encode()).hexdigest()[:16]
    for line in listed.splitlines():
        digest, name = line.split("  ")
        if not _holds(folder / name, digest):
            _write(folder / name, _stored(name, digest))
    return folder


def pack(content: bytes) -> bytes:
    """The packed form of a file's bytes."""
    return lzma.compress(content[::2] + content[1::2])


def unpack(packed: bytes) -> bytes:
    """Inverse of ``pack``; ``lzma.LZMAError`` for what is no xz data."""
    planes = lzma.decompress(packed)
    content = bytearray(len(planes))
    half = (len(planes) + 1) // 2
    content[::2], content[1::2] = planes[:half], planes[half:]
    return bytes(content)


def _holds(file: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() == digest
    except OSError:
        return False


def _stored(name: str, digest: str) -> bytes:
    file = STORED / name
    try:
        content = file.read_bytes() if file.exists() else unpack((STORED / f"{name}{PACKED}").read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise WeightsError(f"{file}: the packaged model cannot be read: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise WeightsError(f"{file}: the packaged model is damaged: expected SHA-256 {digest}, got {found}")
    return content


def _write(file: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            written = Path(scratch) / file.name
            written.write_bytes(content)
            os.replace(written, file)
    except OSError as error:
        raise ConfigError(
            f"{file.parent}: the packaged model cannot be unpacked: {error.strerror}; "
            "TREEVERIFY_CACHE names another folder"
        ) from None
