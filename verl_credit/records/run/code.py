"""Which code a run was made with: the commit of its repository, and a hash of what is not committed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

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
