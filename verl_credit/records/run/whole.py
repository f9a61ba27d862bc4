"""Whether the files of a checkpoint are as they were saved.

torch's files are ZIP archives. Their list of contents stands at the end, so that a file that was cut short is found at once.
It has the CRC32 of every tensor, which torch writes and does not compare. TransferQueue's files are pickles, whose last byte
is a dot. Pickles, JSON and safetensors have no checksum: a changed byte inside them is seen only where it makes no JSON.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError, safe_open

LIMIT_S = 60.0
"""Reading longer than that would delay the start of a run more than an early refusal is worth."""
CHUNK = 1 << 22
NO_CHECKSUM = 0
"""The CRC32 of every tensor after torch.serialization.set_crc32_options(False)."""
DAMAGED_ZIP = (zipfile.BadZipFile, EOFError, ValueError, RuntimeError)
"""What Python's reader of archives raises for damaged ones. RuntimeError: a flipped bit says that a member is encrypted, or
compressed in a way that it does not know."""


def cut(path: Path) -> str | None:
    """Why the file cannot be loaded: it is missing, or its end is. Its other bytes are not read."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "np"):  # compares the header with the file's size
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return None
        if path.suffix == ".pkl":
            return None if _last_byte(path) == b"." else _damaged(path, "its end is missing")
        with zipfile.ZipFile(path):
            return None
    except FileNotFoundError:
        return f"{path} is missing"
    except (*DAMAGED_ZIP, SafetensorError) as error:
        json_s = path.suffix == ".json"
        how = (
            f"it is no JSON ({error})"
            if json_s
            else "its end is missing, as after a write that was cut short"
        )
        return _damaged(path, how)
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def changed(
    paths: Iterable[Path], limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> tuple[str | None, int]:
    """Reads torch's files and compares every tensor with its checksum; zlib lets the threads run at the same time.

    Returns (a file that was changed since it was saved, or None; the number of bytes for which ``limit_s`` was too short).
    """
    end, found = clock() + limit_s, []

    def read(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
        left = member.file_size
        try:
            with archive.open(member) as file:
                while left and not found and clock() < end:
                    if not (piece := file.read(CHUNK)):
                        raise EOFError
                    left -= len(piece)
        except DAMAGED_ZIP:
            found.append(_damaged(path, f"{member.filename!r} in it is not what was saved"))
        except OSError as error:
            found.append(f"{path}: {error.strerror or error}")
        return left

    with ExitStack() as stack, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        of = {path: stack.enter_context(zipfile.ZipFile(path)) for path in paths if path.exists()}
        members = [(path, archive, one) for path, archive in of.items() for one in archive.infolist()]
        unread = sum(threads.map(lambda at: read(*at), [at for at in members if at[2].CRC != NO_CHECKSUM]))
    return (found[0], 0) if found else (None, unread)


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-min(1, path.stat().st_size), os.SEEK_END)
        return file.read()


def _damaged(path: Path, how: str) -> str:
    return f"{path} ({path.stat().st_size:,} bytes) is damaged: {how}"
