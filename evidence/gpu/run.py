"""One command for a GPU machine: runs every part in order of value, and writes a table of results beside predictions.

    python evidence/gpu/run.py [--hardware node8|h100x1|spark] [--model FOLDER] [--parts kernels,branches] [--again]
    python evidence/gpu/run.py --device cpu --tiny      the same command at a size for two cores, in minutes

Every part is a separate process with a time limit. Its results are written at once to OUT/results/DEVICE/PART.json. A
second call skips parts that are done for this device and this code, and continues those that were cut. OUT/README.md is
written from these files. Without --model FOLDER (weights with their tokenizer) models have the recipes' shapes and random
weights; those of half_hour are always random. kernels, branches, forward and log_probs need only torch and transformers.
Exit code 0: nothing was off, cut or failed; 1: something was; 4: there is no device to run on; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# `gpu` and `verl_credit`; not this folder, whose files have plain names
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

from gpu.drive import Setting, drive  # noqa: E402
from gpu.machine import here  # noqa: E402
from gpu.parts import PARTS  # noqa: E402
from gpu.table import write_page  # noqa: E402

HARDWARE = ("node8", "node4", "h100x1", "spark")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        print("--device cpu needs --tiny: the full sizes take a CPU days", file=sys.stderr)
        return 4
    wanted = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    if unknown := set(wanted) - {part.name for part in PARTS}:
        print(
            f"--parts: {', '.join(sorted(unknown))}: expected {', '.join(p.name for p in PARTS)}",
            file=sys.stderr,
        )
        return 4
    machine = here(options.device)
    if options.device == "cuda" and not machine["gpus"]:
        print("torch sees no GPU here; `--device cpu --tiny` shows that the command works", file=sys.stderr)
        return 4
    hardware = options.hardware or _hardware(machine)
    model = str(Path(options.model).expanduser().resolve()) if options.model else None
    setting = Setting(options.device, options.tiny, hardware, model, str(options.out), str(options.work))
    try:
        good = drive([part for part in PARTS if part.name in wanted], setting, machine, again=options.again)
    except KeyboardInterrupt:
        print("interrupted; the next call continues from here", flush=True)
        return 130
    finally:
        print("\n" + write_page(options.out), flush=True)
    return 0 if good else 1


def _hardware(machine: dict) -> str:
    """The recipes' name for this machine, from the number of GPUs and their kind."""
    if not machine["gpus"]:
        return "laptop"
    if "GB10" in machine["device"]:
        return "spark"
    return "node8" if machine["gpus"] >= 8 else "node4" if machine["gpus"] >= 4 else "h100x1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for tests")
    parser.add_argument("--hardware", choices=HARDWARE, help="recipes/hardware; default: by what is here")
    parser.add_argument("--model", help="folder of trained weights of the recipes' model, with its tokenizer")
    parser.add_argument("--parts", help="names with commas between; default: all")
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--out", type=Path, default=HERE, help="README.md and results/ are written there")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_evidence"), help="models, data and runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
