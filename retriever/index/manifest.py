"""The manifest of an index: what was indexed, by which encoder, and the hash of every file and of itself.

Hashes are computed once as long as nothing is written.
"""

import errno
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from uuid import uuid4

FORMAT = 3
KINDS = ("flat", "sq8", "ivf", "ivfpq", "hnsw", "exact")
APPROXIMATE = ("sq8", "ivf", "ivfpq", "hnsw")
DTYPES = {"fp16": "float16", "fp32": "float32"}
OWN_HASH = "manifest_sha256"  # the hash of all other keys
# Keys on which no answer depends, or that the hashes of the files cover.
NOT_ANSWERS = ("versions", "format", OWN_HASH, "encoded_in")
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
log = logging.getLogger("verl_credit_retriever")


class IndexMismatch(ValueError):
    """An index whose files, manifest and encoder do not belong together."""


def files_of(kind: str) -> tuple[str, ...]:
    """The files beside the manifest.

    Every kind keeps its encoded vectors exactly once: `flat` at the end of index.faiss, the others in vectors.npy.
    `exact` has no FAISS file.
    """
    own = {"flat": ("index.faiss",), "exact": ("vectors.npy",)}.get(kind, ("index.faiss", "vectors.npy"))
    return (*own, "corpus.jsonl", "offsets.npy")


def write_manifest(
    folder: Path,
    *,
    kind: str,
    rows: int,
    encoder: dict,
    encoded_in: str | None = None,
    dtype: str = "float32",
    parameters: dict | None = None,
    search: dict | None = None,
) -> dict:
    """Describe the index in `folder`, whose files are complete, in `folder/manifest.json`.

    `parameters` is what the kind was built with, `search` what it is searched with unless overridden, `encoded_in` the
    type in which the encoder computed the vectors (None: not known).
    """
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in files_of(kind)
    }
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "parameters": parameters or {},
        "search": search or {},
        "metric": "inner_product",
        "dtype": dtype,
        "rows": rows,
        "dim": encoder["dim"],
        "encoder": encoder,
        "encoded_in": encoded_in,
        "corpus_sha256": files["corpus.jsonl"]["sha256"],
        "files": files,
        "versions": _versions(),
    }
    manifest[OWN_HASH] = own_hash(manifest)
    with naming(folder / "manifest.json"):
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> dict:
    """Read and check `folder/manifest.json`. Errors: IndexMismatch names key, value and what is accepted."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise IndexMismatch(f"{path} does not exist; {_missing_hint(folder)}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise IndexMismatch(f"{path} is not JSON ({error}); rebuild the index") from None
    if not isinstance(manifest, dict):
        raise IndexMismatch(f"{path}: {str(manifest)[:80]!r} is not an object; rebuild the index")
    _require_one_of(path, manifest, "format", (FORMAT,))
    if manifest.get(OWN_HASH) != (digest := own_hash(manifest)):
        raise IndexMismatch(
            f"{path}: {OWN_HASH}={manifest.get(OWN_HASH)!r}, but its values have {digest!r}: one was changed; "
            "restore the file or rebuild the index"
        )
    _require_one_of(path, manifest, "kind", KINDS)
    _require_one_of(path, manifest, "metric", ("inner_product",))
    _require_one_of(path, manifest, "dtype", DTYPES.values())
    typed = {"encoder": dict, "files": dict, "parameters": dict, "search": dict, "corpus_sha256": str}
    for key, kind in typed.items():
        if not isinstance(manifest.get(key), kind):
            raise IndexMismatch(f"{path}: {key}={manifest.get(key)!r}; expected {kind.__name__}")
    for key in ("rows", "dim"):
        if type(manifest.get(key)) is not int or manifest[key] < 1:
            raise IndexMismatch(f"{path}: {key}={manifest.get(key)!r}; expected an integer of at least 1")
    return manifest


def _require_one_of(path: Path, manifest: dict, key: str, accepted: Iterable) -> None:
    choices = list(accepted)
    if manifest.get(key) not in choices:
        readable = " or ".join(map(repr, choices))
        raise IndexMismatch(f"{path}: {key}={manifest.get(key)!r}; this version reads {readable}")


def require_equal(path: Path, compared: dict[str, tuple]) -> None:
    """Errors: IndexMismatch names the first of {what: (value, right value)} that differ."""
    for what, (value, right) in compared.items():
        if value != right:
            raise IndexMismatch(f"{path}: {what}={value!r}; expected {right!r}; rebuild the index")


def backup_of(folder: Path) -> Path:
    """`index --overwrite` keeps the old index here while it moves the new one into place."""
    return folder.with_name(f".{folder.name}.old")


def _missing_hint(folder: Path) -> str:
    old = backup_of(folder)
    if not folder.exists() and (old / "manifest.json").is_file():
        return f"an interrupted `index --overwrite` left the previous index in {old}: `mv {old} {folder}`"
    return "build the index with `verl-credit-retriever index`"


def check_files(folder: Path, manifest: dict, verify: str) -> None:
    """Compare every file's size and sha256 with the manifest: verify="all" reads all files, "known" those that have changed
    since this user last hashed them, "none" compares nothing."""
    if verify == "none":
        return
    hash_of = known_sha256 if verify == "known" else sha256
    where = folder / "manifest.json"
    for name in files_of(manifest["kind"]):
        path, expected = folder / name, manifest["files"].get(name)
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            raise IndexMismatch(f"{where}: files[{name!r}]={expected!r}; expected bytes and sha256")
        if not path.is_file():
            raise IndexMismatch(f"{path} does not exist; the manifest lists {expected['bytes']} bytes")
        require_equal(path, {"bytes": (path.stat().st_size, expected["bytes"])})
        require_equal(path, {"sha256": (hash_of(path), expected["sha256"])})
    corpus_sha256 = manifest["files"]["corpus.jsonl"]["sha256"]
    require_equal(where, {"corpus_sha256": (manifest["corpus_sha256"], corpus_sha256)})


def check_encoder(manifest: dict, encoder: dict) -> None:
    """Refuse an encoder other than the one that built the index; a key that the manifest lacks is different.

    `encoder`: SentenceEncoder.fingerprint().
    """
    built_with = manifest["encoder"]
    for key in [*built_with, *sorted(encoder.keys() - built_with.keys())]:
        own, expected = encoder.get(key), built_with.get(key)
        if key != "name" and (own != expected or key not in built_with):
            raise IndexMismatch(f"encoder {key}={own!r}; the index was built with {expected!r}")


def fingerprint(manifest: dict, **more) -> str:
    """Hex digest of all that determines the answers: the manifest without versions and names, and `more`."""
    kept = {key: value for key, value in manifest.items() if key not in NOT_ANSWERS}
    kept["encoder"] = {key: value for key, value in manifest["encoder"].items() if key != "name"}
    return _json_sha256(kept | more)


def own_hash(manifest: dict) -> str:
    """Hex digest of the manifest without this hash."""
    return _json_sha256({key: value for key, value in manifest.items() if key != OWN_HASH})


def _json_sha256(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _versions() -> dict:
    versions = {"python": platform.python_version()}
    for name in ("faiss-cpu", "faiss-gpu-cu12", "torch", "transformers", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to the OSError of a full disk that the block raises."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that it is complete or absent. Several processes may write the same file."""
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with naming(path), open(temporary, "xb", opener=lambda *given: os.open(*given, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """Hex digest of a file. The recorded digest is taken where device, inode, size, mtime and ctime are still the same.

    With it a start need not read 65 GB. The kernel sets ctime at every write and at every change of times, and no program
    can set it back. Kept in the user's cache folder, which others cannot write. What this does not see: a disk that gives
    other bytes than were written, and writes through a memory map that was open when the file was hashed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_credit_retriever"
    store, key = folder / "hashes.json", _key(path)
    known = _read_hashes(store)
    if key in known:
        return known[key]
    digest = sha256(path)
    if _key(path) == key:  # it did not change meanwhile
        current = {name: value for name, value in known.items() if _key(Path(name.rsplit("|", 5)[0])) == name}
        with suppress(OSError):  # without a place for the file the next start computes them again
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(store, json.dumps(current | {key: digest}).encode(), mode=0o600)
    return digest


def _key(path: Path) -> str | None:
    """The path with all that shows whether the file has changed; None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "|".join(map(str, (path.resolve(), *numbers)))


def _read_hashes(store: Path) -> dict[str, str]:
    """The recorded hashes; none when the file is missing, damaged, another user's, or writable by others."""
    try:
        status = store.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return {}
        hashes = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    good = isinstance(hashes, dict) and all(isinstance(value, str) for value in hashes.values())
    return hashes if good else {}
