"""Search on several GPUs: the plan, the refusal, and the division of rows. CPU indexes stand in for those of GPUs."""

import faiss
import numpy as np
import pytest

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index import faiss_kinds
from verl_credit_retriever.index.memory import GPU_BUFFERS, MemoryRefused, plan_gpus
from verl_credit_retriever.index.search import SearchIndex, build_index

GB = 10**9
WIKI = {"kind": "flat", "rows": 21_015_324, "dim": 768, "dtype": "float32"}


@pytest.mark.parametrize(
    "gpus, dtype, gigabytes", [(8, "float32", 9.68), (4, "float16", 9.68), (1, "float16", 33.89)]
)
def test_each_gpu_takes_its_part(gpus, dtype, gigabytes):
    spec = {**WIKI, "dtype": dtype}
    plan = plan_gpus(spec, [80 * GB] * gpus, gpus)
    assert plan.total / GB == pytest.approx(gigabytes, abs=0.01)
    assert f"each of {gpus} GPUs" in plan.text() and plan.resident["FAISS's buffers"] == GPU_BUFFERS
    assert plan_gpus(spec, [plan.total] * gpus, gpus) == plan_gpus(spec, None, gpus) == plan
    with pytest.raises(MemoryRefused):
        plan_gpus(spec, [80 * GB] * (gpus - 1) + [plan.total - 1], gpus)


def test_a_gpu_that_is_too_small_is_named_with_what_would_fit():
    with pytest.raises(MemoryRefused) as caught:
        plan_gpus(WIKI, [24 * GB, 23 * GB], 2)
    said = str(caught.value)
    assert "vectors 32.3 GB" in said and "free: cuda:0 24.0 GB, cuda:1 23.0 GB" in said
    assert "an index in --dtype fp16: 17.8 GB each; about 4 such GPUs" in said
    with pytest.raises(MemoryRefused, match="nothing on these GPUs"):
        plan_gpus(WIKI, [GB], 1)


@pytest.fixture
def cpus_for_gpus(monkeypatch):
    """Three GPUs, each of them a flat CPU index."""
    made = []

    def flat_on(device, dim, *, half):
        made.append((device, half))
        return faiss.IndexFlatIP(dim)

    monkeypatch.setattr(faiss_kinds, "_flat_on", flat_on)
    monkeypatch.setattr(faiss_kinds, "require_gpu", lambda kind: None)
    monkeypatch.setattr(faiss_kinds, "free_gpu_memory", lambda: (3, [80 * GB] * 3))
    monkeypatch.setattr(faiss_kinds, "BLOCK", 13)
    return made


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("rows", [100, 2])
def test_rows_divided_over_gpus_are_found_as_in_one_index(tmp_path, cpus_for_gpus, dtype, rows):
    table_M_D = clustered(rows, 8, seed=1)
    build_index(
        write_rows(tmp_path / "c.jsonl", rows), TableEncoder(table_M_D), tmp_path / "out", dtype=dtype
    )
    divided = SearchIndex.load(tmp_path / "out", gpu=True)
    assert cpus_for_gpus == [(device, dtype == "fp16") for device in range(min(3, rows))]
    assert [part.ntotal for part in divided._faiss.referenced_objects] == (
        [34, 34, 32] if rows == 100 else [1, 1]
    )
    exact = SearchIndex.load(tmp_path / "out", backend="exact")
    queries_N_D = clustered(9, 8, seed=2)
    for found, expected in zip(divided.search(queries_N_D, 50), exact.search(queries_N_D, 50), strict=True):
        assert [document for document, _ in found] == [document for document, _ in expected]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], atol=1e-6)
    assert "vectors" in divided.memory.mapped  # the machine's memory does not have them


def test_gpus_without_room_refuse_before_a_row_is_copied(tmp_path, cpus_for_gpus, monkeypatch):
    build_index(
        write_rows(tmp_path / "c.jsonl", 20), TableEncoder(clustered(20, 8, seed=1)), tmp_path / "out"
    )
    monkeypatch.setattr(faiss_kinds, "free_gpu_memory", lambda: (2, [80 * GB, GPU_BUFFERS]))
    with pytest.raises(MemoryRefused, match="each of 2 GPUs"):
        SearchIndex.load(tmp_path / "out", gpu=True)
    assert cpus_for_gpus == []
