"""Prints the size of the project beside the limits in pyproject.toml ([tool.gate]), and fails above one of them.

    python .ci/gate.py

A limit is raised only in a commit that says what was deleted for it and why that was not enough.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "product lines": ["verl_credit/*.py", "retriever/*.py"],
    "plug-in lines": ["recipes/*.py"],
    "test lines": ["tests/*.py"],
    "evidence lines": ["evidence/*.py"],
}
SAME_NAME = "files of one name in unlike roles"


def tracked(*patterns: str) -> list[Path]:
    """Returns the files that git tracks, or would track, and that are there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in sorted(set(filter(None, names))) if (ROOT / name).is_file()]


def lines(files: list[Path]) -> int:
    """Returns the lines of all files, blank lines among them."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def shared_names(one_role: dict[str, list[str]]) -> list[str]:
    """Returns the names that several files of one package have, with these files.

    ``one_role``: the files of a name that play the same role in sibling rooms. A file of cli/ has the name of what it
    starts, and a file of recipe/rules/ of what it refuses, so that neither is counted.
    """
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in tracked("verl_credit/*.py", "retriever/*.py"):
        place = file.relative_to(ROOT)
        if not (file.name.startswith("__") or {"cli", "rules"} & set(place.parts)):
            places[place.parts[0], file.stem].append(str(place))
    return [
        f"{name}: {', '.join(files)}"
        for (_, name), files in sorted(places.items())
        if len(files) > 1 and sorted(one_role.get(name, [])) != files
    ]


def main() -> int:
    """Returns 1 if a figure is above its limit, else 0."""
    gate = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["gate"]
    same = shared_names(gate["one-role"])
    figures = {name: lines(tracked(*patterns)) for name, patterns in SOURCES.items()}
    figures["evidence files"] = len(tracked("evidence/*"))
    figures["README lines"] = lines([ROOT / "README.md"])
    figures["docs pages"] = len(tracked("docs/*.md"))
    figures[SAME_NAME] = len(same)
    print("\n".join(same))
    for name, count in figures.items():
        limit = gate["limits"][name]
        print(f"{name:34} {count:7,} of {limit:7,}{'' if count <= limit else '   ABOVE THE LIMIT'}")
    return int(any(count > gate["limits"][name] for name, count in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
