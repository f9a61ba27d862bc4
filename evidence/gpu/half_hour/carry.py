"""Carries what a GPU machine without a network lacks: wheels as one archive, cut into pieces of 52 MiB.

    python evidence/gpu/half_hour/carry.py pack FOLDER [--python 3.12] [--without vllm]   # here, with a network
    python evidence/gpu/half_hour/carry.py unpack FOLDER SITE                             # there; then PYTHONPATH=SITE

`pack` downloads the wheels of lock-*.txt, whose hashes pip checks, and leaves out what `NOT_NEEDED` names. `unpack` joins
the pieces in FOLDER, refuses them unless all are there and whole, and compiles what they hold.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
GROUPS = ("base", "vllm")
PIECE, SUM = 52 * 2**20, "sha256.txt"
# pip takes each for itself; 2.35: Ubuntu 22.04
PLATFORMS = (
    *(f"manylinux_2_{libc}_x86_64" for libc in range(35, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
NOT_NEEDED = (
    "*.dist-info/RECORD",
    "ray/jars/*", "ray/cpp/*", *(f"ray/{name}/*" for name in ("rllib", "tune", "train", "serve", "data", "llm")),
    "ray/dashboard/client/*",
    "vllm/vllm-rs", "vllm/_rust_tool_parser*",  # verl starts the front end in Python
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # Hopper has FlashAttention 3
    "vllm/_moe_C*", "vllm/_flashmla*", "vllm/third_party/deep_gemm/*",  # mixtures of experts, DeepSeek
    "vllm/third_party/fmha_sm100/*",  # Blackwell
    "vllm/benchmarks/*",
)  # fmt: skip


def download(groups: list[str], folder: Path, python: str) -> list[Path]:
    """Returns the wheels of the groups' locks; one that the index does not have is built from its source."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    given = ["--no-deps", "--require-hashes", "--dest", str(folder), "--python-version", python, "--quiet"]
    for group in groups:
        lock = ["--requirement", str(HERE / f"lock-{group}.txt")]
        subprocess.run(
            [*pip, "download", *given, *lock, *(f"--platform={one}" for one in PLATFORMS)], check=True
        )
    for source in folder.glob("*.tar.gz"):
        made = ["wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
        subprocess.run([*pip, *made], check=True)
    return sorted(folder.glob("*.whl"))


def pack(wheels: list[Path], out: Path, piece: int = PIECE) -> list[Path]:
    """Writes the files that are needed, as they lie in site-packages, as OUT/piece-01, ...; returns the pieces."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    whole = out / "site.tar.xz"
    with tarfile.open(whole, "w:xz", preset=6) as tar:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
                    if info.is_dir() or ".data/" in name or any(fnmatch(name, one) for one in NOT_NEEDED):
                        continue
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = (
                        info.file_size,
                        0o755 if info.external_attr >> 16 & 0o100 else 0o644,
                    )
                    with archive.open(info) as file:
                        tar.addfile(member, file)
    with whole.open("rb") as file:
        (out / SUM).write_text(hashlib.file_digest(file, "sha256").hexdigest())
        file.seek(0)
        for number, content in enumerate(iter(lambda: file.read(piece), b""), 1):
            (out / f"piece-{number:02}").write_bytes(content)
    whole.unlink()
    return sorted(out.glob("piece-*"))


def unpack(folder: Path, site: Path) -> None:
    """Raises ValueError where a piece is missing or broken."""
    whole = folder / "site.tar.xz"
    with whole.open("wb") as file:
        for piece in sorted(folder.glob("piece-*")):
            file.write(piece.read_bytes())
    with whole.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != (folder / SUM).read_text():
            raise ValueError(f"the pieces in {folder} are not the archive of {SUM}: one is missing or broken")
    with lzma.open(whole) as stream, tarfile.open(fileobj=stream) as tar:
        tar.extractall(site, filter="data")
    whole.unlink()
    subprocess.run(
        [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(site)], stdout=subprocess.DEVNULL
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="3.12", help="the machine's")
    packing.add_argument("--without", choices=GROUPS[1:])
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "unpack":
        unpack(given.folder, given.site)
        return
    groups = [group for group in GROUPS if group != given.without]
    for piece in pack(download(groups, given.folder / "wheels", given.python), given.folder):
        print(f"{piece}: {piece.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
