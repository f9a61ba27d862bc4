"""Builds, reads, checks and searches FAISS indexes. Only this file imports FAISS at the top."""

from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path

import faiss
import numpy as np

from verl_credit_retriever.foreign import what_it_is
from verl_credit_retriever.index.manifest import IndexMismatch, require_equal

STORED = {"float32": "Flat", "float16": "SQfp16"}
BLOCK = 1 << 17  # rows that are copied to a GPU at a time
# Flat search uses one matrix product from this many queries on. FAISS 1.15 ignores its own default and reads the
# vectors once per query: 64 queries over 50,000 rows then take six times as long.
faiss.cvar.distance_compute_blas_threshold = 4


def create(
    kind: str,
    blocks: Callable[[], Iterable[np.ndarray]],
    take: Callable[[np.ndarray], np.ndarray],
    *,
    rows: int,
    dim: int,
    dtype: str,
    parameters: dict,
):
    """A trained FAISS index that holds all rows, by inner product.

    `blocks()` iterates over the vectors in order, `take(rows)` reads some of them. flat stores the vectors, sq8 one
    byte per dimension between that dimension's smallest and largest value, ivf the vectors in lists of a k-means
    over a seeded sample, ivfpq in such lists a row's difference from the centre as `pq_bytes` codes, hnsw the vectors
    in a graph with seeded levels. The same input gives the same bytes; hnsw
    needs one thread for that (`--threads 1`), because its graph depends on the order of insertion.
    """
    stored, lists = STORED[dtype], f"IVF{parameters.get('nlist')}"
    factory = {
        "flat": stored,
        "sq8": "SQ8",
        "ivf": f"{lists},{stored}",
        "ivfpq": f"{lists},PQ{parameters.get('pq_bytes')}x8np",  # np: no training for Hamming distances
        "hnsw": f"HNSW{parameters.get('m')},{stored}",
    }
    index = faiss.index_factory(dim, factory[kind], faiss.METRIC_INNER_PRODUCT)
    if kind == "sq8":  # the smallest and the largest value of every dimension give its ranges
        extremes = [np.stack([block.min(axis=0), block.max(axis=0)]) for block in blocks()]
        index.train(np.concatenate(extremes).astype(np.float32))
    elif kind in ("ivf", "ivfpq"):
        sample = np.random.default_rng(parameters["seed"]).choice(
            rows, parameters["train_rows"], replace=False, shuffle=False
        )
        for clustering in [index.cp] + ([index.pq.cp] if kind == "ivfpq" else []):
            clustering.seed, clustering.min_points_per_centroid = parameters["seed"], 1
        index.cp.max_points_per_centroid = parameters["train_rows"]  # the rows are sampled already
        index.train(_float32(take(np.sort(sample))))
    elif kind == "hnsw":
        index.hnsw.efConstruction = parameters["ef_construction"]
        index.hnsw.rng = faiss.RandomGenerator(parameters["seed"])
    if not index.is_trained:
        index.train(np.zeros((1, dim), dtype=np.float32))  # only sets a flag for float16 storage
    fill(index, blocks, rows)
    return index


def write(index, path: Path) -> None:
    """Errors: OSError when the index does not fit on the disk."""
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(f"{path}: FAISS cannot write it ({str(error).strip().splitlines()[-1]})") from None


def read(path: Path, manifest: dict, *, mmap: bool = False):
    """Read an index and compare it with the manifest. Errors: IndexMismatch.

    `mmap` leaves vectors, lists and links in the file, shared by all processes that map it.
    """
    mapped = faiss.IO_FLAG_MMAP if manifest["kind"] in ("ivf", "ivfpq") else faiss.IO_FLAG_MMAP_IFC
    try:
        index = faiss.read_index(str(path), mapped if mmap else 0)
    except (RuntimeError, MemoryError) as error:
        raise IndexMismatch(
            f"{path}: FAISS cannot read it ({str(error)[:300]!r}); rebuild the index"
        ) from None
    properties = _describe(index)
    right = {**manifest["parameters"], **manifest, "metric": faiss.METRIC_INNER_PRODUCT}
    if manifest["kind"] in ("sq8", "ivfpq"):  # these keep bytes, whatever the dtype of vectors.npy
        right["dtype"] = None
    require_equal(path, {what: (value, right.get(what)) for what, value in properties.items()})
    return index


def read_foreign(path: Path, dim: int) -> dict:
    """The properties of an index that another program wrote, under the manifest's names. Errors: IndexMismatch for what is
    no flat index of float32 or float16 vectors by inner product of this dimension."""
    if what := what_it_is(path):
        raise IndexMismatch(f"{path}: {what}; expected a FAISS index")
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise IndexMismatch(f"{path}: FAISS cannot read it ({str(error).strip().splitlines()[-1]})") from None
    properties = _describe(index)
    if properties["kind"] != "flat" or properties["dtype"] not in STORED:
        raise IndexMismatch(
            f"{path}: {type(index).__name__}; a flat index of float32 or float16 vectors is taken over: encode the corpus "
            "here, with the --kind that you want"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexMismatch(f"{path}: metric {index.metric_type}; expected the inner product, 0")
    if index.d != dim:
        raise IndexMismatch(f"{path}: {index.d} dimensions; the encoder has {dim}")
    return properties


def set_search(index, search: dict) -> None:
    """Apply nprobe or ef_search; both are read at every search."""
    if "nprobe" in search:
        index.nprobe = search["nprobe"]
    if "ef_search" in search:
        index.hnsw.efSearch = search["ef_search"]


def flat_on_gpus(vectors_M_D: np.ndarray, gpus: int):
    """The rows divided evenly over the first `gpus` GPUs, in their own dtype; FAISS searches all and merges.

    They are read from the file a block at a time: the machine's memory never has all of them.
    """
    rows, dim = vectors_M_D.shape
    # A thread for each; the rows are numbered on from shard to shard.
    whole = faiss.IndexShards(dim, True, True)
    step = -(-rows // gpus)
    for device, first in enumerate(range(0, rows, step)):
        part = _flat_on(device, dim, half=vectors_M_D.dtype == np.float16)
        for start in range(first, min(first + step, rows), BLOCK):
            block_C_D = vectors_M_D[start : min(start + BLOCK, first + step)]
            part.add(_float32(block_C_D))
        whole.add_shard(part)
    return whole


def free_gpu_memory() -> tuple[int, list[int] | None]:
    """(GPUs that FAISS sees, the free bytes of each; None where torch does not see all of them)."""
    import torch

    gpus = faiss.get_num_gpus()
    if torch.cuda.device_count() < gpus:
        return gpus, None
    return gpus, [torch.cuda.mem_get_info(device)[0] for device in range(gpus)]


def _flat_on(device: int, dim: int, *, half: bool):
    config = faiss.GpuIndexFlatConfig()
    config.device, config.useFloat16 = device, half
    resources = faiss.StandardGpuResources()
    index = faiss.GpuIndexFlatIP(resources, dim, config)
    index.referenced_objects = [resources]  # must live as long as the index; FAISS takes no other attribute
    return index


def require_gpu(kind: str) -> None:
    """Errors: ValueError with the reason when this kind cannot be on a GPU here."""
    if kind != "flat":
        raise ValueError(f"gpu: no GPU index for kind={kind!r}; use flat")
    if not hasattr(faiss, "StandardGpuResources"):
        first = (
            "pip uninstall faiss-cpu, which owns the same package, then "
            if any(distributions(name="faiss-cpu"))
            else ""
        )
        install = f"{first}pip install --force-reinstall --no-deps faiss-gpu-cu12"
        raise ValueError(f"gpu: FAISS {faiss.__version__} is here without GPU support; {install}")
    try:
        devices = faiss.get_num_gpus()
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"gpu: FAISS finds no working GPU ({reason})") from None
    if devices < 1:
        raise ValueError("gpu: FAISS finds 0 GPUs; look at CUDA_VISIBLE_DEVICES and the driver")


def _describe(index) -> dict:
    """An index's own properties under the manifest's names."""
    storage = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
    quantizer, dtype = getattr(storage, "sq", None), "float32"
    if quantizer is not None:
        stored = {faiss.ScalarQuantizer.QT_8bit: None, faiss.ScalarQuantizer.QT_fp16: "float16"}
        dtype = stored.get(quantizer.qtype, "unknown")
    properties = {"rows": index.ntotal, "dim": index.d, "metric": index.metric_type, "dtype": dtype}
    if isinstance(index, faiss.IndexIVFPQ):
        return {**properties, "kind": "ivfpq", "nlist": index.nlist, "pq_bytes": index.pq.M, "dtype": None}
    if isinstance(index, faiss.IndexIVF):
        return {**properties, "kind": "ivf", "nlist": index.nlist}
    if isinstance(index, faiss.IndexHNSW):
        return {**properties, "kind": "hnsw", "m": index.hnsw.nb_neighbors(1)}
    if isinstance(index, faiss.IndexFlat | faiss.IndexScalarQuantizer):
        return {**properties, "kind": "sq8" if dtype is None else "flat"}
    return {**properties, "kind": type(index).__name__}


def fill(index, blocks: Callable[[], Iterable[np.ndarray]], rows: int) -> None:
    """Add the `rows` vectors of all blocks, in order, to a trained and empty CPU index; `blocks()` may run twice.

    Memory for all rows is reserved first, so that the index takes no more than the memory plan. Otherwise FAISS doubles
    its vectors whenever they are full and copies them: 65 GB of rows then take 126 GB.
    """
    if isinstance(index, faiss.IndexIVF):
        return _fill_lists(index, blocks, rows)
    storage = index
    if isinstance(index, faiss.IndexHNSW):
        # 2m links per row at the bottom, the expected m/(m - 1) above (levels are random), and a margin
        hnsw, m = index.hnsw, index.hnsw.nb_neighbors(1)
        above = rows * m / (m - 1)
        _reserve(hnsw.neighbors, rows * 2 * m + int(above + 10 * m * (rows / m) ** 0.5) + 1000)
        _reserve(hnsw.levels, rows)
        _reserve(hnsw.offsets, rows + 1, keep=1)
        storage = faiss.downcast_index(index.storage)
    _reserve(storage.codes, rows * storage.code_size)
    for block in blocks():
        index.add(_float32(block))


def _fill_lists(index, blocks: Callable[[], Iterable[np.ndarray]], rows: int) -> None:
    """Assign each row to its list first, so that every list can be reserved at its final length."""
    list_M, first = np.empty(rows, dtype=np.int64), 0
    for block in blocks():
        _, list_C_1 = index.quantizer.search(_float32(block), 1)
        list_M[first : first + len(block)] = list_C_1[:, 0]
        first += len(block)
    lists = index.invlists
    for number, length in enumerate(np.bincount(list_M, minlength=index.nlist).tolist()):
        lists.resize(number, length)
        lists.resize(number, 0)
    first = 0
    for block in blocks():
        vectors_C_D, list_C = _float32(block), list_M[first : first + len(block)]
        index.add_core(len(block), faiss.swig_ptr(vectors_C_D), None, faiss.swig_ptr(list_C))
        first += len(block)


def _reserve(vector, size: int, keep: int = 0) -> None:
    """std::vector's reserve, which FAISS does not expose: a vector that shrinks keeps its capacity."""
    vector.resize(size)
    vector.resize(keep)


def _float32(block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(block, dtype=np.float32)
