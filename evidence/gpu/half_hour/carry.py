"""Puts what a GPU machine without a network lacks into pieces of at most 52 MiB, and unpacks them there.

    python evidence/gpu/half_hour/carry.py build --out FOLDER [--arch 90] [--python 3.12] [--without vllm]
    python evidence/gpu/half_hour/carry.py unpack FOLDER/*.tar.xz --to SITE        # then PYTHONPATH=SITE

`build` downloads the wheels of lock-*.txt, whose hashes pip checks, and writes base-*.tar.xz (verl, Ray, transformers and
what they import), vllm-*.tar.xz and manifest.json. repack.py has what is left out, fatbin.py how kernels of one architecture
are kept. Every piece is an archive of its own. `unpack` needs manifest.json beside the pieces. A call that was cut is
repeated: pieces that SITE has are passed over. Its exit code: 0: every named piece is there, and what is complete can be
imported; 1: an import failed; 2: a piece was not unpacked. `unpack` needs Python alone, `build` pip as well.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if not __package__:
    sys.path[:1] = [str(HERE.parents[1])]  # `gpu`; not this folder, whose files have plain names

from gpu.half_hour.repack import MIB, compressed, needed, sha256, wheels, write  # noqa: E402

MANIFEST, DONE = "manifest.json", ".carried"
# In the order in which they are needed; each has a lock-*.txt. `unpack` tries to import these modules.
GROUPS = {
    "base": (
        "ray", "transformers", "hydra", "omegaconf", "tensordict", "transfer_queue", "pydantic", "zmq", "msgspec",
        "fastapi", "uvicorn", "datasets", "verl", "verl.trainer.main_ppo",
    ),
    "vllm": (
        "vllm", "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C", "vllm.platforms.cuda",
        "vllm.v1.engine.async_llm", "verl.workers.rollout.vllm_rollout.vllm_async_server",
    ),
}  # fmt: skip


def build(out: Path, piece_mib: float, arch: int, python: str, groups: Sequence[str]) -> dict:
    """The manifest; every group begins a piece. Raises ValueError for a file that fits no piece."""
    downloads = out / f"wheels-{python}"
    downloads.mkdir(parents=True, exist_ok=True)
    for path in (path for group in GROUPS for path in out.glob(f"{group}-*.tar.xz")):
        path.unlink()  # of an earlier build
    pieces, facts = [], []
    for group in groups:
        streams = []
        for wheel in wheels(HERE / f"lock-{group}.txt", downloads, python):
            files = list(needed(wheel, arch))
            of_wheel = compressed(files)
            streams += [(stream, wheel.name) for stream in of_wheel]
            facts.append(
                {
                    "wheel": wheel.name,
                    "group": group,
                    "sha256": sha256(wheel),
                    "bytes": wheel.stat().st_size,
                    "carried_bytes": sum(map(len, of_wheel)),
                    "files": len(files),
                    "unpacked_bytes": sum(len(file.content) for file in files),
                }
            )
        pieces += write(streams, out, group, int(piece_mib * MIB))
    manifest = {"python": python, "arch": arch, "pieces": pieces, "wheels": facts}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def unpack(pieces: list[Path], site: Path) -> int:
    """The exit code. Raises ValueError without a manifest, for another Python, and where ``site`` has another build."""
    manifest = _manifest(pieces[0].parent / MANIFEST, site)
    (site / DONE).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    wrong = 0
    for piece in pieces:
        if reason := _unpack_one(piece, manifest, site):
            wrong += 1
            print(f"{piece.name} is not unpacked: {reason}", flush=True)
    print(f"unpacked in {time.monotonic() - started:.0f} s", flush=True)
    started = time.monotonic()
    # Where no import writes bytecode, what the machine has of its own is compiled, too: every process would compile torch.
    # The command ends with 1 where a package has files for another Python: nothing imports those.
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib")} if sys.dont_write_bytecode else ()
    folders = [str(site), *own]
    subprocess.run(
        [sys.executable, "-m", "compileall", "-qq", "-j", "0", *folders], stdout=subprocess.DEVNULL
    )
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    missing = [fact for fact in manifest["pieces"] if not (site / DONE / fact["sha256"]).exists()]
    incomplete = {wheel for fact in missing for wheel in fact["wheels"]}
    failed = 0
    for group in dict.fromkeys(fact["group"] for fact in manifest["wheels"]):
        if incomplete & {fact["wheel"] for fact in manifest["wheels"] if fact["group"] == group}:
            print(f"{group}: not complete without {', '.join(fact['piece'] for fact in missing)}")
        else:
            failed += smoke(GROUPS[group], site)
    return 2 if wrong else 1 if failed else 0


def _manifest(path: Path, site: Path) -> dict:
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}, which `build` writes beside the pieces, cannot be read: {error}") from None
    if manifest["python"] != (here := "{}.{}".format(*sys.version_info)):
        raise ValueError(f"the pieces are for Python {manifest['python']}, and this is {here}")
    if {done.name for done in site.glob(f"{DONE}/*")} - {fact["sha256"] for fact in manifest["pieces"]}:
        raise ValueError(f"{site} has pieces of another build; name an empty folder")
    return manifest


def _unpack_one(piece: Path, manifest: dict, site: Path) -> str | None:
    """Why it was not unpacked."""
    known = {fact["piece"]: fact for fact in manifest["pieces"]}
    if piece.name not in known:
        return f"{MANIFEST} has only {', '.join(known)}"
    fact = known[piece.name]
    if (site / DONE / fact["sha256"]).exists():
        return None
    try:
        if (found := sha256(piece)) != fact["sha256"]:
            there = f"it has {piece.stat().st_size} bytes with sha256 {found[:12]}"
            return f"{there}, and {MANIFEST} has {fact['bytes']} with {fact['sha256'][:12]}"
        with tarfile.open(piece, "r:xz") as tar:
            tar.extractall(site, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    (site / DONE / found).touch()
    return None


IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        why = ""
    except BaseException as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"import {name} {why}", flush=True)
"""


def smoke(names: Sequence[str], site: Path) -> int:
    """How many of ``names`` cannot be imported; one process imports all, and its end is told from their errors."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", "-c", IMPORT, *names]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    said = dict(re.findall(r"^import (\S+) (.*)$", done.stdout, re.MULTILINE))
    wrong = {name: said.get(name, f"the process ended with {done.returncode}") for name in names}
    for name, why in wrong.items():
        print(f"  {name}: {why or 'imported'}", flush=True)
    return sum(why != "" for why in wrong.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--piece-mib", type=float, default=52)
    making.add_argument("--arch", type=int, default=90, help="90: H100 and H200")
    making.add_argument("--python", default="3.12", help="the machine's")
    making.add_argument("--without", action="append", choices=[*GROUPS][1:], default=[])
    taking = commands.add_parser("unpack")
    taking.add_argument("pieces", type=Path, nargs="+")
    taking.add_argument("--to", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.command == "unpack":
            return unpack(given.pieces, given.to)
        groups = [group for group in GROUPS if group not in given.without]
        _show(build(given.out, given.piece_mib, given.arch, given.python, groups))
        return 0
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2


def _show(manifest: dict) -> None:
    for fact in manifest["wheels"]:
        sizes = f"{fact['bytes'] / MIB:7.2f} -> {fact['carried_bytes'] / MIB:6.2f} MiB"
        print(f"{sizes}  {fact['wheel']}, {fact['unpacked_bytes'] / MIB:.1f} MiB unpacked")
    for fact in manifest["pieces"]:
        print(f"{fact['piece']}: {fact['bytes'] / MIB:.2f} MiB, {len(fact['wheels'])} wheels")


if __name__ == "__main__":
    raise SystemExit(main())
