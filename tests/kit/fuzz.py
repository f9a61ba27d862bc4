"""What the fuzz tests share: how many cases they draw, a time limit for each input, and how a failure is told.

Every file of ``tests/fuzz`` has a ``checker(work)``: a context whose value takes a seed, makes the input of that seed, and
says whether it was accepted or refused. `checker_of` makes one. It raises where the input breaks a law.
`evidence/reliability/inputs.py` calls the same functions.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from verl_credit.cli import main

FUZZ_CASES = int(os.environ.get("VERL_CREDIT_FUZZ_CASES", "120"))
"""How many cases the slow fuzz tests draw. ``make fuzz CASES=2000`` draws as many as one likes."""
LAW_SEEDS = range(2 + FUZZ_CASES // 600)
"""The seeds for which slow tests try all laws on every operator: two, and with ``CASES=2000`` five."""
SECONDS = 120.0
"""Of one input. A thousand times what an input takes, so that a busy machine is no hang."""
ACCEPTED, REFUSED = "accepted", "refused"
Check = Callable[[int], str]


def checker_of(case: Callable[[Path, int], str]) -> Callable[[Path], AbstractContextManager[Check]]:
    """Of a function of a seed and a folder of its own, which is empty."""

    @contextmanager
    def checker(work: Path) -> Iterator[Check]:
        def check(seed: int) -> str:
            folder = work / str(seed)
            folder.mkdir()
            verdict = case(folder, seed)
            shutil.rmtree(folder)
            return verdict

        yield check

    return checker


class TooSlow(BaseException):
    """An input took too long. No Exception, so that what is tested cannot catch it."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raises TooSlow in the block after ``seconds``. In the main thread alone."""

    def ring(*_):
        raise TooSlow(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def told(case: object) -> Iterator[None]:
    """An error in the block says of which case it is."""
    try:
        yield
    except (Exception, TooSlow) as error:
        error.add_note(f"{case!r:.1500}")
        raise


def why(error: BaseException) -> str:
    """A failure in words: what went wrong, then the case."""
    return "\n".join([f"{type(error).__name__}: {error}"[:500], *getattr(error, "__notes__", ())])


def try_all(check: Check, seeds: Iterable[int]) -> None:
    """The seeds of a test; the first that fails ends it. Where every input is refused, none reaches what is tested."""
    found = set()
    for seed in seeds:
        try:
            with time_limit():
                found.add(check(seed))
        except (Exception, TooSlow) as error:
            pytest.fail(f"seed {seed}: {why(error)}", pytrace=False)
    assert ACCEPTED in found, "every input is refused"


def cuts(first: int, share: int = 1, failed: tuple[int, ...] = ()):
    """The parameters of a fuzz test, which is slow: first seeds, ``FUZZ_CASES // share`` more, those that once failed."""
    seeds = (*range(first + FUZZ_CASES // share), *failed)
    return pytest.mark.parametrize("seeds", [pytest.param(seeds, marks=pytest.mark.slow)], ids=["drawn"])


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``verl-credit WORDS``, in this process."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    out, err = out.getvalue(), err.getvalue()
    (out + err).encode()  # it has to be printed
    return code, out, err


def one_plain_line(said: str) -> None:
    """A refusal as a person can read it."""
    assert said.endswith("\n") and said[:-1].strip() and said[:-1].isprintable(), (
        f"not one line: {said!r:.600}"
    )


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below the folder; None: a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
