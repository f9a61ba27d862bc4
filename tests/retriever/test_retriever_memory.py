"""Memory of an index: the numbers, what the machine has, and refusal with what would fit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kit.retriever_vectors import TableEncoder, write_rows
from verl_credit_retriever.index import memory
from verl_credit_retriever.index.kinds import resolve
from verl_credit_retriever.index.memory import (
    SEARCH_BUFFERS,
    MemoryRefused,
    available_memory,
    gigabytes,
    plan_memory,
    require_memory,
)
from verl_credit_retriever.index.search import SearchIndex, build_index

GB = 10**9
WIKI = {"kind": "flat", "rows": 21_015_324, "dim": 768, "dtype": "float32"}


def test_the_memory_table_of_the_docs_is_what_is_computed():
    rows, found = WIKI["rows"], {}
    for line in (Path(__file__).parents[2] / "docs" / "retriever.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[3].endswith(" GB"):
            found[cells[0].replace("`", "")] = cells[2:]
    assert list(found) == ["flat", "sq8", "ivf", "ivfpq", "hnsw", "exact", "exact with --mmap"]
    for name, sizes in found.items():
        kind, mmap = name.split()[0], "mmap" in name
        spec = {"kind": kind, "rows": rows, "dim": 768, "parameters": resolve(kind, rows, 768, {})[0]}
        for dtype, size in zip(("float32", "float16"), sizes, strict=True):
            assert size == gigabytes(plan_memory({**spec, "dtype": dtype}, mmap=mmap).total), (name, dtype)


def test_mapped_vectors_and_the_exact_backend():
    assert plan_memory(WIKI, mmap=True).total == SEARCH_BUFFERS
    assert plan_memory(WIKI, mmap=True).mapped["vectors"] == 64_559_075_328
    ivf = plan_memory({**WIKI, "kind": "ivf", "parameters": {"nlist": 100}}, mmap=True)
    assert ivf.resident == {"lists": 4 * 768 * 100, "search buffers": SEARCH_BUFFERS}
    sq8 = {**WIKI, "kind": "sq8"}
    assert plan_memory(sq8, backend="exact").total == plan_memory(WIKI).total


# Prints by how much the peak of a process grows while an index is built from blocks of 1,000 rows.
PEAK = """
import ctypes, json, sys, faiss, numpy as np
from verl_credit_retriever.index.faiss_kinds import create

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

kind, dtype, parameters = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
faiss.omp_set_num_threads(1)
block = np.random.default_rng(0).standard_normal((1000, 512), dtype=np.float32)
blocks, take = lambda: (block for _ in range(70)), lambda rows: block[: len(rows)]
create(kind, lambda: [block], take, rows=1000, dim=512, dtype=dtype, parameters=parameters)
# What that one has freed is given back, and the peak begins here: else the next one grows into it unseen.
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")
before = peak()
index = create(kind, blocks, take, rows=70_000, dim=512, dtype=dtype, parameters=parameters)
print(peak() - before, len(faiss.serialize_index(index)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak of a process from /proc")
@pytest.mark.parametrize(
    "kind, dtype, parameters",
    [
        ("flat", "float32", {}),
        ("flat", "float16", {}),
        ("sq8", "float32", {}),
        ("ivf", "float32", {"nlist": 8, "train_rows": 100, "seed": 0}),
        ("ivfpq", "float32", {"nlist": 8, "train_rows": 300, "seed": 0, "pq_bytes": 256}),
        ("hnsw", "float32", {"m": 2, "ef_construction": 2, "seed": 0}),
    ],
)
def test_building_takes_no_more_than_the_index(kind, dtype, parameters):
    command = [sys.executable, "-c", PEAK, kind, dtype, json.dumps(parameters)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    grown, size = map(int, ran.stdout.split())
    assert 0.9 * size < grown < 1.1 * size + (8 << 20)


@pytest.mark.parametrize(
    "available, fitting, not_fitting",
    [
        (40 * GB, ["fp16", "sq8", "mmap"], []),
        (20 * GB, ["sq8", "ivfpq", "mmap"], ["fp16"]),
        (5 * GB, ["ivfpq", "mmap"], ["fp16", "sq8"]),
        (1 * GB, ["mmap"], ["fp16", "sq8", "ivfpq"]),
        (1000, ["more memory"], ["fp16", "sq8", "mmap"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(monkeypatch, available, fitting, not_fitting):
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    with pytest.raises(MemoryRefused) as caught:
        require_memory(WIKI)
    plan, choices = str(caught.value).split("Would fit:")
    assert "vectors 64.6 GB" in plan and "available:" in plan
    assert all(word in choices for word in fitting) and not any(word in choices for word in not_fitting)


def _machine(root, patch, *, groups=None, membership="0::/a/b\n"):
    """What is available in a machine that has 1,024,000 bytes, and these cgroups."""
    patch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    for name, files in (groups or {}).items():
        (root / "cgroup" / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (root / "cgroup" / name / file).write_text(text)
    return available_memory(root / "proc", root / "cgroup")


def _v2(limit, used, inactive=0):
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    "groups, expected",
    [
        ({}, 1_024_000),
        ({"a/b": _v2("max", 7)}, 1_024_000),
        ({"a/b": _v2(5000, 4000, 300)}, 1300),
        ({"a/b": _v2("max", 7), "a": _v2(9000, 2000)}, 7000),  # the parent's limit counts
        ({".": _v2(600, 100)}, 500),  # a container that sees its own group as the root
        ({"a/b": _v2(5000, 6000)}, 0),
        ({"a/b": _v2(10**9, 0)}, 1_024_000),  # a limit above what the machine has
    ],
)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, groups, expected):
    assert _machine(tmp_path, monkeypatch, groups=groups) == expected


def test_cgroup_v1_limits_count(tmp_path, monkeypatch):
    files = {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "1000", "memory.stat": "cache 3\n"}
    membership = "4:cpu,cpuacct:/c\n2:memory:/a\n"
    assert _machine(tmp_path, monkeypatch, groups={"memory/a": files}, membership=membership) == 4000


THREADS = """
import os, sys
from verl_credit_retriever.cli import main

class AtImport:
    def find_spec(self, name, *_):
        if name == "numpy":
            print(os.environ.get("OMP_NUM_THREADS"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtImport())
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_threads_are_set_before_numpy_reads_them(tmp_path):
    """By the option that all commands have."""
    arguments = ["index", "--encoder=e", "--corpus=c", "--out=o", "--threads=3"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", THREADS, *arguments],
        env={**environment, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.stdout == "3\n", ran.stderr


def test_load_and_build_refuse_before_they_read_or_encode(tmp_path, monkeypatch):
    corpus, encoder = write_rows(tmp_path / "corpus.jsonl", 50), TableEncoder(np.eye(50, dtype=np.float32))
    build_index(corpus, encoder, tmp_path / "out")
    monkeypatch.setattr(memory, "available_memory", lambda: SEARCH_BUFFERS + 9999)
    with pytest.raises(MemoryRefused, match="vectors 0.0 MB"):
        SearchIndex.load(tmp_path / "out")
    assert len(SearchIndex.load(tmp_path / "out", mmap=True)) == 50
    calls = encoder.calls
    with pytest.raises(MemoryRefused):
        build_index(corpus, encoder, tmp_path / "other")
    assert encoder.calls == calls and not (tmp_path / "other").exists()
    sizes = {"training": 8 * 50 * 40, "lists": 4 * 50, "numbers": 8 * 50, "vectors": 4 * 50 * 50}
    ivf = {"kind": "ivf", "nlist": 1, "train_rows": 40}
    monkeypatch.setattr(memory, "available_memory", lambda: SEARCH_BUFFERS + sum(sizes.values()) - 1)
    with pytest.raises(MemoryRefused, match="training 0.0 MB"):
        build_index(corpus, encoder, tmp_path / "other", **ivf)
    monkeypatch.setattr(memory, "available_memory", lambda: SEARCH_BUFFERS + sum(sizes.values()))
    build_index(corpus, encoder, tmp_path / "other", **ivf)
    monkeypatch.setattr(memory, "available_memory", lambda: SEARCH_BUFFERS)
    build_index(corpus, encoder, tmp_path / "third", kind="exact")
