"""`verl-credit bench MODE`: laws, exact bias, agreement with the true advantages, and learning curves of one turn mode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import GOES_ON, Continuations, Parallel, Params, ends, modules_from_here
from verl_credit.errors import ExitCode
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile, write_text
from verl_credit.records.run.progress_line import Throttled, say_at_once


@ends("bench {mode}", DamagedFile, OSError, interrupted=GOES_ON)
def bench(
    mode: Annotated[str, Argument(help="my_module:my_mode, or a registered turn mode")],
    overrides: Annotated[list[str], Argument(help="of the recipe lab, for all runs")] = (),
    params: Params = None,
    out: Annotated[Path | None, Option("--dir", help="runs/bench/MODE if not given")] = None,
    beside: Annotated[str, Option(help="the published mode that it is compared with, beside GRPO")] = "joint",
    seeds: Annotated[int, Option(min=2, help="of the learning curves")] = 8,
    steps: Annotated[int, Option(min=5, help="of each learning curve")] = 12,
    prompts: Annotated[int, Option(min=18, help="whose true advantages are measured")] = 48,
    continuations: Continuations = 32,
    parallel: Parallel = None,
    table: Annotated[
        bool, Option("--table", help="a row of the table of credits, in place of the page")
    ] = False,
    values: Annotated[
        str | None, Option(help="of --table: state, features, group or true, for turn_gae")
    ] = None,
    n: Annotated[int, Option(help="of --table: rollouts of a question; a step has 128 in all")] = 8,
    only: Annotated[str, Option(help="of --table: beginnings of columns, with commas")] = "",
) -> ExitCode:
    """Rewrites the page after each part. Exit code 1 for a broken law or a failed run.

    With --table: a line for each column of this credit in rows.jsonl of --dir (runs/table if not given). A column that is
    there is not measured again.
    """
    if table:
        return _row(mode, params, values, n, only, out)
    from verl_credit.credit.laws import check
    from verl_credit.recipe.compose import load_config
    from verl_credit.recipe.this_machine import cores
    from verl_credit.recipe.world import world_of
    from verl_credit.study.bench import GRPO, Bench, agreed, declare, exact_rows, find_candidate, page
    from verl_credit.study.campaign.results import results
    from verl_credit.study.campaign.runner import run_campaign

    with modules_from_here():
        candidate, known = find_candidate(mode, params), find_candidate(beside, option="--beside")
        conditions = {
            GRPO: ["algorithm.info_gain_norm_mode=none"],
            candidate.path.replace(":", "."): candidate.overrides(),
            known.path: known.overrides(),
        }
        campaign = declare(conditions, seeds=seeds, steps=steps, overrides=overrides)
        out = (out or Path("runs") / "bench" / mode.replace(":", ".")).expanduser().resolve()
        out.mkdir(parents=True, exist_ok=True)
        sofar = Bench(candidate.path, [GRPO, known.path])

        def say(title: str, lines: Sequence[str]) -> None:
            print("\n".join(["", title, *lines]), flush=True)
            write_text(out / "bench.html", page(sofar))

        sofar.findings = check(candidate.subject())
        say("Laws", sofar.law_lines())
        if sofar.broken and sofar.broken[0].name in ("runs", "pure"):
            return ExitCode.FAILED  # it cannot be called, or its result is not deterministic
        sofar.exact = exact_rows([candidate, known])
        say("Cosine of the expected gradient with grad E[r], over 9 settings", sofar.exact_lines())
        world_of(load_config("lab", overrides)).build(Throttled(say_at_once))
        sizes = {"prompts": prompts, "continuations": continuations, "parallel": parallel}
        with one_thread():
            for one in agreed(candidate, known, out, overrides, **sizes):
                sofar.agreed.append(one)
                say("True advantages", one.lines())
        write_text(out / "learning.yaml", json.dumps(campaign, indent=1))
        code, folder = run_campaign(str(out / "learning.yaml"), out / "learning", parallel or cores())
        sofar.learning = results(folder)
        say("Learning", [judged.verdict for judged in sofar.learning.judged])
    print(out / "bench.html")
    return ExitCode.FAILED if sofar.broken and code is ExitCode.DONE else code


def _row(mode: str, params: dict | None, values: str | None, n: int, only: str, out: Path | None) -> ExitCode:
    from verl_credit.study.table_columns import columns_of, measure_row
    from verl_credit.study.table_row import ROWS, row_of

    with modules_from_here(), one_thread():
        row, columns = row_of(mode, params, values, n), columns_of([name for name in only.split(",") if name])
        folder = (out or Path("runs") / "table").expanduser().resolve()
        print(f"{row.name}: areas minus GRPO's in points, in brackets with shuffled signals", flush=True)
        for line in measure_row(row, folder, columns):
            print(line, flush=True)
    print(folder / ROWS)
    return ExitCode.DONE
