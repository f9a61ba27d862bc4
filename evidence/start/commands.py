"""CPU and wall seconds of the commands that only compose and validate, beside those of an older commit, in turn.

    python evidence/start/commands.py COMMIT [REPETITIONS]

prints the table of README.md: medians, in the environment that is active. COMMIT is unpacked into a temporary folder.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
COMMANDS = (("explain",), ("plan",), ("diff", "lab", "lab credit=paper"), ("check", "--help"))
PROGRAM = "import sys; from verl_credit.cli import main; sys.exit(main())"


def unpack(commit: str, folder: Path) -> None:
    """The commit's packages under the names that an installation gives them."""
    files = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
    for name in ("retriever", "recipes"):
        (folder / f"verl_credit_{name}").symlink_to(folder / name)


def seconds(command: tuple[str, ...], code: Path | None, place: Path) -> tuple[float, float]:
    """(CPU, wall) of one process with the code of this folder; None: of the installation."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
    }  # both sides compile once, before they are timed
    if code is not None:
        environment["PYTHONPATH"] = str(code)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], env=environment, cwd=place, capture_output=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: diff found a difference
        raise SystemExit(done.stderr.decode())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main(commit: str, repetitions: int = 5) -> None:
    print(
        "| command | CPU s before | CPU s now | ratio | wall s before | wall s now |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as place:
        older = Path(place, "older")
        older.mkdir()
        unpack(commit, older)
        for command in COMMANDS:
            for code in (older, None):  # compiles what is not compiled yet
                seconds(command, code, Path(place))
            runs = [
                (seconds(command, older, Path(place)), seconds(command, None, Path(place)))
                for _ in range(repetitions)
            ]
            (cpu_before, wall_before), (cpu, wall) = (
                [median(run[side][kind] for run in runs) for kind in (0, 1)] for side in (0, 1)
            )
            name = " ".join(f"'{word}'" if " " in word else word for word in command)
            print(
                f"| `{name}` | {cpu_before:.2f} | {cpu:.2f} | {cpu / cpu_before:.2f} | {wall_before:.2f} | {wall:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
