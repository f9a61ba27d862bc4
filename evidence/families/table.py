"""Every family beside transformers' `eager` attention, which reads one row of a forward at a time.

    python evidence/families/table.py                      # the whole table into build/families, on a CPU
    python evidence/families/table.py --only qwen3_next    # one family, printed
    python evidence/families/table.py --write              # into this folder: numbers.json and the README's table

Models are tiny and random (`tests/kit/families.py`), in float32. Our side is verl's FSDP2 engine with the keys that the run
would choose, and the generator of `rollout.name=hf`. `before.json` has the numbers of the version without the table of
families, whose keys were the same for all: our attention, packed rows, `branch`. Differences are the largest, in nats; of
gradients the largest relative norm of a parameter's difference.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parent)]

import torch  # noqa: E402
from archive import as_text  # noqa: E402
from families.measure import Family, Result  # noqa: E402

from kit.families import FAMILIES  # noqa: E402
from kit.tiny_engine import single_rank  # noqa: E402

MARKS = ("<!-- table -->", "<!-- end of the table -->")
HEAD = (
    "| family | keys of the run | rows | gradients | `branch` | `rows` | `hf`: drawn | `hf`: prompt "
    "| before: rows, gradients, drawn | refused |"
)
BEFORE = json.loads((HERE / "before.json").read_text(encoding="utf-8"))


def line(name: str, result: Result) -> str:
    numbers = (getattr(result, key) for key in ("rows", "gradients", "branch", "by_rows", "drawn", "prompt"))
    cells = ("" if number is None else f"{number:.0e}" for number in numbers)
    refused = result.refused.replace("|", "\\|")
    return f"| {name} | {result.keys} | {' | '.join(cells)} | {before(name)} | {refused[:200]} |"


def before(name: str) -> str:
    """The three numbers in which the versions differ; a dash where nothing was computed."""
    row = dict(zip(BEFORE["columns"], BEFORE["families"][name], strict=True))
    numbers = (row[key] for key in ("rows", "gradients", "drawn"))
    return ", ".join("-" if number is None else f"{number:.0e}" for number in numbers)


def markdown(results: dict[str, Result]) -> str:
    rule = "|" + "---|" * (HEAD.count("|") - 1)
    return "\n".join([HEAD, rule, *(line(name, result) for name, result in results.items())])


def numbers(results: dict[str, Result]) -> dict:
    """Rows of numbers.json, in the order of the fields; sentences are the README's."""
    table = {}
    for name, result in results.items():
        values = [v if not isinstance(v, float) else float(f"{v:.1e}") for v in asdict(result).values()]
        table[name] = values[:-1]
    return {"columns": list(asdict(Result()))[:-1], "families": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=FAMILIES, nargs="+", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path("build/families"))
    parser.add_argument("--write", action="store_true", help="write into evidence/families")
    given = parser.parse_args()
    if given.write and given.only:
        parser.error("--write takes the whole table")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Result] = {}
    begin = time.perf_counter()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, single_rank():
        for name in given.only or FAMILIES:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # verl and transformers
                results[name] = Family(name, Path(folder) / name).measure()
            print(line(name, results[name]), flush=True)
    print(f"{len(results)} families, {time.perf_counter() - begin:.0f} s", flush=True)
    if given.only:
        return
    out = HERE if given.write else given.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(as_text(numbers(results)), encoding="utf-8")
    if given.write:
        page = HERE / "README.md"
        start, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        page.write_text(f"{start}{MARKS[0]}\n{markdown(results)}\n{MARKS[1]}{after}", encoding="utf-8")
    else:
        (out / "table.md").write_text(markdown(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
