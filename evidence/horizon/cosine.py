"""Own cosine by horizon: policies of the lab, each with the modes, the controls, true values and learned ones.

    python evidence/horizon/cosine.py FILE FOLDER [FOLDER ...] [--steps 0,10,20] [--prompts 96] [--continuations 32]
    python evidence/horizon/cosine.py FILE             # the tables of what FILE has

FOLDER: what `verl-credit fidelity` takes: a run (with --steps), a checkpoint, or LAB/policy. FILE (JSON lines) gets a line
for each policy when it is measured. Its values lie beside FILE, so that the same command goes on where it was stopped.

Learned values are cross-fitted over all of the policy's questions: `group` is the mean outcome of the prompt's other
rollouts and the turn, `features` adds what `algorithm.turn_values=features` observes. They explain ("EV") a share of the
variance of V* and of its changes from turn to turn, without the noise of V*. The horizon is lab.hops; without that key it
is "mix".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean

import torch
from cosine_page import LAMS, above, page
from omegaconf import OmegaConf

from verl_credit.cli.fidelity.policies import Policy, policies_of, step_numbers
from verl_credit.config.keys.reads import HIDDEN
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.turn_credit import credit_of
from verl_credit.credit.turn.values import States, crossfit, group_features, loo_mean
from verl_credit.names import ADV_ESTIMATOR
from verl_credit.precision import one_thread
from verl_credit.records.report.again import TurnTables
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.credits import Credit, batches, nested
from verl_credit.study.fidelity.headroom import by_values, of_turns
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.result import Result
from verl_credit.study.fidelity.rows import outcomes_of, rows_settings
from verl_credit.study.fidelity.subject import Subject, load_policy
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.study.fidelity.workers import workers_of
from verl_credit.turns.anchors import anchor_table
from verl_credit.turns.assign import CreditRun, StepInputs, step_inputs
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.hidden import hidden_table, since_last_turns
from verl_credit.turns.signals.known import find_signal
from verl_credit.turns.signals.signal import StepRows
from verl_credit.worlds.rollouts.rollout import Groups

MEASURED = ["none", "gigpo", "turn-group-v1d", "turn-group-unbiased", "joint", "separate", "calibadv", "g2po"]
SHRINK, FOLDS = 0.03, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--steps", help="of each run")
    parser.add_argument("--split", default="train", choices=("train", "dev", "test"))
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--continuations", type=int, default=32)
    parser.add_argument("--above", help="a credit that is compared with every credit which knows no value")
    parser.add_argument("--parallel", type=int, help="processes; as many as there are cores if not given")
    given = parser.parse_args()
    with one_thread():
        for folder in given.folders:
            for policy in policies_of(folder, step_numbers(given.steps), None):
                measure_policy(policy, given)
    rows = read_json_lines(given.file)
    print(page(rows), *([above(rows, given.above)] if given.above else []), sep="\n\n")


def measure_policy(policy: Policy, given: argparse.Namespace) -> None:
    """Appends a line, unless the file has it."""
    config, size = (
        policy.config,
        {name: getattr(given, name) for name in ("split", "prompts", "continuations")},
    )
    is_of = {"folder": str(policy.folder), "step": policy.step, **size}
    if any(is_of.items() <= row.items() for row in read_json_lines(given.file)):
        return
    begun = time.monotonic()
    load = partial(policy.load, lab=None, split=given.split, prompts=given.prompts)
    subject, explained = load(), {}
    of_run = str(policy.folder if policy.step is None else config.run_dir)
    name = blake2b(f"{is_of}".encode(), digest_size=4).hexdigest()
    out = given.file.with_suffix("") / f"{policy.folder.name}_{name}"
    request = Request(
        str(out), **size, rollouts=config.actor_rollout_ref.rollout.n, modes=MEASURED, gradient=True
    )
    with workers_of(load, given.prompts, given.parallel) as workers:
        say = Throttled(say_at_once, f"cosine {policy.folder.name}")

        def further(tables: TurnTables, groups: Groups, values: Mapping[str, Value]) -> list[Credit]:
            by_values = learned(subject, explained, tables, groups, values)
            return [*others(subject, tables, groups), *by_values]

        result = measure(subject, request, say=say, workers=workers, further=further)
    hops = OmegaConf.select(config, "lab.hops")
    found = {"hops": "mix" if hops is None else hops, "run": of_run} | found_by(result, explained)
    append_json(given.file, {**is_of, **found, "seconds": round(time.monotonic() - begun)})


def found_by(result: Result, explained: dict) -> dict:
    """The part of a line that the measurement gives."""
    cosines = {
        kind: {
            name: [m.value, m.low, m.high]
            for name, found in result.gradients.items()
            for m in [getattr(found, kind)]
        }
        for kind in ("own", "own_difference")
    }
    return {
        "right": fmean(path.reward for group in result.groups for path in group),
        "turns": len(result.turns) / sum(map(len, result.groups)),
        "headroom": result.headroom["says"],
        **cosines,
        "explained": explained,
    }


def learned(
    subject: Subject, explained: dict, tables: TurnTables, groups: Groups, values: Mapping[str, Value]
) -> list[Credit]:
    """`turn_gae` with learned values; ``explained`` gets what values explain of V* and of its changes."""
    turn_B_K1 = torch.arange(tables.tokens_B_K1.shape[1]) <= tables.n_tool_turns_B[:, None]
    mean_B = loo_mean(tables.outcome_B, tables.group_B, tables.valid_B)
    features = {"group": group_features(mean_B, turn_B_K1.shape[1])}
    rows, inputs = step_rows(subject, groups, "turn_gae", "none", turn_values="features")
    observed_B_K1_D = inputs.run.values.provider.observe(rows, inputs).nan_to_num()
    features["features"] = torch.cat([features["group"], observed_B_K1_D], dim=2)
    half = next(iter(values.values())).continuations // 2
    halves = [of_turns(tables, groups, part_of(values, part)) for part in (slice(half), slice(half, None))]
    credits = []
    for name, x_B_K1_D in features.items():
        outcome, prompt, mean = (
            x_B[:, None].expand(turn_B_K1.shape)[turn_B_K1]
            for x_B in (tables.outcome_B, tables.group_B, mean_B)
        )
        states = States(x_B_K1_D[turn_B_K1], outcome.double(), prompt)
        value_B_K1 = torch.zeros(turn_B_K1.shape, dtype=torch.float64)
        value_B_K1[turn_B_K1], _ = crossfit(states, None, mean, shrink=SHRINK, folds=FOLDS)
        explained[name] = explained_without_noise(value_B_K1, halves, turn_B_K1)
        credits += by_values(f"learned ({name})", tables, groups, value_B_K1, LAMS)
    return credits


def others(subject: Subject, tables: TurnTables, groups: Groups) -> list[Credit]:
    """GAGPO without turn rewards, as it is by default, and modes whose turn reward is provenance, or a gain under the frozen
    start of the run; modes whose states are clusters of hidden states."""
    rows, inputs = step_rows(subject, groups, "calibadv", "none")
    reward_B_K, has_B_K = find_signal("provenance", {}).rewards(rows)
    bare = replace(tables, reward_B_K=torch.zeros_like(reward_B_K), has_reward_B_K=torch.zeros_like(has_B_K))
    shown = replace(tables, reward_B_K=reward_B_K, has_reward_B_K=has_B_K)
    gap, log_ratio = (of_the_start(subject, groups, kind) for kind in ("log_gap", "log_prob_diff"))
    trace = replace(tables, reward_B_K=gap[0], has_reward_B_K=gap[1])
    cigpo = replace(tables, reward_B_K=log_ratio[0], has_reward_B_K=log_ratio[1])
    near, middle = (replace(bare, anchor_B_K1=clusters(subject, inputs, rows, layer)) for layer in (-1, -2))
    credits = []
    for name, of, mode, options in (
        ("gagpo", bare, "gagpo", {}),
        ("trace, frozen start", trace, "trace", {}),
        ("cigpo, frozen start", cigpo, "separate", {"gamma": 0.0, "gain_scale": 0.2}),
        ("turn-group-v1d, provenance, alpha 0.3", shown, "turn-group-v1d", {"alpha": 0.3}),
        ("calibadv, provenance", shown, "calibadv", {}),
        ("bipace", bare, "bipace", {}),
        ("bipace, hidden", near, "bipace", {}),
        ("bipace, hidden, layer -2", middle, "bipace", {}),
        ("bipace, hidden, means of all", near, "bipace", {"means": "all"}),
        ("gigpo, hidden", near, "gigpo", {}),
    ):
        parts = batches(of, subject.config.data.train_batch_size)
        given = torch.cat(
            [credit_of(find_turn_mode(mode), part.batch, options).advantage_B_K1 for part in parts]
        )
        credits.append(
            Credit(name, nested(given, tables.n_tool_turns_B, [*map(len, groups)]), kind="control")
        )
    return credits


def of_the_start(subject: Subject, groups: Groups, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gains of this kind under the policy that the run starts from, and which turns have one."""
    start = replace(subject, model=load_policy(Path(subject.config.actor_rollout_ref.model.path))[0])
    _, inputs = step_rows(start, groups, "trace", "info_gain", info_gain_type=kind)
    return inputs.gain_B_K.double(), inputs.has_gain_B_K


def clusters(subject: Subject, inputs: StepInputs, rows: StepRows, layer: int) -> torch.Tensor:
    """Anchors by the policy's hidden states, as `algorithm.turn_anchor=hidden` makes them."""
    given, near = inputs.run.settings, {"turn_anchor": HIDDEN, "turn_anchor_layer": layer}
    settings = replace(given, algorithm=given.algorithm.model_copy(update=near))
    spans = since_last_turns(rows.turns)
    with subject.forward() as forward:
        forward.read_hidden(rows.turns, spans, layer)
        return anchor_table(settings, rows, hidden_table(forward, spans))


def step_rows(
    subject: Subject, groups: Groups, mode: str, signal: str, **changes
) -> tuple[StepRows, StepInputs]:
    """The groups as the rows of a step with this turn signal, by the trainer's functions."""
    changes |= {"adv_estimator": ADV_ESTIMATOR, "info_gain_norm_mode": mode, "turn_signal": signal}
    settings = rows_settings(CreditSettings.from_config(subject.config), turn_signals=None, **changes)
    batch, run = subject.batch(groups), CreditRun.of(settings, subject.tokenizer)
    with subject.forward() as forward:
        plan = plan_gains(batch, settings, subject.tokenizer)
        inputs = step_inputs(run, plan, forward, {}, step=1, planned_steps=1)
    gains = inputs.gain_B_K, inputs.has_gain_B_K
    return StepRows(batch, subject.tokenizer.decode, *outcomes_of(groups), *gains), inputs


def explained_without_noise(
    value_B_K1: torch.Tensor, halves: list[torch.Tensor], turn_B_K1: torch.Tensor
) -> list[float | None]:
    """[EV of V*, EV of V*_{k+1} - V*_k]:  1 - E[(V - V') (V - V'')] / cov(V', V'')  with V* by each half.
    None: V* does not differ, as far as the halves agree."""
    pair_B_K = turn_B_K1[:, 1:]
    tables = [
        [x[turn_B_K1] for x in (value_B_K1, *halves)],
        [(x[:, 1:] - x[:, :-1])[pair_B_K] for x in (value_B_K1, *halves)],
    ]
    shares = []
    for v, first, second in tables:
        of_true = ((first - first.mean()) * (second - second.mean())).mean()
        shares.append(float(1 - ((v - first) * (v - second)).mean() / of_true) if of_true > 0 else None)
    return shares


if __name__ == "__main__":
    main()
