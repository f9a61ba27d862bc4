"""Known devices, and the memory of a search index. A recipe may choose one in an optional top-level block:

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
from dataclasses import dataclass, replace

from verl_credit.errors import ConfigError, unknown_key
from verl_credit.recipe.this_machine import cores, memory

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


def _gpu(name, gib, bandwidth_tb, bf16, fp32, mfu, source, **more):
    source = f"{source}: {bandwidth_tb:g} TB/s, {bf16:g} TFLOPS bf16 dense"
    return Hardware(
        name, "cuda", gib * GIB, bandwidth_tb * TERA, bf16 * TERA, fp32 * TERA, mfu,
        **{"flash_attn": True, "host_memory": 1000 * GB, "source": source, **more},
    )  # fmt: skip


# Memory is as torch reports it. Peaks are dense (data sheets without sparsity); fp32 is without tensor cores.
TABLE = {
    row.name: row
    for row in (
        _gpu("h20", 95.1, 4.0, 148, 44, 0.50, "NVIDIA H20 96 GB"),
        _gpu("h100", 79.1, 3.35, 989, 67, 0.35, "NVIDIA H100 SXM 80 GB data sheet"),
        _gpu("h200", 139.8, 4.8, 989, 67, 0.35, "NVIDIA H200 SXM 141 GB data sheet"),
        _gpu("a100", 79.1, 2.039, 312, 19.5, 0.40, "NVIDIA A100 SXM 80 GB data sheet"),
        # 121 GB are visible; 1 PFLOPS in fp4 with sparsity is 500 dense, hence 125 in bf16.
        _gpu("gb10", 121 * GB / GIB, 0.273, 125, 31, 0.30, "NVIDIA DGX Spark",
             flash_attn=False, unified=True, host_memory=0.0, cores=20),
    )
}  # fmt: skip
ALIASES = {"spark": "gb10", "laptop": "cpu"}
BYTES_PER_ROW = {"flat": (4, 0), "exact": (4, 0), "sq8": (1, 0), "ivf": (4, 8), "hnsw": (4, 280)}
"""Bytes of an index, by its kind: of a number, and beside a row's numbers (its place in a list; the links of a graph with
m = 32)."""
PLACES = ("host", "device", "elsewhere")
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
        figures = "or any name with " + ", ".join(f"hardware.{key}=..." for key in OWN)
        raise ConfigError(key="hardware.name", value=name, accepted=[*TABLE, "cpu", *ALIASES, figures])
    own = Hardware(name, "cuda", 0.0, 0.0, 0.0, 0.0, 0.35, flash_attn=True, host_memory=1000 * GB)
    row = this_cpu() if name == "cpu" else TABLE.get(name, own)
    changes = {to: _positive(key, block[key]) * unit for key, (to, unit) in _FACTORS.items() if key in block}
    if "peak_tflops" in block:
        peak = _positive("peak_tflops", block["peak_tflops"]) * TERA
        changes |= {"peak_bf16": peak} if name in TABLE else {"peak_bf16": peak, "peak_fp32": peak}
    if "flash_attn" in block:
        changes["flash_attn"] = bool(block["flash_attn"])
        if row.flash_attn and not changes["flash_attn"]:
            changes.setdefault("mfu", row.mfu * SDPA_SPEED)
    given = ", ".join(f"{key}={block[key]}" for key in FIGURES if key in block)
    source = "; ".join(part for part in (row.source, given and f"given: {given}") if part)
    return replace(row, source=source, **changes)


def this_cpu() -> Hardware:
    """This machine's memory and the cores that this process may use, with bf16 as fast as fp32."""
    count, here = cores(), memory()
    peak = count * CPU_FLOPS_PER_CORE
    usable = float(here.total if here.limit is None else min(here.total, here.limit))
    speed = f"{CPU_FLOPS_PER_CORE / GB:.0f} GFLOPS each and {CPU_BANDWIDTH / GB:.0f} GB/s, assumed"
    source = f"this machine, {count} cores: {speed}"
    return Hardware(
        "cpu", "cpu", usable, CPU_BANDWIDTH, peak, peak, 0.2, False, unified=True, cores=count, source=source
    )


@dataclass(frozen=True)
class Index:
    """The search index of a ``hardware`` block. ``kind``: None where the block gives none, or its size alone."""

    bytes: float = 0.0
    kind: str | None = None
    place: str = "host"


NO_INDEX = Index()


def find_index(block: Mapping | None) -> Index:
    """Reads the index of a block. A flat one takes rows x dim x 4 bytes: 21,015,324 x 768 (wiki-18, e5-base) are 64.6 GB."""
    given = (block := block or {}).get("index") or {}
    if not isinstance(given, Mapping):
        form = "expected {rows: N, dim: N, kind: flat, place: host}"
        raise ConfigError(key="hardware.index", value=given, accepted=form)
    place, kind = given.get("place", "host"), given.get("kind", "flat")
    if place not in PLACES:
        raise ConfigError(key="hardware.index.place", value=place, accepted=PLACES)
    if "index_bytes" in block:
        return Index(_positive("index_bytes", block["index_bytes"]), place=place)
    if not given:
        return Index(place=place)
    if str(kind) not in BYTES_PER_ROW:
        raise ConfigError(key="hardware.index.kind", value=kind, accepted=BYTES_PER_ROW)
    rows, dim = (_positive(f"index.{key}", given.get(key)) for key in ("rows", "dim"))
    of_number, beside = BYTES_PER_ROW[kind]
    return Index(rows * (dim * of_number + beside), kind, place)


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
