"""The manifest of an index: what was indexed, by which encoder, and the hash of every file."""

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FORMAT = 1
FILES = ("index.faiss", "corpus.jsonl", "offsets.npy")


class IndexMismatch(ValueError):
    """An index whose files, manifest and encoder do not belong together."""


def write_manifest(folder: Path, *, kind: str, rows: int, encoder: dict) -> dict:
    """Describe the index in `folder`, whose files are complete, in `folder/manifest.json`."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in FILES
    }
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "metric": "inner_product",
        "dtype": "float32",
        "rows": rows,
        "dim": encoder["dim"],
        "encoder": encoder,
        "corpus_sha256": files["corpus.jsonl"]["sha256"],
        "files": files,
        "versions": _versions(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> dict:
    """Read and check `folder/manifest.json`. Errors: IndexMismatch names key, value and what is accepted."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise IndexMismatch(f"{path} does not exist; build the index with `verl-credit-retriever index`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise IndexMismatch(f"{path} is not JSON ({error}); rebuild the index") from None
    accepted = {"format": FORMAT, "kind": "flat", "metric": "inner_product", "dtype": "float32"}
    for key, value in accepted.items():
        if not isinstance(manifest, dict) or manifest.get(key) != value:
            found = manifest.get(key) if isinstance(manifest, dict) else manifest
            raise IndexMismatch(f"{path}: {key}={found!r}; this version reads {value!r}")
    for key, kind in {"rows": int, "dim": int, "encoder": dict, "files": dict}.items():
        if not isinstance(manifest.get(key), kind):
            raise IndexMismatch(f"{path}: {key}={manifest.get(key)!r}; expected {kind.__name__}")
    return manifest


def check_files(folder: Path, manifest: dict) -> None:
    """Compare every file's size and sha256 with the manifest (reads all of them once)."""
    for name in FILES:
        path, expected = folder / name, manifest["files"].get(name)
        if not isinstance(expected, dict):
            raise IndexMismatch(
                f"{folder / 'manifest.json'}: files[{name!r}]={expected!r}; expected bytes and sha256"
            )
        if not path.is_file():
            raise IndexMismatch(
                f"{path} does not exist; the manifest lists it with {expected['bytes']} bytes"
            )
        found = path.stat().st_size
        if found != expected["bytes"]:
            raise IndexMismatch(
                f"{path}: {found} bytes; the manifest says {expected['bytes']}; rebuild the index"
            )
        found = sha256(path)
        if found != expected["sha256"]:
            raise IndexMismatch(
                f"{path}: sha256={found}; the manifest says {expected['sha256']}; rebuild the index"
            )


def check_encoder(manifest: dict, encoder: dict) -> None:
    """An index answers only the encoder that built it. `encoder`: SentenceEncoder.fingerprint()."""
    for key, expected in manifest["encoder"].items():
        if key != "name" and encoder.get(key) != expected:
            raise IndexMismatch(f"encoder {key}={encoder.get(key)!r}; the index was built with {expected!r}")


def _versions() -> dict:
    found = {"python": platform.python_version()}
    for name in ("faiss-cpu", "faiss-gpu-cu12", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
