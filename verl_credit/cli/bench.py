"""`verl-credit bench MODE`: laws, exact bias, agreement with the true advantages, and learning curves of one turn mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from verl_credit.cli.command import GOES_ON, ends, json_object, modules_from_here
from verl_credit.errors import ExitCode
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile, write_text

if TYPE_CHECKING:
    from verl_credit.study.bench.page import Bench
    from verl_credit.study.bench.parts import Candidate

PAGE = "bench.html"


@ends("bench {mode}", DamagedFile, OSError, interrupted=GOES_ON)
def bench(
    mode: Annotated[str, Argument(help="my_module:my_mode, or a registered turn mode")],
    overrides: Annotated[list[str], Argument(help="of the recipe lab, for all runs")] = (),
    params: Annotated[
        dict | None, Option(parser=json_object, help="JSON object with options of the mode")
    ] = None,
    out: Annotated[
        Path | None, Option("--dir", help="runs/bench/MODE if not given; an interrupted bench goes on there")
    ] = None,
    beside: Annotated[str, Option(help="the published mode that it is compared with, beside GRPO")] = "joint",
    seeds: Annotated[int, Option(min=2, help="of the learning curves")] = 8,
    steps: Annotated[int, Option(min=5, help="of each learning curve")] = 12,
    prompts: Annotated[int, Option(min=18, help="whose true advantages are measured")] = 48,
    continuations: Annotated[int, Option(help="per distinct context; an even number")] = 32,
    parallel: Annotated[
        int | None, Option(min=1, help="processes; as many as there are cores if not given")
    ] = None,
) -> ExitCode:
    """Rewrites the page after each part. Exit code 1 for a broken law or a failed run."""
    from verl_credit.recipe.machine import cores
    from verl_credit.study.bench.page import Bench
    from verl_credit.study.bench.parts import GRPO, declare, find_candidate, learn
    from verl_credit.study.campaign.results import results

    with modules_from_here():
        candidate, known = find_candidate(mode, params), find_candidate(beside)
        conditions = {
            GRPO: ["algorithm.info_gain_norm_mode=none"],
            candidate.path.replace(":", "."): candidate.overrides(),
            known.path: known.overrides(),
        }
        campaign = declare(conditions, seeds=seeds, steps=steps, overrides=overrides)
        out = (out or Path("runs") / "bench" / mode.replace(":", ".")).expanduser().resolve()
        out.mkdir(parents=True, exist_ok=True)
        sofar = _Written(Bench(candidate.path, [GRPO, known.path]), out / PAGE)
        if not _operator(sofar, candidate, known):
            return ExitCode.FAILED
        options = {"prompts": prompts, "continuations": continuations, "parallel": parallel}
        _agreement(sofar, candidate, known, out, overrides, **options)
        code, folder = learn(out, campaign, parallel=parallel or cores())
        sofar.bench.learning = results(folder)
        sofar.say("Learning", sofar.bench.learning_lines())
    print(out / PAGE)
    return ExitCode.FAILED if sofar.bench.broken and code is ExitCode.DONE else code


@dataclass(frozen=True)
class _Written:
    """The results so far, and the page that shows them."""

    bench: Bench
    page: Path

    def say(self, title: str, lines: Sequence[str]) -> None:
        from verl_credit.study.bench.page import page

        print("\n".join(["", title, *lines]), flush=True)
        write_text(self.page, page(self.bench))


def _operator(sofar: _Written, candidate: Candidate, known: Candidate) -> bool:
    """Measures laws and exact bias. Returns False for a mode that cannot be called or whose result is not deterministic."""
    from verl_credit.credit.laws import check
    from verl_credit.study.bench.parts import exact_rows

    sofar.bench.findings = check(candidate.subject())
    sofar.say("Laws", sofar.bench.law_lines())
    if sofar.bench.broken and sofar.bench.broken[0].name in ("runs", "pure"):
        return False
    sofar.bench.exact = exact_rows([candidate, known])
    sofar.say("Cosine of the expected gradient with grad E[r], over 9 settings", sofar.bench.exact_lines())
    return True


def _agreement(
    sofar: _Written, candidate: Candidate, known: Candidate, out: Path, overrides: Sequence[str], **options
) -> None:
    from verl_credit.recipe.compose import load_config
    from verl_credit.recipe.world import world_of
    from verl_credit.records.run.progress import Throttled, say_at_once
    from verl_credit.study.bench.parts import agreed

    config = load_config("lab", overrides)
    world_of(config).build(Throttled(say_at_once))
    with one_thread():
        for one in agreed(candidate, known, out, overrides, **options):
            sofar.bench.agreed.append(one)
            sofar.say("True advantages", sofar.bench.agreed_lines([one]))
