"""The memory that an index takes, computed before its files are read, and the memory that is available here."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from verl_credit_retriever.index.kinds import CODES, resolve, resolve_search
from verl_credit_retriever.index.manifest import IndexMismatch

GPU_BUFFERS = 1536 << 20  # FAISS takes this on every GPU for its own work
SEARCH_BUFFERS = 192 << 20  # two of exact.CHUNK_BYTES, and what is derived from the scores
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")  # in cgroups


class MemoryRefused(ValueError):
    """The index does not fit into memory; the message names its parts and what would fit."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per part. `resident` memory is required; `mapped` is file cache that processes share.

    The machine may drop mapped pages and read them again: they cost speed only.
    """

    what: str
    resident: dict[str, int]
    mapped: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values())

    def text(self) -> str:
        """Returns one line for people, with the parts in GB (10⁹ bytes)."""
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in self.resident.items())
        mapped = ", ".join(f"{name} {gigabytes(size)}" for name, size in self.mapped.items())
        return f"{self.what}: {gigabytes(self.total)} of memory ({parts}); mapped from disk: {mapped or 'nothing'}"


def plan_memory(spec: dict, *, backend: str = "faiss", mmap: bool = False) -> MemoryPlan:
    """The memory of a loaded index, computed without its files and without FAISS.

    `spec` is a manifest, or {"kind", "rows", "dim", "dtype": "float16" | "float32", "parameters"} of an index
    that does not exist yet; parameters are ivf's `nlist`, ivfpq's `pq_bytes` and hnsw's `m`. Per row of D dimensions and b
    bytes each:
        flat, exact  b·D
        sq8          D
        ivf          b·D + 8 (row number), and 4·D per list
        ivfpq        pq_bytes + 8, and 4·D per list and code; the vectors stay mapped
        hnsw         b·D + 4·(2m + m/(m - 1)) (links at the bottom, and expected above) + 12 (level, offset)
    `mmap` moves everything to `mapped` except the centres of lists, and codes' meaning.
    Example: 21,015,324 rows of 768 in float32, flat: 64.6 GB, the size of wiki-18 under e5-base.
    """
    kind, rows, dim = spec["kind"], spec["rows"], spec["dim"]
    width, parameters = np.dtype(spec["dtype"]).itemsize, spec.get("parameters", {})
    served = "exact" if backend == "exact" else kind
    parts = {"vectors": rows * dim * (1 if served == "sq8" else width)}
    if served == "ivfpq":
        parts = {"codes": rows * parameters["pq_bytes"], "row numbers": 8 * rows}
        parts |= {"lists": 4 * dim * (parameters["nlist"] + CODES)}
    if served == "ivf":
        parts |= {"row numbers": 8 * rows, "lists": 4 * dim * parameters["nlist"]}
    if served == "hnsw":
        m = parameters["m"]
        parts["graph"] = round(rows * (4 * (2 * m + m / (m - 1)) + 12))
    resident, mapped = ({}, parts) if mmap else (parts, {})
    if "lists" in mapped:  # FAISS reads the centres of the lists in any case
        resident["lists"] = mapped.pop("lists")
    if served == "ivfpq":
        mapped = {"vectors": rows * dim * width, **mapped}
    return MemoryPlan(
        what=f"{rows:,} rows x {dim} {spec['dtype']}, {kind}" + (", exact" if served != kind else ""),
        resident={**resident, "search buffers": SEARCH_BUFFERS},
        mapped={**mapped, "offsets": 8 * (rows + 1)},
    )


def require_memory(spec: dict, *, also: dict[str, int] | None = None, **how) -> MemoryPlan:
    """`plan_memory(spec, **how)`, if it fits into `available_memory()`.

    `also` adds parts that are needed at the same time, such as a build's training rows. Errors: MemoryRefused with the plan,
    the available memory, and choices that would fit.
    """
    single = plan_memory(spec, **how)
    plan = replace(single, resident=single.resident | (also or {}))
    available = available_memory()
    if plan.total <= available:
        return plan
    others = {
        f"--dtype fp16 ({spec['kind']})": plan_memory({**spec, "dtype": "float16"}),
        "--kind sq8": plan_memory({**spec, "kind": "sq8", "parameters": {}}),
        "the exact backend or mmap, which read vectors from disk": plan_memory(
            {**spec, "kind": "exact", "parameters": {}}, mmap=True
        ),
    }
    if spec["rows"] >= CODES:
        parameters, _ = resolve("ivfpq", spec["rows"], spec["dim"], {})
        others["--kind ivfpq"] = plan_memory({**spec, "kind": "ivfpq", "parameters": parameters})
    fitting = [
        f"{name}: {gigabytes(other.total)}" for name, other in others.items() if other.total <= available
    ]
    raise MemoryRefused(
        f"{plan.text()}; available: {gigabytes(available)}. "
        f"Would fit: {'; '.join(fitting) or 'nothing here: use a machine with more memory'}"
    )


def require_recorded(folder: Path, manifest: dict, **how) -> tuple[dict, MemoryPlan]:
    """(search parameters that the manifest of `folder` records, `require_memory(manifest, **how)`).

    Errors: IndexMismatch for parameters that are missing or out of bounds; MemoryRefused.
    """
    try:
        search = resolve_search(manifest["kind"], manifest["parameters"], manifest["search"], {})
        plan_memory(manifest)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        values = {key: manifest[key] for key in ("parameters", "search")}
        raise IndexMismatch(f"{folder / 'manifest.json'}: {values} ({error}); rebuild the index") from None
    return search, require_memory(manifest, **how)


def plan_gpus(spec: dict, free: Sequence[int] | None, gpus: int) -> MemoryPlan:
    """Plans the memory of each of the `gpus`, over which FAISS divides the rows; `free` is what each has, None: not known.

    b·D of `plan_memory` is rounded up to whole rows per GPU. Errors: MemoryRefused when one has too little, with the plan
    and what would fit.
    """

    def each(spec: dict, gpus: int) -> MemoryPlan:
        vectors = plan_memory({**spec, "rows": -(-spec["rows"] // gpus)}).resident["vectors"]
        what = f"{spec['rows']:,} rows x {spec['dim']} {spec['dtype']}, {spec['kind']}, each of {gpus} GPUs"
        return MemoryPlan(what, {"vectors": vectors, "FAISS's buffers": GPU_BUFFERS}, {})

    plan = each(spec, gpus)
    if free is None or plan.total <= min(free):
        return plan
    fitting = []
    if spec["dtype"] == "float32" and (half := each({**spec, "dtype": "float16"}, gpus).total) <= min(free):
        fitting.append(f"an index in --dtype fp16: {gigabytes(half)} each")
    if (for_vectors := min(free) - GPU_BUFFERS) > 0:
        fitting.append(f"about {-(-plan.resident['vectors'] * gpus // for_vectors)} such GPUs")
    least = ", ".join(f"cuda:{number} {gigabytes(size)}" for number, size in enumerate(free))
    raise MemoryRefused(
        f"gpu: {plan.text()}; free: {least}. Would fit: {'; '.join(fitting) or 'nothing on these GPUs'}"
    )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate: the least that the machine and its cgroups have free."""
    in_groups = [max(0, limit - used) for limit, used in cgroup_limits(proc, cgroup)]
    return min([psutil.virtual_memory().available, *in_groups])


def cgroup_limits(proc: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used without cached files) of each limited cgroup (v1 and v2) from this process's up."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names, cache = (
            (root / "memory", V1, "total_inactive_file") if controllers else (root, V2, "inactive_file")
        )
        group = base / path.lstrip("/")
        # A container may show the path of the host, which does not exist here; its own group is then the root.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a folder without a limit has the text "max", or no file
                limit, used = (int((folder / name).read_text()) for name in names)
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # The kernel reclaims inactive file cache when memory runs short.
                limits.append((limit, max(0, used - int(statistics.get(cache, 0)))))
    return limits


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def require_disk(folder: Path, needed: int, what: str) -> None:
    """Errors: OSError when the disk of `folder` has fewer than `needed` free bytes for `what`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{folder}: {what} take {gigabytes(needed)}; the disk has {gigabytes(free)} free")
