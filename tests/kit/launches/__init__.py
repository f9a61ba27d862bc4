"""The overrides of ten public launches of verl: facts, each with the repository, commit and file that states them.

A file has its source, the entry point, and the overrides. Variables have their defaults, and folders of the authors are
relative. NAME.yaml is the file that the launch names with --config-name. The scripts themselves are not here.
"""

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class PublicLaunch(NamedTuple):
    entry: str
    overrides: list[str]
    config: Path | None


def read(name: str) -> PublicLaunch:
    _, entry, *lines = (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    config = HERE / f"{name}.yaml"
    return PublicLaunch(entry, " ".join(lines).split(), config if config.exists() else None)


NAMES = sorted(file.stem for file in HERE.glob("*.txt"))
