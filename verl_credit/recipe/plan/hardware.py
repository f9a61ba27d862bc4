"""Known devices, and the cost of searching an index on them. A recipe may choose one in an optional top-level block:

    hardware:
      name: h100            # a row of the table below (aliases: spark, laptop); or a card of your own, by any name, with
                            # memory_gib, peak_tflops and bandwidth_gb_s
      devices: 8            # checked against trainer.nnodes x trainer.n_gpus_per_node
      memory_gib: 79.2      # replaces a figure of the row: memory_gib, host_memory_gib,
      peak_tflops: 989      # peak_tflops, bandwidth_gb_s, mfu, flash_attn
      index_bytes: 64.6e9   # memory of the search index, or
      index: {rows: 21015324, dim: 768, kind: flat, place: host}   # place: host | device | elsewhere

``verl-credit plan --hardware NAME`` replaces the name. Without a name, trainer.device=cpu means this machine, any other
device the H100; the plan then has a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from verl_credit.errors import ConfigError, unknown_key
from verl_credit.recipe.machine import cores, memory

GB, GIB, TERA = 10**9, 2**30, 10**12
CPU_FLOPS_PER_CORE = 50 * GB
"""fp32: two 256-bit FMA units at about 1.6 GHz under load. Stated, not measured."""
CPU_BANDWIDTH = 20 * GB


@dataclass(frozen=True)
class Hardware:
    """A device and its node's memory. Units are bytes, bytes per second, FLOP per second."""

    name: str
    device: str
    memory: float
    bandwidth: float
    peak_bf16: float
    peak_fp32: float
    mfu: float
    """Assumed share of the peak that training reaches."""
    flash_attn: bool
    unified: bool = False
    """Host and device share the memory: offloading saves nothing, and the index counts."""
    host_memory: float = 0.0
    """Bytes of a node, assumed for the rows below. A unified device has only its own memory."""
    cores: int = 64
    """CPU cores per node; assumed for the GPU rows."""
    source: str = ""
    """Where the figures are from; those of the ``hardware`` block are given."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """Figures as the source has them, by the key that replaces each."""


def _gpu(name, gib, bandwidth_tb, bf16, fp32, mfu, source, **more):
    figures = {"bandwidth_gb_s": f"{bandwidth_tb:g} TB/s", "peak_tflops": f"{bf16:g} TFLOPS bf16 dense"}
    return Hardware(
        name, "cuda", gib * GIB, bandwidth_tb * TERA, bf16 * TERA, fp32 * TERA, mfu,
        **{"flash_attn": True, "host_memory": 1000 * GB, "source": source, "figures": figures, **more},
    )  # fmt: skip


def _own(name: str) -> Hardware:
    """A card that is no row of the table; its block replaces the zeros. fp32 counts with the given peak, too."""
    return Hardware(name, "cuda", 0.0, 0.0, 0.0, 0.0, 0.35, flash_attn=True, host_memory=1000 * GB)


# Memory is as torch reports it. Peaks are dense (data sheets without sparsity); fp32 is without tensor cores.
TABLE = {
    row.name: row
    for row in (
        _gpu("h20", 95.1, 4.0, 148, 44, 0.50, "NVIDIA H20 96 GB"),
        _gpu("h100", 79.1, 3.35, 989, 67, 0.35, "NVIDIA H100 SXM 80 GB data sheet"),
        _gpu("h200", 139.8, 4.8, 989, 67, 0.35, "NVIDIA H200 SXM 141 GB data sheet"),
        _gpu("a100", 79.1, 2.039, 312, 19.5, 0.40, "NVIDIA A100 SXM 80 GB data sheet"),
        _gpu(
            "gb10", 121 * GB / GIB, 0.273, 125, 31, 0.30, "NVIDIA DGX Spark",
            figures={
                "memory_gib": "121 GB visible", "bandwidth_gb_s": "273 GB/s",
                "peak_tflops": "1 PFLOPS fp4 with sparsity is 500 dense, hence 125 in bf16",
            },
            flash_attn=False, unified=True, host_memory=0.0, cores=20,
        ),
    )
}  # fmt: skip
ALIASES = {"spark": "gb10", "laptop": "cpu"}
BYTES_PER_NUMBER = {
    "flat": 4.0,
    "exact": 4.0,
    "flat_fp16": 2.0,
    "sq8": 1.0,
    "sq4": 0.5,
    "ivf": 4.0,
    "hnsw": 4.0,
}
BYTES_PER_VECTOR = {
    "ivf": 8,
    "hnsw": 280,
}  # beside it: its number in a list; the links of a graph with m = 32
PLACES = ("host", "device", "elsewhere")
WIKI_18 = 21_015_324 * 768
"""Numbers in wiki-18's index, for which the following figures hold."""
WHOLE = {"flat": 0.4, "flat_fp16": 0.4, "exact": 0.4, "sq8": 1.5, "sq4": 1.5}
"""Core-seconds per query of kinds that read every vector: FAISS 1.15 on one core, scaled up from fewer rows."""
PART = {"ivf": 0.02, "hnsw": 0.005}
"""Core-seconds per query of kinds that read few vectors; assumed, and not scaled."""
E5_BASE = 0.05
"""Core-seconds of a query of twenty tokens: 3.4 GFLOP. Assumed."""
SDPA_SPEED = 0.5
"""Share of a row's ``mfu`` without flash-attn, where SDPA is called row by row. One H100 (evidence/gpu) had an MFU of .22 in
log-probs and .16 in updates."""
_FACTORS = {
    "memory_gib": ("memory", GIB),
    "host_memory_gib": ("host_memory", GIB),
    "bandwidth_gb_s": ("bandwidth", GB),
    "mfu": ("mfu", 1.0),
}
OWN = ("memory_gib", "peak_tflops", "bandwidth_gb_s")
FIGURES = ("peak_tflops", "flash_attn", *_FACTORS)
KEYS = ("name", "devices", "index_bytes", "index", *FIGURES)


def find_hardware(name: str, block: Mapping | None = None) -> Hardware:
    """The row called ``name``, with its figures replaced by those of a recipe's ``hardware`` block."""
    block = dict(block or {})
    unknown = [key for key in block if key not in KEYS]
    if unknown:
        raise unknown_key("hardware", str(unknown[0]), KEYS)
    name = ALIASES.get(str(name).lower(), str(name).lower())
    if name not in TABLE and name != "cpu" and not all(key in block for key in OWN):
        own = "or any name with " + ", ".join(f"hardware.{key}=..." for key in OWN)
        raise ConfigError(key="hardware.name", value=name, accepted=[*TABLE, "cpu", *ALIASES, own])
    row = this_cpu() if name == "cpu" else TABLE.get(name) or _own(name)
    changes = {to: _positive(key, block[key]) * unit for key, (to, unit) in _FACTORS.items() if key in block}
    if "peak_tflops" in block:
        peak = _positive("peak_tflops", block["peak_tflops"]) * TERA
        changes |= {"peak_bf16": peak} if name in TABLE else {"peak_bf16": peak, "peak_fp32": peak}
    if "flash_attn" in block:
        changes["flash_attn"] = bool(block["flash_attn"])
        if row.flash_attn and not changes["flash_attn"]:
            changes.setdefault("mfu", row.mfu * SDPA_SPEED)
    figures = {key: text for key, text in row.figures.items() if key not in block}
    given = ", ".join(f"{key}={block[key]}" for key in FIGURES if key in block)
    cited = f"{row.source}: {', '.join(figures.values())}" if figures else ""
    source = "; ".join(part for part in (cited, given and f"given: {given}") if part)
    return replace(row, source=source, figures=figures, **changes)


def this_cpu() -> Hardware:
    """This machine's memory and the cores that this process may use, with bf16 as fast as fp32."""
    count = cores()
    peak = count * CPU_FLOPS_PER_CORE
    here = memory()
    usable = float(here.total if here.limit is None else min(here.total, here.limit))
    return Hardware(
        "cpu", "cpu", usable, CPU_BANDWIDTH, peak, peak, 0.2, False, unified=True, cores=count,
        source=f"this machine, {count} cores",
        figures={
            "peak_tflops": f"{CPU_FLOPS_PER_CORE / GB:.0f} GFLOPS each, assumed",
            "bandwidth_gb_s": f"{CPU_BANDWIDTH / GB:.0f} GB/s, assumed",
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Index:
    """The search index of a ``hardware`` block; with its defaults the block gives none."""

    bytes: float = 0.0
    kind: str | None = None
    """The kind is None also where only the size is given."""
    place: str = "host"
    core_seconds: float = 0.0
    """Core-seconds of the index per query; 0 when the host does not search."""
    encoder_core_seconds: float = 0.0
    """Core-seconds of encoding a short query: e5-base's x (dim / 768)²; 0 without a search or the index's dim."""


NO_INDEX = Index()


def find_index(block: Mapping | None) -> Index:
    """Reads the index of a block. A flat one takes rows x dim x 4 bytes: 21,015,324 x 768 (wiki-18, e5-base) are 64.6 GB.

    An index that is given only by its size counts as flat.
    """
    block = block or {}
    given, kind = block.get("index") or {}, None
    if not isinstance(given, Mapping):
        form = "expected {rows: N, dim: N, kind: flat, place: host}"
        raise ConfigError(key="hardware.index", value=given, accepted=form)
    place = given.get("place", "host")
    if place not in PLACES:
        raise ConfigError(key="hardware.index.place", value=place, accepted=PLACES)
    if "index_bytes" in block:
        size = _positive("index_bytes", block["index_bytes"])
        numbers = size / BYTES_PER_NUMBER["flat"]
    elif given:
        kind = given.get("kind", "flat")
        if str(kind) not in BYTES_PER_NUMBER:
            raise ConfigError(key="hardware.index.kind", value=kind, accepted=BYTES_PER_NUMBER)
        rows, dim = (_positive(f"index.{key}", given.get(key)) for key in ("rows", "dim"))
        size, numbers = rows * (dim * BYTES_PER_NUMBER[kind] + BYTES_PER_VECTOR.get(kind, 0)), rows * dim
    else:
        return Index(place=place)
    seconds = 0.0
    if place == "host":
        seconds = PART[kind] if kind in PART else WHOLE[kind or "flat"] * numbers / WIKI_18
    encoding = E5_BASE * (float(given["dim"]) / 768) ** 2 if seconds and "dim" in given else 0.0
    return Index(size, kind, place, seconds, encoding)


def _positive(key: str, value) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            key=f"hardware.{key}", value=value, accepted="expected a number above 0", shown=repr(value)
        )
    return number
