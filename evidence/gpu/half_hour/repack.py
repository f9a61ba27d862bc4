"""From a list of wheels to pieces: what is needed of each, compressed, in archives of limited size."""

from __future__ import annotations

import calendar
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from gpu.half_hour.fatbin import keep_only

MIB = 2**20
# pip takes each for itself; 2.35: Ubuntu 22.04
PLATFORMS = (
    *(f"manylinux_2_{libc}_x86_64" for libc in range(35, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
ABOVE_RAY = "rllib", "tune", "train", "serve", "data", "llm"
# package, patterns of its files, why our runs work without them
NOT_NEEDED = (
    ("*", ["*.dist-info/RECORD"], "only pip reads it"),
    ("ray", ["ray/jars/*", "ray/cpp/*"], "for drivers in Java and C++"),
    ("ray", [f"ray/{name}/*" for name in ABOVE_RAY], "libraries that use Ray"),
    ("ray", ["ray/dashboard/client/*"], "the dashboard's pages"),
    (
        "vllm",
        ["vllm/vllm-rs", "vllm/_rust_tool_parser*"],
        "a front end in Rust; verl starts the one in Python",
    ),
    ("vllm", ["vllm/vllm_flash_attn/_vllm_fa2_C*"], "Hopper has FlashAttention 3"),
    ("vllm", ["vllm/_moe_C*"], "for mixtures of experts; our recipes' models are dense"),
    ("vllm", ["vllm/_flashmla*", "vllm/third_party/deep_gemm/*"], "for DeepSeek's models"),
    ("vllm", ["vllm/third_party/fmha_sm100/*"], "for Blackwell"),
    ("vllm", ["vllm/entrypoints/serve/instrumentator/static/*", "vllm/benchmarks/*"], "pages and benchmarks"),
)


class File(NamedTuple):
    name: str
    content: bytes
    executable: bool
    time: int


def wheels(lock: Path, folder: Path, python: str) -> list[Path]:
    """The wheels of ``lock`` in its order: from ``folder``, else downloaded, and built where the index has no wheel."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    fixed = ["--no-deps", "--require-hashes", "--requirement", str(lock), "--dest", str(folder), "--quiet"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*pip, "download", *fixed, "--python-version", python, *platforms], check=True)
    found = []
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE):
        archive = _archive(folder, name, version)
        if archive.suffix != ".whl":
            made = folder / "made"
            into = ["--quiet", "--no-deps", "--wheel-dir", str(made)]
            subprocess.run([*pip, "wheel", *into, str(archive)], check=True)
            archive = _archive(made, name, version)
        found.append(archive)
    return found


def _archive(folder: Path, name: str, version: str) -> Path:
    start = f"{_plain(name)}-{_plain(version)}"
    (found,) = [
        path for path in folder.iterdir()
        if _plain(path.name).startswith((f"{start}-py", f"{start}-cp", f"{start}-tar"))
    ]  # fmt: skip
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.+]+", "-", name).lower()


def needed(wheel: Path, arch: int) -> Iterator[File]:
    """Its files as they lie in site-packages, without what NOT_NEEDED names and without kernels of other architectures."""
    package = _plain(wheel.name.split("-")[0])
    patterns = [one for name, some, _ in NOT_NEEDED if fnmatch(package, name) for one in some]
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            if (
                info.is_dir()
                or re.match(r"[^/]+\.data/", name)
                or any(fnmatch(name, one) for one in patterns)
            ):
                continue
            content = archive.read(info)
            if name.endswith(".so"):
                kept = keep_only(content, arch)
                if kept.fatbins and not kept.usable:
                    print(f"{wheel.name}: without {name}: it is for {kept.architectures}, not for {arch}")
                    continue
                content = kept.content
            yield File(name, content, bool(info.external_attr >> 16 & 0o100), calendar.timegm(info.date_time))


def compressed(files: list[File], at_once: int = 8 * MIB) -> list[bytes]:
    """xz streams, each with whole entries of a tar archive: any of them in a row, and END, are an archive."""
    groups, size = [], 0
    for file in files:
        if not groups or size + len(file.content) > at_once:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += len(file.content)
    with ThreadPoolExecutor() as pool:  # lzma works beside Python
        return list(pool.map(_stream, groups))


def _stream(files: list[File]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(file.name)
            member.size, member.mtime = len(file.content), file.time
            member.mode = 0o755 if file.executable else 0o644
            tar.addfile(member, io.BytesIO(file.content))
        end = tar.offset
    return _xz(buffer.getvalue()[:end])


def _xz(content: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]
    return lzma.compress(content, filters=filters)


END = _xz(bytes(2 * tarfile.BLOCKSIZE))


def write(streams: list[tuple[bytes, str]], out: Path, name: str, limit: int) -> list[dict]:
    """NAME-1.tar.xz, ... of at most ``limit`` bytes, from all (stream, its wheel) in their order."""
    pieces: list[list[tuple[bytes, str]]] = [[]]
    for stream, wheel in streams:
        if len(stream) + len(END) > limit:
            size = f"{len(stream) / MIB:.1f} MiB that cannot be divided"
            raise ValueError(f"{wheel} has {size}, and a piece is {limit / MIB:g} MiB at most")
        if sum(len(other) for other, _ in pieces[-1]) + len(stream) + len(END) > limit:
            pieces.append([])
        pieces[-1].append((stream, wheel))
    return [_written(out / f"{name}-{number}.tar.xz", piece) for number, piece in enumerate(pieces, 1)]


def _written(path: Path, piece: list[tuple[bytes, str]]) -> dict:
    path.write_bytes(b"".join(stream for stream, _ in piece) + END)
    names = list(dict.fromkeys(wheel for _, wheel in piece))
    return {"piece": path.name, "bytes": path.stat().st_size, "sha256": sha256(path), "wheels": names}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
