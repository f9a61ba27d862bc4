"""Makes a CUDA library small for one architecture: the code of all others becomes zeros, which compress to nothing.

nvcc puts the kernels of a source file into a *fatbin*: a header with its size, then one entry per architecture, each with
a header and its payload (2: a cubin, machine code; 1: PTX, which the driver compiles). The entries that a device of the
architecture runs move to the start of their fatbin, whose header gets their size, and zeros follow. That is what nvcc would
have written for this architecture alone; it lies at the same address, and nothing else in the library moves. A device runs

* the cubins of its architecture, or
* without them, the newest older cubins of its generation (sm_89 runs sm_86) and PTX that is not newer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

SECTIONS = b".nv_fatbin", b"__nv_relfatbin"
MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
PTX, CUBIN = 1, 2


class Entry(NamedTuple):
    kind: int
    arch: int
    content: bytes  # header and payload


class Kept(NamedTuple):
    content: bytes
    fatbins: int
    usable: int  # fatbins of which something is kept for the architecture
    architectures: list[int]


def keep_only(library: bytes, arch: int) -> Kept:
    """``library`` with kernels for ``arch`` (90: sm_90 and sm_90a) alone. Applied twice, it changes nothing.

    A library without kernels is returned as it is. Of a fatbin without anything for ``arch`` the smallest entry stays: the
    driver then finds, as before, no kernel for this device, and no empty fatbin. Raises ValueError for what is no ELF file
    of 64 bits, and for a header that leads outside its section.
    """
    result, fatbins, usable, seen = bytearray(library), 0, 0, set()
    for at, header, stop in _fatbins(library):
        entries = list(_entries(library, at + header, stop))
        kept = [entry for entry in entries if _runs(entry, entries, arch)]
        fatbins, usable, seen = fatbins + 1, usable + bool(kept), seen | {entry.arch for entry in entries}
        content = b"".join(e.content for e in kept or sorted(entries, key=lambda e: len(e.content))[:1])
        struct.pack_into("<Q", result, at + 8, len(content))
        result[at + header : stop] = content.ljust(stop - at - header, b"\0")
    return Kept(bytes(result), fatbins, usable, sorted(seen))


def _runs(entry: Entry, entries: list[Entry], arch: int) -> bool:
    same = (e.arch for e in entries if e.kind == CUBIN and e.arch // 10 == arch // 10 and e.arch <= arch)
    best = max(same, default=None)
    if entry.kind == CUBIN:
        return entry.arch == best
    return entry.kind == PTX and best != arch and entry.arch <= arch


def _fatbins(library: bytes) -> Iterator[tuple[int, int, int]]:
    """(start, bytes of its header, end) of each."""
    magic = struct.pack("<I", MAGIC)
    for at, end in _sections(library):
        while (at := library.find(magic, at, end - HEADER.size + 1)) >= 0:
            _, _, header, size = HEADER.unpack_from(library, at)
            stop = at + header + size
            if stop > end:
                raise ValueError(f"the fatbin at byte {at} ends {stop - end} bytes after its section")
            yield at, header, stop
            at = stop


def _entries(library: bytes, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        end = at + header + size
        if header < 32 or end > stop:
            raise ValueError(f"the kernel at byte {at} ends outside its fatbin")
        yield Entry(kind, *struct.unpack_from("<I", library, at + 28), library[at:end])
        at = end


def _sections(library: bytes) -> list[tuple[int, int]]:
    """(start, end) of the sections that hold fatbins."""
    if library[:5] != b"\x7fELF\x02" or len(library) < 64:
        raise ValueError("it is no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    step, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + step * index) for index in range(count)]
    found = []
    for name, _, _, _, start, size in headers:
        at = headers[names][4] + name
        if library[at : library.index(b"\0", at)] in SECTIONS:
            found.append((start, start + size))
    return found
