"""The raw results behind the tables: evidence/TOPIC/raw.tar.xz, and its checksum in evidence/TOPIC/numbers.json.

    python evidence/archive.py                         # unpack all of them into build/evidence (`make evidence-raw`)
    python evidence/archive.py pack FOLDER TOPIC       # make TOPIC's archive from FOLDER, and write its checksum

The same files give the same archive: they are sorted, and have no owner and no time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
UNPACKED = HERE.parent / "build" / "evidence"
RAW, NUMBERS = "raw.tar.xz", "numbers.json"


def topics() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob(f"*/{RAW}"))


def packed(folder: Path) -> bytes:
    """All files below ``folder`` as a tar.xz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def pack(folder: Path, topic: Path) -> None:
    content = packed(folder)
    (topic / RAW).write_bytes(content)
    numbers = topic / NUMBERS
    found = json.loads(numbers.read_text()) if numbers.exists() else {}
    numbers.write_text(as_text({"raw": ""} | found | {"raw": _sha(content)}))


def _sha(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()}"


def unpack(topic: Path, into: Path) -> None:
    """Raises ValueError where the archive is not the one whose checksum numbers.json has."""
    content, written = (topic / RAW).read_bytes(), json.loads((topic / NUMBERS).read_text())["raw"]
    if _sha(content) != written:
        raise ValueError(f"{topic / RAW} has {_sha(content)}, and {topic / NUMBERS} has {written!r}")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
        tar.extractall(into, filter="data")


def as_text(numbers: dict) -> str:
    """JSON with one line for each row of a table."""
    lines = []
    for name, table in numbers.items():
        if isinstance(table, dict):
            rows = ",\n".join(f"  {json.dumps(key)}: {_compact(value)}" for key, value in table.items())
            lines.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
        else:
            lines.append(f" {json.dumps(name)}: {_compact(table)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value) -> str:
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command")
    made = commands.add_parser("pack")
    made.add_argument("folder", type=Path)
    made.add_argument("topic", choices=sorted(path.name for path in HERE.iterdir() if path.is_dir()))
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.folder, HERE / given.topic)
        return
    for topic in topics():
        unpack(HERE / topic, UNPACKED / topic)
        print(UNPACKED / topic)


if __name__ == "__main__":
    main()
