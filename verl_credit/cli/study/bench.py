"""`verl-credit bench MODE`: laws, exact bias, agreement with the true advantages, and learning curves of one turn mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_credit.credit.laws import check
from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.machine.gather import cores
from verl_credit.recipe.world import world_of
from verl_credit.records.run.files import DamagedFile, write_text
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.bench.candidate import Candidate, find_candidate
from verl_credit.study.bench.exact import exact_rows
from verl_credit.study.bench.learning import GRPO, declare, learn
from verl_credit.study.bench.page import Bench, page
from verl_credit.study.bench.policies import agreed
from verl_credit.study.campaign.results import results

PAGE = "bench.html"


def bench(
    path: str,
    params: Mapping[str, Any] | None,
    out: Path | None,
    *,
    beside: str,
    seeds: int,
    steps: int,
    prompts: int,
    continuations: int,
    parallel: int | None,
    overrides: list[str],
) -> int:
    """The page is written anew after each part. The same command goes on where it was stopped.

    Exit code 1 for a broken law or a run that failed, 4 for what is refused, 130 after Ctrl-C.
    """
    sys.path.insert(0, "")  # a mode of the user's, in the folder one stands in
    try:
        candidate, known = find_candidate(path, params), find_candidate(beside)
        conditions = {
            GRPO: ["algorithm.info_gain_norm_mode=none"],
            candidate.path.replace(":", "."): candidate.overrides(),
            known.path: known.overrides(),
        }
        campaign = declare(conditions, seeds=seeds, steps=steps, overrides=overrides)
        out = (out or Path("runs") / "bench" / path.replace(":", ".")).expanduser().resolve()
        out.mkdir(parents=True, exist_ok=True)
        found = _Written(Bench(candidate.path, [GRPO, known.path]), out / PAGE)
        if not _operator(found, candidate, known):
            return ExitCode.FAILED
        _agreement(found, candidate, known, out, overrides, prompts, continuations, parallel)
        code = _learning(found, campaign, out, parallel)
    except (ConfigError, PreflightError, DamagedFile, OSError) as error:
        print(f"verl-credit bench {path}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return ExitCode.INTERRUPTED
    finally:
        sys.path.remove("")
    print(out / PAGE)
    return ExitCode.FAILED if found.bench.broken and code is ExitCode.DONE else code


@dataclass(frozen=True)
class _Written:
    """What is known so far, and the page that shows it."""

    bench: Bench
    page: Path

    def say(self, title: str, lines: Sequence[str]) -> None:
        print("\n".join(["", title, *lines]), flush=True)
        write_text(self.page, page(self.bench))


def _operator(found: _Written, candidate: Candidate, known: Candidate) -> bool:
    """Laws and exact bias. False for a mode that cannot be called, or gives another result every time."""
    found.bench.findings = check(candidate.subject())
    found.say("Laws", found.bench.law_lines())
    if found.bench.broken and found.bench.broken[0].name in ("runs", "pure"):
        return False
    found.bench.exact = exact_rows([candidate, known])
    found.say("Cosine of the expected gradient with grad E[r], over 9 settings", found.bench.exact_lines())
    return True


def _agreement(found: _Written, candidate, known, out, overrides, prompts, continuations, parallel) -> None:
    config = load_config("lab", overrides)
    world_of(config).build(Throttled(say_at_once))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for several threads longer than it computes
    try:
        options = {"prompts": prompts, "continuations": continuations, "parallel": parallel}
        for one in agreed(candidate, known, out, overrides, **options):
            found.bench.agreed.append(one)
            found.say("True advantages", found.bench.agreed_lines([one]))
    finally:
        torch.set_num_threads(threads)


def _learning(found: _Written, campaign: dict, out: Path, parallel: int | None) -> ExitCode:
    code, folder = learn(out, campaign, parallel=parallel or cores())
    found.bench.learning = results(folder)
    found.say("Learning", found.bench.learning_lines())
    return code
