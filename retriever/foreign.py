"""What a file is that lies in the place of another one: its first bytes tell."""

from pathlib import Path

STARTS = {
    b"version https://git-lfs": "a Git-LFS pointer: the file itself was not downloaded; run git lfs pull in its clone",
    b"<!doctype html": "a web page (HTML), such as a page to log in: download the file again",
    b"<html": "a web page (HTML), such as a page to log in: download the file again",
    b"<?xml": "an XML page, such as an error of a storage service: download the file again",
    b"\x1f\x8b\x08": "compressed with gzip: unpack it first",
    b"bzh": "compressed with bzip2: unpack it first",
    b"\xfd7zxz": "compressed with xz: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"pk\x03\x04": "a ZIP archive: unpack it first",
    b"par1": "a Parquet file",
}


def what_it_is(path: Path) -> str | None:
    """Returns the name of a format that no program here reads, and what to do; None for any other file."""
    with open(path, "rb") as file:
        start = file.read(512).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return next((name for first, name in STARTS.items() if start.startswith(first)), None)
