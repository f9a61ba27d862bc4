"""What is brought to a GPU machine: kernels of one architecture, pieces of limited size, and how they are unpacked."""

import json
import random
import struct
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu.half_hour import carry, repack  # noqa: E402
from gpu.half_hour.fatbin import CUBIN, MAGIC, PTX, keep_only  # noqa: E402
from gpu.half_hour.repack import END, compressed, needed, write  # noqa: E402

# --- kernels ---


def entry(kind, arch, payload, header=64):
    start = struct.pack("<HHIQ", kind, 0x101, header, len(payload)) + bytes(12) + struct.pack("<I", arch)
    return start + b"h" * (header - len(start)) + payload


def fatbin(*entries):
    content = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(content)) + content


def library(section, name=b".nv_fatbin"):
    """An ELF file with the sections .text, ``name`` and the names'."""
    names = b"\0.text\0" + name + b"\0.names\0"
    at = [(1, 64, 16), (7, 80, len(section)), (8 + len(name), 80 + len(section), len(names))]
    head = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", 80 + len(section) + len(names))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 4, 3)
    table = [bytes(64)] + [struct.pack("<IIQQQQ", n, 1, 0, 0, a, s).ljust(64, b"\0") for n, a, s in at]
    return head + b"t" * 16 + section + names + b"".join(table)


BOTH = fatbin(entry(CUBIN, 80, b"8" * 24), entry(CUBIN, 90, b"9" * 40), entry(PTX, 80, b"p" * 16, header=80))


def entries_of(content):
    """(kind, architecture, payload) of every entry, and where each fatbin begins."""
    found, at = [], 80
    while at < len(content) and content[at : at + 4] == struct.pack("<I", MAGIC):
        (size,) = struct.unpack_from("<Q", content, at + 8)
        start, of_one = at + 16, []
        while start < at + 16 + size:
            kind, _, header, payload = struct.unpack_from("<HHIQ", content, start)
            assert header, "zeros inside a fatbin"
            (arch,) = struct.unpack_from("<I", content, start + 28)
            of_one.append((kind, arch, content[start + header : start + header + payload]))
            start += header + payload
        found.append((at, of_one))
        at = content.find(struct.pack("<I", MAGIC), start)
        at = len(content) if at < 0 else at
    return found


def test_a_fatbin_becomes_that_of_one_architecture_at_its_place():
    before = library(BOTH)
    kept = keep_only(before, 90)
    assert entries_of(kept.content) == [(80, [(CUBIN, 90, b"9" * 40)])]
    assert (kept.fatbins, kept.usable, kept.architectures) == (1, 1, [80, 90])
    end = 80 + len(BOTH)
    assert kept.content[80 + 16 + 64 + 40 : end] == bytes(len(BOTH) - 16 - 64 - 40)
    assert (kept.content[:80], kept.content[end:]) == (
        before[:80],
        before[end:],
    )  # other sections, and the table
    assert keep_only(kept.content, 90).content == kept.content


def test_ptx_stays_where_a_fatbin_has_no_machine_code_for_the_architecture():
    section = BOTH + bytes(8) + fatbin(entry(CUBIN, 75, b"7" * 8), entry(PTX, 80, b"q" * 8))
    kept = keep_only(library(section), 90)
    second = 80 + len(BOTH) + 8
    assert entries_of(kept.content) == [(80, [(CUBIN, 90, b"9" * 40)]), (second, [(PTX, 80, b"q" * 8)])]
    assert (kept.fatbins, kept.usable) == (2, 2)
    assert keep_only(kept.content, 90).content == kept.content


def test_a_device_runs_older_machine_code_of_its_generation_and_no_newer_ptx():
    section = fatbin(
        entry(CUBIN, 80, b"0" * 8), entry(CUBIN, 86, b"6" * 8), entry(PTX, 80, b"p" * 8), entry(PTX, 90, b"q" * 8)
    )  # fmt: skip
    for arch, best in ((89, (CUBIN, 86, b"6" * 8)), (85, (CUBIN, 80, b"0" * 8))):
        ((_, kept),) = entries_of(keep_only(library(section), arch).content)
        assert kept == [best, (PTX, 80, b"p" * 8)]


def test_a_fatbin_without_anything_for_the_architecture_keeps_its_smallest_entry():
    kept = keep_only(library(fatbin(entry(CUBIN, 100, b"1" * 16), entry(CUBIN, 120, b"2" * 8))), 90)
    assert entries_of(kept.content) == [(80, [(CUBIN, 120, b"2" * 8)])]
    assert (kept.fatbins, kept.usable, kept.architectures) == (1, 0, [100, 120])


def test_a_library_without_kernels_is_as_it_was():
    plain = library(BOTH, name=b".rodata")
    assert keep_only(plain, 90) == (plain, 0, 0, [])


@pytest.mark.parametrize("content", [b"", b"MZ" * 50, b"\x7fELF\x01" + bytes(80), b"\x7fELF\x02"])
def test_what_is_no_elf_file_is_refused(content):
    with pytest.raises(ValueError, match="no ELF file of 64 bits"):
        keep_only(content, 90)


def test_headers_that_lead_outside_are_refused():
    with pytest.raises(ValueError, match="ends 8 bytes after its section"):
        keep_only(library(struct.pack("<IHHQ", MAGIC, 1, 16, 16) + bytes(8)), 90)
    too_long = fatbin(entry(CUBIN, 90, b"9" * 8)).replace(
        struct.pack("<Q", 8) + bytes(12), struct.pack("<Q", 9) + bytes(12)
    )
    with pytest.raises(ValueError, match="ends outside its fatbin"):
        keep_only(library(too_long), 90)


# --- pieces ---


@pytest.fixture
def wheel(tmp_path):
    """A wheel of Ray's layout, with a file of each kind."""
    path = tmp_path / "ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("ray/__init__.py", "ray/jars/ray_dist.jar", "ray/train/a/b.py", "ray/training.py"):
            archive.writestr(name, name)
        for name in (
            "ray-2.60.0.data/purelib/ray/pure.py",
            "ray-2.60.0.data/scripts/ray",
            "ray-2.60.0.dist-info/RECORD",
        ):
            archive.writestr(name, name)
        archive.writestr("ray-2.60.0.dist-info/METADATA", "Name: ray")
        program = zipfile.ZipInfo("ray/core/gcs_server", (2026, 10, 31, 0, 0, 0))
        program.external_attr = 0o755 << 16
        archive.writestr(program, b"\x7fELF")
        archive.writestr("ray/here.so", library(BOTH))
        archive.writestr("ray/blackwell.so", library(fatbin(entry(CUBIN, 100, b"1" * 8))))
    return path


def test_a_wheel_is_carried_as_it_lies_in_site_packages_without_what_is_not_needed(wheel, capsys):
    files = {file.name: file for file in needed(wheel, 90)}
    assert sorted(files) == [
        "ray-2.60.0.dist-info/METADATA", "ray/__init__.py", "ray/core/gcs_server", "ray/here.so", "ray/pure.py",
        "ray/training.py",
    ]  # fmt: skip
    assert [name for name, file in files.items() if file.executable] == ["ray/core/gcs_server"]
    assert files["ray/here.so"].content == keep_only(library(BOTH), 90).content
    assert "without ray/blackwell.so: it is for [100], not for 90" in capsys.readouterr().out


def files_of(number, size=30_000):
    return [
        repack.File(f"p/{i}.bin", random.Random(i).randbytes(size), False, 1_000_000_000 + i)
        for i in range(number)
    ]


def test_pieces_are_archives_of_limited_size_with_every_file_once_in_order(tmp_path):
    files = files_of(9)
    streams = [(stream, f"wheel-{i // 3}") for i, stream in enumerate(compressed(files, at_once=60_000))]
    facts = write(streams, tmp_path, "piece", 130_000)
    names = []
    for fact in facts:
        path = tmp_path / fact["piece"]
        assert path.stat().st_size == fact["bytes"] <= 130_000 and fact["sha256"] == repack.sha256(path)
        with tarfile.open(path) as tar:
            for member in tar:
                names.append(member.name)
                assert tar.extractfile(member).read() == files[len(names) - 1].content
    assert names == [file.name for file in files]
    assert sorted(path.name for path in tmp_path.iterdir()) == [fact["piece"] for fact in facts]
    assert [fact["wheels"] for fact in facts] == [["wheel-0"], ["wheel-0", "wheel-1"], ["wheel-1"]]


def test_a_piece_may_be_exactly_full_and_a_file_above_the_limit_is_named(tmp_path):
    (stream,) = compressed(files_of(1))
    full = len(stream) + len(END)
    (fact,) = write([(stream, "one")], tmp_path, "piece", full)
    assert fact["bytes"] == full
    with pytest.raises(ValueError, match=r"one has 0\.0 MiB that cannot be divided"):
        write([(stream, "one")], tmp_path, "piece", full - 1)


# --- unpacking ---


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Two pieces: the package `first` of the group base, and `second` of the group vllm in both."""
    monkeypatch.setattr(carry, "GROUPS", {"base": ("first",), "vllm": ("second", "second.broken")})
    sources = {"first": ["first/__init__.py"], "second": ["second/__init__.py", "second/broken.py"]}
    code = {"second/broken.py": "import nowhere_to_be_found"}
    streams = [
        (compressed([repack.File(name, code.get(name, "x = 1").encode(), False, 1_000_000_000)])[0], wheel)
        for wheel, names in sources.items()
        for name in names
    ]  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    limit = len(streams[0][0]) + len(streams[1][0]) + len(END)
    pieces = write(streams, out, "piece", limit)
    groups = zip(sources, ("base", "vllm"), strict=True)
    manifest = {"python": "{}.{}".format(*sys.version_info), "pieces": pieces}
    manifest["wheels"] = [{"wheel": wheel, "group": group} for wheel, group in groups]
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out, [out / fact["piece"] for fact in pieces]


@pytest.fixture(autouse=True)
def bytecode_is_written(monkeypatch):
    """Otherwise all packages of this environment would be compiled."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_where_no_import_writes_bytecode_the_machines_packages_are_compiled(built, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "torch.py").touch()
    monkeypatch.setattr(carry.sysconfig, "get_path", lambda name: str(own))
    unpacked(built[1][:1], tmp_path / "site")
    assert not list(own.glob("__pycache__/*.pyc"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    unpacked(built[1][1:], tmp_path / "site")
    assert list(own.glob("__pycache__/*.pyc"))


def unpacked(pieces, site):
    return carry.main(["unpack", *map(str, pieces), "--to", str(site)])


def test_groups_are_imported_once_they_are_complete(built, tmp_path, capsys):
    _, pieces = built
    assert len(pieces) == 2
    assert unpacked(pieces[:1], tmp_path / "site") == 0
    said = capsys.readouterr().out
    assert "  first: imported" in said and "vllm: not complete without piece-2.tar.xz" in said
    assert list((tmp_path / "site" / "first").glob("__pycache__/*.pyc"))
    assert unpacked(pieces[1:], tmp_path / "site") == 1
    said = capsys.readouterr().out
    assert "  second: imported" in said
    assert "  second.broken: ModuleNotFoundError: No module named 'nowhere_to_be_found'" in said


def test_a_process_that_dies_is_told_from_an_import_that_fails(tmp_path, capsys):
    (tmp_path / "dies.py").write_text("import os\nos._exit(9)")
    (tmp_path / "fine.py").touch()
    assert carry.smoke(["fine", "dies", "after"], tmp_path) == 2
    assert capsys.readouterr().out.count("the process ended with 9") == 2


def test_a_damaged_and_a_missing_piece_are_named_and_the_rest_goes_on(built, tmp_path, capsys):
    out, (first, second) = built
    good = first.read_bytes()
    first.write_bytes(good[:-9])
    assert unpacked([first, out / "piece-9.tar.xz", second], tmp_path / "site") == 2
    said = capsys.readouterr().out
    assert f"piece-1.tar.xz is not unpacked: it has {len(good) - 9} bytes with sha256" in said
    assert "piece-9.tar.xz is not unpacked: manifest.json has only piece-1.tar.xz, piece-2.tar.xz" in said
    assert (tmp_path / "site/second/broken.py").exists() and not (tmp_path / "site/first").exists()
    first.unlink()
    assert unpacked([first], tmp_path / "site") == 2
    assert "piece-1.tar.xz is not unpacked: FileNotFoundError" in capsys.readouterr().out
    first.write_bytes(good)
    assert unpacked([first, second], tmp_path / "site") == 1  # second.broken
    assert (tmp_path / "site/first/__init__.py").exists()


def test_a_call_that_was_cut_is_repeated_and_what_is_there_is_passed_over(built, tmp_path, monkeypatch):
    _, pieces = built
    site = tmp_path / "site"
    whole = tarfile.TarFile.extractall

    def cut(self, path, **keywords):
        if self.name.endswith("piece-2.tar.xz"):
            Path(path, "second").mkdir(exist_ok=True)
            Path(path, "second/broken.py").write_text("half of i")
            raise KeyboardInterrupt
        whole(self, path, **keywords)

    monkeypatch.setattr(tarfile.TarFile, "extractall", cut)
    with pytest.raises(KeyboardInterrupt):
        unpacked(pieces, site)
    taken = []
    monkeypatch.setattr(
        tarfile.TarFile, "extractall", lambda self, *a, **k: (taken.append(Path(self.name).name), whole(self, *a, **k))
    )  # fmt: skip
    assert unpacked(pieces, site) == 1  # second.broken
    assert taken == ["piece-2.tar.xz"]
    assert (site / "second/broken.py").read_text() == "import nowhere_to_be_found"


def test_a_path_that_climbs_out_is_refused(built, tmp_path, capsys):
    out, (first, _) = built
    with tarfile.open(first, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("../outside.py"), BytesIO())
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["pieces"][0]["sha256"] = repack.sha256(first)
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert unpacked([first], tmp_path / "site") == 2
    assert "piece-1.tar.xz is not unpacked: OutsideDestinationError" in capsys.readouterr().out
    assert not (tmp_path / "outside.py").exists()


def test_another_build_another_python_and_no_manifest_are_refused(built, tmp_path, capsys):
    out, pieces = built
    site = tmp_path / "site"
    assert unpacked(pieces[:1], site) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["pieces"][0]["sha256"] = "0" * 64
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert unpacked(pieces, site) == 2
    assert f"{site} has pieces of another build; name an empty folder" in capsys.readouterr().err
    (out / "manifest.json").write_text(json.dumps(manifest | {"python": "2.7"}))
    assert unpacked(pieces, site) == 2
    assert "the pieces are for Python 2.7" in capsys.readouterr().err
    (out / "manifest.json").unlink()
    assert unpacked(pieces, site) == 2
    assert "which `build` writes beside the pieces, cannot be read" in capsys.readouterr().err


# --- what is named ---


def test_every_line_of_the_locks_has_an_exact_version_and_hashes():
    for group in carry.GROUPS:
        lines = [
            line
            for line in (ROOT / f"evidence/gpu/half_hour/lock-{group}.txt").read_text().splitlines()
            if line
        ]
        wanted = [line for line in lines if not line.startswith("#")]
        assert wanted
        for line in wanted:
            requirement, *hashes = line.split(" --hash=sha256:")
            assert requirement.count("==") == 1 and hashes and {len(one) for one in hashes} == {64}, line
