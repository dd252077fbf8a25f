"""Shrink a CUDA shared library: keep one architecture's kernels whose names match, blank all other GPU code with zeros.

    slim_fatbin.py SRC.so DST.so --arch 90 --keep 'Li512ENS_10bfloat16_t' --keep-without CollectiveMainloopFwd

The file keeps its size, but packs to a few per cent. Kept: each uncompressed fat binary whose code for ``--arch``
contains one of the ``--keep`` byte strings, and each that contains none of the ``--keep-without`` strings (helper
kernels). A blanked kernel fails when it is launched.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
from collections.abc import Iterator
from typing import NamedTuple

FATBIN_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"


class Entry(NamedTuple):
    """One architecture's code inside a fat binary: where it starts, its header, its payload."""

    at: int
    header: int
    payload: int
    arch: int


class Fatbin(NamedTuple):
    """A fat binary: where it starts, its header, what follows the header, the entries in it."""

    at: int
    header: int
    length: int
    entries: list[Entry]


def section_table(data: mmap.mmap, elf: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, type, offset and size of each section of the 64-bit ELF file at ``elf``."""
    table_at = struct.unpack_from("<Q", data, elf + 0x28)[0]
    width, count, names = struct.unpack_from("<HHH", data, elf + 0x3A)
    table = [struct.unpack_from("<IIQQQQ", data, elf + table_at + i * width) for i in range(count)]
    base = elf + table[names][4]
    for name, kind, _, _, offset, size in table:
        end = data.find(b"\0", base + name)
        yield data[base + name : end].decode(), kind, offset, size


def fatbins(data: mmap.mmap) -> Iterator[Fatbin]:
    """Every fat binary of the library's ``.nv_fatbin`` section."""
    found = [(offset, size) for name, _, offset, size in section_table(data, 0) if name == ".nv_fatbin"]
    if not found:
        raise SystemExit("no section .nv_fatbin")
    (position, size) = found[0]
    end = position + size
    while position < end - 16:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, position)
        if magic != FATBIN_MAGIC:
            position += 8
            continue
        entries, cursor, stop = [], position + header, position + header + length
        while cursor < stop:
            _, _, entry_header, payload = struct.unpack_from("<HHIQ", data, cursor)
            arch = struct.unpack_from("<I", data, cursor + 28)[0]
            entries.append(Entry(cursor, entry_header, payload, arch))
            cursor += entry_header + payload
        yield Fatbin(position, header, length, entries)
        position = stop


def code_sections(data: mmap.mmap, elf: int) -> Iterator[tuple[int, int]]:
    """Offset and size of every section of the cubin at ``elf`` that holds machine code or debug data."""
    for name, kind, offset, size in section_table(data, elf):
        stem = name.split("._Z")[0]
        if kind != 8 and (stem == ".text" or stem.startswith((".nv.merc", ".nv.capmerc", ".debug"))):
            yield elf + offset, size


def slim(data: mmap.mmap, arch: int, keep: list[bytes], keep_without: list[bytes]) -> tuple[int, int]:
    """Blank ``data`` in place; return how many fat binaries were kept and how many blanked."""
    everything = list(fatbins(data))
    donor_entry = next(entry for fatbin in everything for entry in fatbin.entries if entry.arch == arch)
    donor = bytes(data[donor_entry.at : donor_entry.at + donor_entry.header + donor_entry.payload])
    kept = blanked = 0
    for fatbin in everything:
        mine = [entry for entry in fatbin.entries if entry.arch == arch]
        if len(mine) != 1 or mine[0].at != fatbin.at + fatbin.header:
            raise SystemExit(f"fat binary at {fatbin.at}: expected sm_{arch} code first and once")
        entry = mine[0]
        elf = entry.at + entry.header
        body = data[elf : elf + entry.payload]
        size = entry.header + entry.payload
        plain = body.startswith(ELF_MAGIC)  # kernel names can be read only where the code is not compressed
        if plain and (any(k in body for k in keep) or not any(w in body for w in keep_without)):
            kept += 1
        elif plain:
            blanked += 1
            for offset, extent in list(code_sections(data, elf)):
                data[offset : offset + extent] = b"\0" * extent
        else:  # compressed code: put a small cubin that always parses in its place
            blanked += 1
            data[entry.at : entry.at + len(donor)] = donor
            size = len(donor)
        struct.pack_into("<Q", data, fatbin.at + 8, size)  # the other architectures' entries are cut off
        begin, end = fatbin.at + fatbin.header + size, fatbin.at + fatbin.header + fatbin.length
        data[begin:end] = b"\0" * (end - begin)
    return kept, blanked


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src")
    parser.add_argument("dst")
    parser.add_argument("--arch", type=int, required=True)
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--keep-without", action="append", default=[])
    chosen = parser.parse_args()
    shutil.copyfile(chosen.src, chosen.dst)
    with open(chosen.dst, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        keep, without = ([text.encode() for text in texts] for texts in (chosen.keep, chosen.keep_without))
        kept, blanked = slim(data, chosen.arch, keep, without)
    print(f"kept {kept} fat binaries, blanked {blanked}")


if __name__ == "__main__":
    main()
