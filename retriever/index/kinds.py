"""The kinds of index: which parameters each has, their defaults and bounds. Imports no FAISS."""

import math

BUILT_WITH = {
    "ivf": ("nlist", "train_rows", "seed"),
    "ivfpq": ("nlist", "train_rows", "seed", "pq_bytes"),
    "hnsw": ("m", "ef_construction", "seed"),
}
SEARCHED_WITH = {"ivf": ("nprobe",), "ivfpq": ("nprobe", "refine"), "hnsw": ("ef_search",)}
ROWS_PER_LIST = 39  # FAISS's own minimum for k-means
TRAIN_ROWS_PER_LIST = 64
CODES = 256  # a byte names one of these parts of vectors; each is learnt from a row at least
REFINE = 16


def resolve(kind: str, rows: int, dim: int, given: dict) -> tuple[dict, dict]:
    """(parameters, search) for building and searching an index [rows, dim], with every default filled in.

    None in `given` means the default. ivf: nlist = 4·√rows, at most rows / 39 and at least 1; train_rows =
    64·nlist, at most rows; nprobe = √nlist, at least 8 and at most nlist; seed 0. ivfpq: as ivf, but train_rows at least
    16,384 where there are as many rows; pq_bytes = the largest divisor of dim up to dim / 4; refine = 16. hnsw: m = 32,
    ef_construction = 200, ef_search = 128, seed 0. flat, sq8 and exact have none. Errors: ValueError for a value out
    of bounds, one that the kind does not use, more lists than rows, and ivfpq of fewer than 256 rows.
    """
    given = {name: value for name, value in given.items() if value is not None}
    built, searched = BUILT_WITH.get(kind, ()), SEARCHED_WITH.get(kind, ())
    _refuse_unused(kind, given, (*built, *searched))
    if kind in ("ivf", "ivfpq"):
        codes = CODES if kind == "ivfpq" else 0
        if rows < codes:
            raise ValueError(f"kind={kind!r}: {rows} rows; it has {codes} codes and needs as many: use flat")
        most = max(1, min(round(4 * math.sqrt(rows)), rows // ROWS_PER_LIST))
        nlist = _whole("nlist", given.get("nlist", most), 1, rows)
        enough = min(rows, TRAIN_ROWS_PER_LIST * max(nlist, codes))
        train = _whole("train_rows", given.get("train_rows", enough), max(nlist, codes), rows)
        parameters = {"nlist": nlist, "train_rows": train}
        if kind == "ivfpq":
            divisors = [number for number in range(1, dim + 1) if dim % number == 0]
            default = max(number for number in divisors if number <= max(1, dim // 4))
            parameters["pq_bytes"] = value = given.get("pq_bytes", default)
            if type(value) is not int or value not in divisors:
                expected = f"expected a divisor of the {dim} dimensions: {divisors}"
                raise ValueError(f"pq_bytes={value!r}; {expected}")
    elif kind == "hnsw":
        parameters = {
            "m": _whole("m", given.get("m", 32), 2, 512),
            "ef_construction": _whole("ef_construction", given.get("ef_construction", 200), 1, 1 << 20),
        }
    else:
        return {}, {}
    parameters["seed"] = _whole("seed", given.get("seed", 0), 0, (1 << 31) - 1)
    nlist = parameters.get("nlist", 1)
    nprobe = min(nlist, max(8, math.ceil(math.sqrt(nlist))))
    default = {"nprobe": nprobe, "refine": REFINE, "ef_search": 128}
    return parameters, resolve_search(kind, parameters, default, given)


def resolve_search(kind: str, parameters: dict, recorded: dict, given: dict) -> dict:
    """The search parameters of a built index: those `recorded` in its manifest, overridden by `given` (not None).

    Errors: ValueError for a value out of bounds and for one that the kind does not use.
    """
    names, built = SEARCHED_WITH.get(kind, ()), BUILT_WITH.get(kind, ())
    given = {name: value for name, value in given.items() if value is not None and name not in built}
    _refuse_unused(kind, given, names)
    most = {"nprobe": parameters.get("nlist"), "ef_search": 1 << 20, "refine": 1024}
    return {name: _whole(name, given.get(name, recorded.get(name)), 1, most[name]) for name in names}


def need_faiss(what: str, instead: str):
    """The module of FAISS's kinds. Errors: ValueError with what to do where FAISS is not installed."""
    try:
        from verl_credit_retriever.index import faiss_kinds
    except ImportError as error:
        raise ValueError(f"{what} needs FAISS ({error}); install faiss-cpu{instead}") from None
    return faiss_kinds


def _refuse_unused(kind: str, given: dict, used: tuple[str, ...]) -> None:
    for name, value in given.items():
        if name not in used:
            raise ValueError(
                f"{name}={value!r} has no effect on kind={kind!r}; it takes {', '.join(used) or 'no parameter'}"
            )


def _whole(name: str, value, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r}; expected an integer from {least} to {most}")
    return value
