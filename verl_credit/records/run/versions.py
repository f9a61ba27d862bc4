"""The versions of a run's packages, which it saves beside its configuration and `verl-credit diff` compares; and the commit
of its code."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_credit.records.run.files import write_text

VERSIONS = "versions.json"
PACKAGES = (
    "verl-credit", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "vllm", "flash-attn", "peft",
    "numpy",
)  # fmt: skip


def installed_versions() -> dict[str, str]:
    """The versions of Python and of every installed package of PACKAGES."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def write_versions(run_dir: Path) -> None:
    write_text(Path(run_dir) / VERSIONS, json.dumps(installed_versions(), indent=1))


def read_versions(run_dir: Path) -> dict[str, str] | None:
    """The saved versions, or None for a run without them. Raises ValueError naming a file that is malformed."""
    path = Path(run_dir) / VERSIONS
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds {type(saved).__name__}; expected an object of package: version")
    return {str(k): str(v) for k, v in saved.items()}


LARGE = 2**20  # bytes; of a new file that is larger, data by mistake, name and size count


def code_version(folder: Path) -> dict[str, str | None]:
    """``commit``, and ``changes``: sha256 of the changes to tracked files and of the files that are new; None where there
    are none. Both are None for a folder that is not tracked by git (an installation)."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        top = Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
        commit = _git(top, "rev-parse", "HEAD").decode().strip()
        changes = _git(top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0"):
            path = top / name.decode(errors="surrogateescape")
            if name and path.is_file():
                size = path.stat().st_size
                content = path.read_bytes() if size <= LARGE else str(size).encode()
                changes += name + b"\0" + hashlib.sha256(content).digest()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {"commit": None, "changes": None}
    return {"commit": commit, "changes": hashlib.sha256(changes).hexdigest() if changes else None}


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout
