"""`verl-credit fidelity lens` on a tiny lab: a run's kept rollouts get the A* that sampled ones would have."""

import json

import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.records.report.lens import stars_path
from verl_credit.records.run.table_files import ROLLOUTS, ROLLOUTS_SCHEMA, write_table
from verl_credit.study.fidelity.measure import sample_groups
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.subject import load_policy, make_subject
from verl_credit.study.fidelity.true_values import score_turns, states_of, values_of
from verl_credit.study.fidelity.turn_rows import turn_batch

pytestmark = pytest.mark.slow  # a lab is trained


def tables(run, step, paths):
    """Of the rows 2, 3, ... of a step."""
    batch = turn_batch(paths, [{"reward_model": {"ground_truth": ""}}] * 2)
    rows = list(range(2, 2 + len(paths)))
    turns = [
        ids[: len(row)] for ids, row in zip(batch.turn_ids_B_T.tolist(), batch.response_ids, strict=True)
    ]
    columns = {
        "row": rows,
        "turn": turns,
        "written": [[turn >= 0 for turn in ids] for ids in turns],
        "pieces": [[f"{row}.{i}" for i in range(len(ids))] for row, ids in zip(rows, turns, strict=True)],
        "observations": [[] for _ in rows],
        "prompt_ids": batch.prompt_ids,
        "response_ids": batch.response_ids,
    }
    columns = dict.fromkeys(ROLLOUTS_SCHEMA.names, [None] * len(rows)) | columns
    write_table(run, ROLLOUTS, step, columns, {"mode": "none"})


def test_kept_rollouts_have_the_true_advantages_of_the_policy_that_wrote_them(tiny_lab, tmp_path, capsys):
    def command(*words):
        code = main(["fidelity", "lens", str(tmp_path), "--continuations", "4", *words])
        return code, capsys.readouterr().out.splitlines()

    config = load_config("lab", [f"lab.dir={tiny_lab.root}", f"run_dir={tmp_path}"])
    OmegaConf.save(config, tmp_path / "config.yaml", resolve=True)
    code, said = command()
    assert (code, len(said)) == (4, 1) and "train with keep_rollouts.steps=N" in said[0]

    policy, questions = load_policy(tiny_lab.policy), tiny_lab.root / "train.parquet"
    subject = make_subject("", config, *policy, questions=questions, lab=tiny_lab.root, prompts=2)
    request = Request(out="", prompts=2, rollouts=3, continuations=2, seed=5)
    paths = [path for group in sample_groups(subject, request) for path in group][:5]
    for step in (1, 4):
        tables(tmp_path, step, paths)
    code, said = command("--steps", "1,4")
    assert (code, len(said)) == (4, 1) and said[0].endswith("train with keep_checkpoints=[3]")
    assert "--steps: tables/ has no rollouts of 2; accepted are 1, 4" in command("--steps", "2")[1][0]

    code, said = command()
    assert code == 0 and "keep_checkpoints=[3]" in said[0] and "5 rollouts of step 1" in said[-2]
    groups = [[path] for path in paths[:5]]
    values = values_of(states_of(groups), subject.roll, continuations=4, seed=0)
    wanted = score_turns(groups, values)
    lines = [json.loads(line) for line in stars_path(tmp_path, 1).read_text().splitlines()]
    assert [(line["row"], line["turn"], line["before"], line["a_star"], line["se"]) for line in lines] == [
        (2 + turn.prompt, turn.turn, turn.before, turn.a_star, turn.se) for turn in wanted
    ]
    assert not stars_path(tmp_path, 4).exists()
