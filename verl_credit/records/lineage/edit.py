"""The changes of a trial: the difference between its snapshot and its parent's snapshot."""

from __future__ import annotations

import difflib
import io
from dataclasses import dataclass
from pathlib import Path

from verl_credit.records.lineage.trial import Trial

NOWHERE = "/dev/null"


@dataclass(frozen=True)
class RecipeEdit:
    """``snapshot_path`` and ``parent_snapshot_path``: two files or two folders; no parent for a baseline."""

    trial: Trial
    snapshot_path: str | Path
    parent_snapshot_path: str | Path | None

    def diff(self) -> str:
        """A unified diff of every file that differs, by name: changed, new, and deleted ones; "" for a baseline.

            --- a/x          --- /dev/null: x is new
            +++ b/x          +++ /dev/null: x was deleted

        Files that are no UTF-8 text get a line that they differ. Links are not followed. The released diff leaves
        deleted files out. Raises FileNotFoundError for a missing snapshot.
        """
        if not self.parent_snapshot_path:
            return ""
        before, after = _files(Path(self.parent_snapshot_path)), _files(Path(self.snapshot_path))
        if before.keys() == {""} and after.keys() == {""}:
            name = Path(self.snapshot_path).name
            before, after = {name: before[""]}, {name: after[""]}
        diffs = (_diff(name, before.get(name), after.get(name)) for name in sorted({*before, *after}))
        return "".join(diffs)


def _files(root: Path) -> dict[str, Path]:
    """Returns the files by their names below ``root``; the name is "" when the root is a file."""
    if root.is_file():
        return {"": root}
    if not root.is_dir():
        raise FileNotFoundError(f"snapshot {root} is not there")
    paths = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).as_posix(): path for path in paths}


def _diff(name: str, before: Path | None, after: Path | None) -> str:
    old, new = (path.read_bytes() if path else b"" for path in (before, after))
    if old == new and before and after:
        return ""
    a, b = f"a/{name}" if before else NOWHERE, f"b/{name}" if after else NOWHERE
    try:
        if b"\0" in old + new:
            raise ValueError
        left, right = (content.decode() for content in (old, new))
    except ValueError:  # UnicodeDecodeError is a ValueError
        return f"Binary files {a} and {b} differ\n"
    # The parts end at line feeds only: ``splitlines`` also splits at eleven other characters.
    lines = list(difflib.unified_diff(*(list(io.StringIO(text, "\n")) for text in (left, right)), a, b))
    lines = lines or [f"--- {a}\n", f"+++ {b}\n"]  # an empty file that is new or gone
    return "".join(one if one.endswith("\n") else one + "\n\\ No newline at end of file\n" for one in lines)
