"""Values through a run's own rollouts beside the sampler's of the same contexts.

So small a policy hardly ever answers rightly: here an answer is right by its number of characters.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from verl_credit.cli.fidelity.policies import policies_of
from verl_credit.host.step.measured_rows import Row, trajectory_of
from verl_credit.records.run.files import read_json_lines
from verl_credit.study.fidelity.true_values import Value, values_of
from verl_credit.turns.rollout.thoughts import TurnReader
from verl_credit.worlds.rollouts.sampler import digest

REWARD = """
def long_or_short(data_source, solution_str, ground_truth, extra_info=None, **_):
    right = float(len(extra_info["credit"]["final_text"]) % 2)
    return {"score": 3 * right, "em": right}
"""
KEY = "reward.custom_reward_function"
PROMPTS, ROLLOUTS, CONTINUATIONS = 4, 4, 32


def measured_by_run(run_dir: Path, tmp_path: Path, *, step: int, seconds: float = 420) -> SimpleNamespace:
    """output, values (the run's), ours (the sampler's, by context), paths (the run's rollouts), right."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    out = tmp_path / "out"
    overrides = [
        f"{KEY}.path={tmp_path / 'my_reward.py'}",
        f"{KEY}.name=long_or_short",
        f"~{KEY}.reward_kwargs",
    ]
    sizes = f"--prompts {PROMPTS} --rollouts {ROLLOUTS} --continuations {CONTINUATIONS}"
    options = f"--engine run --steps {step} {sizes} --modes none,joint --dir {out}"
    command = [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "fidelity", str(run_dir), *overrides]
    made = subprocess.run([*command, *options.split()], capture_output=True, text=True, timeout=seconds)
    assert made.returncode == 0, made.stdout + made.stderr
    (policy,) = policies_of(run_dir, [step], None)
    subject = policy.load(lab=None, split="train", prompts=PROMPTS)

    reader = TurnReader(subject.tokenizer)

    def right(state, ids):
        return float(len(reader.after(state.ids).plain(ids)) % 2)

    subject.protocol._reward = right
    lines = read_json_lines(out / f"step_{step}/rollouts.jsonl")
    assert [(line["name"], line["question"], len(line["rows"])) for line in lines] == [
        ("rollout", question, ROLLOUTS) for question in range(PROMPTS)
    ]
    paths = [trajectory_of(Row(**row)) for line in lines for row in line["rows"]]
    states = {digest(step.state.ids): step.state for path in paths for step in path.steps}
    values = {row["context"]: Value(**row) for row in read_json_lines(out / f"step_{step}/values.jsonl")}
    assert values.keys() == states.keys()
    ours = values_of(states.values(), subject.roll, continuations=256, seed=1)
    return SimpleNamespace(output=made.stdout, values=values, ours=ours, paths=paths, right=right)


def assert_agree(found: SimpleNamespace) -> None:
    assert "gave another answer" not in found.output
    assert all(value.otherwise == 0 for value in found.values.values())
    assert all(
        found.right(path.steps[-1].state, path.steps[-1].turn_ids) == path.reward for path in found.paths
    )
    z = [z_of(value, found.ours[context]) for context, value in found.values.items()]
    assert len(z) > 8 and 0.1 < statistics.fmean(v.value for v in found.ours.values()) < 0.9
    assert abs(statistics.fmean(z)) < 4 / len(z) ** 0.5 and 0.5 < statistics.pstdev(z) < 1.7


def z_of(one: Value, other: Value) -> float:
    """Of two estimates of one chance, by their common one: its error does not follow theirs."""
    n = one.continuations + other.continuations
    p = (one.successes + other.successes + 0.5) / (n + 1)
    return (one.value - other.value) / (p * (1 - p) * n / one.continuations / other.continuations) ** 0.5
