"""The kinds of index: which parameters each has, their defaults and bounds. Imports no FAISS."""

import math

from verl_credit_retriever.index.manifest import KINDS

BUILT_WITH = {"ivf": ("nlist", "train_rows", "seed"), "hnsw": ("m", "ef_construction", "seed")}
SEARCHED_WITH = {"ivf": ("nprobe",), "hnsw": ("ef_search",)}
ROWS_PER_LIST = 39  # FAISS's own minimum for k-means
TRAIN_ROWS_PER_LIST = 64


def resolve(kind: str, rows: int, given: dict) -> tuple[dict, dict]:
    """(parameters, search) for building and searching an index of `rows` rows, with every default filled in.

    None in `given` means the default. ivf: nlist = 4·√rows, at most rows / 39 and at least 1; train_rows =
    64·nlist, at most rows; nprobe = √nlist, at least 8 and at most nlist; seed 0. hnsw: m = 32, ef_construction =
    200, ef_search = 128, seed 0. flat, sq8 and exact have none. Errors: ValueError for a value out of bounds, one
    that the kind does not use, and more lists than rows.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; accepted: {', '.join(KINDS)}")
    given = {name: value for name, value in given.items() if value is not None}
    built, searched = BUILT_WITH.get(kind, ()), SEARCHED_WITH.get(kind, ())
    _refuse_unused(kind, given, (*built, *searched))
    if kind == "ivf":
        most = max(1, min(round(4 * math.sqrt(rows)), rows // ROWS_PER_LIST))
        nlist = _whole("nlist", given.get("nlist", most), 1, rows)
        train = _whole(
            "train_rows", given.get("train_rows", min(rows, TRAIN_ROWS_PER_LIST * nlist)), nlist, rows
        )
        parameters = {"nlist": nlist, "train_rows": train}
    elif kind == "hnsw":
        parameters = {
            "m": _whole("m", given.get("m", 32), 2, 512),
            "ef_construction": _whole("ef_construction", given.get("ef_construction", 200), 1, 1 << 20),
        }
    else:
        return {}, {}
    parameters["seed"] = _whole("seed", given.get("seed", 0), 0, (1 << 31) - 1)
    return parameters, resolve_search(kind, parameters, _default_search(kind, parameters), given)


def resolve_search(kind: str, parameters: dict, recorded: dict, given: dict) -> dict:
    """The search parameters of a built index: those `recorded` in its manifest, overridden by `given` (not None).

    Errors: ValueError for a value out of bounds and for one that the kind does not use.
    """
    names, built = SEARCHED_WITH.get(kind, ()), BUILT_WITH.get(kind, ())
    given = {name: value for name, value in given.items() if value is not None and name not in built}
    _refuse_unused(kind, given, names)
    most = {"nprobe": parameters.get("nlist"), "ef_search": 1 << 20}
    return {name: _whole(name, given.get(name, recorded.get(name)), 1, most[name]) for name in names}


def _default_search(kind: str, parameters: dict) -> dict:
    if kind == "hnsw":
        return {"ef_search": 128}
    nlist = parameters["nlist"]
    return {"nprobe": min(nlist, max(8, math.ceil(math.sqrt(nlist))))}


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
