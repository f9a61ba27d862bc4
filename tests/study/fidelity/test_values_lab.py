"""On a tiny lab: trajectories of the lab's own evaluation, gains of the project's own definition, and the command."""

import json
import multiprocessing
import random

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from kit.recipes import load_config
from kit.tiny_models import log_probs as log_probs_of
from verl_credit.cli import main
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import PreflightError
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.fidelity.measure import sample_groups
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.subject import load_checkpoint, load_policy, make_subject
from verl_credit.study.fidelity.turn_rows import run_credit, tables_of, turn_batch
from verl_credit.study.forward import PackedRows
from verl_credit.worlds.lab.config import SIZES
from verl_credit.worlds.lab.encyclopedia import make_splits, make_world
from verl_credit.worlds.lab.evaluate import LocalRetriever, Roller
from verl_credit.worlds.rollouts.rollout import Start, roll

pytestmark = pytest.mark.slow  # a lab is trained


@pytest.fixture(scope="module")
def subject(tiny_lab):
    config = load_config("lab", [f"lab.dir={tiny_lab.root}", "credit=paper"])
    return make_subject(
        "lab", config, *load_policy(tiny_lab.policy), questions=tiny_lab.test, lab=tiny_lab.root, prompts=24
    )


def test_another_index_than_the_runs_is_refused(tiny_lab):
    config = load_config("lab", [f"lab.dir={tiny_lab.root}", "search.index_fingerprint=abc"])
    with pytest.raises(PreflightError, match="index has the fingerprint [0-9a-f]+, and the run searched abc"):
        make_subject("", config, None, None, questions=tiny_lab.test, lab=tiny_lab.root, prompts=1)


@pytest.fixture(scope="module")
def groups(subject):
    return sample_groups(subject, Request(out="", prompts=24, rollouts=3, continuations=2))


def test_greedy_trajectories_are_those_of_the_labs_evaluation(subject, tiny_lab):
    questions = make_splits(make_world(0, SIZES["tiny"].world), SIZES["tiny"].world, 0)["test"]
    assert [question.text for question in questions] == [row["prompt"][-1]["content"] for row in subject.data]
    retriever = LocalRetriever(tiny_lab.encoder, tiny_lab.index)
    theirs = Roller(subject.model, subject.tokenizer, retriever).roll(questions, temperature=0.0, seed=0)
    ours = roll(
        subject.sampler(greedy=True), subject.protocol, [Start(s, 1, 0, "greedy") for s in subject.prompts]
    )
    for wanted, ((found, *_), state) in zip(theirs, zip(ours, subject.prompts, strict=True), strict=True):
        last = found.steps[-1]
        assert [*last.state.ids, *last.turn_ids] == [*state.ids, *wanted.response_ids]
        assert [list(ids) for step in found.steps for ids in step.pages] == wanted.found_ids
        assert (found.reward, len(found.steps)) == (wanted.em, len(wanted.turns))
    assert any(wanted.found_ids for wanted in theirs)


def test_gains_are_the_projects(subject, groups):
    """prob_diff of ` <answer> gold</answer>`'s gold tokens, by one forward of each context alone."""
    settings = CreditSettings.from_config(subject.config)
    policy = PackedPolicy(subject.model, budget=1000)
    batch = turn_batch([t for group in groups for t in group], subject.data)
    with policy.packing():
        tables, gold_B_K1 = tables_of(batch, groups, settings, PackedRows(policy), subject.tokenizer)
    head, encode = "<answer>", subject.tokenizer.encode

    def p(state):
        gold = subject.data[state.question]["reward_model"]["ground_truth"]["target"][0]
        answer = encode(f"{head} {gold}</answer>", add_special_tokens=False)
        n_head = len(encode(head, add_special_tokens=False))
        n = len(answer) - n_head - 1  # the closing tag is one token
        log_probs = log_probs_of(subject.model, [*state.ids, *answer])[len(state.ids) - 1 :]
        return log_probs[n_head : n_head + n].double().mean().exp().item()

    compared = 0
    for row, trajectory in enumerate([t for group in groups for t in group][:12]):
        for k, step in enumerate(trajectory.steps[:-1]):
            assert tables.batch.has_reward_B_K[row, k]
            assert float(tables.batch.reward_B_K[row, k]) == pytest.approx(
                p(step.next) - p(step.state), abs=1e-5
            )
            compared += 1
        for k, step in enumerate(trajectory.steps):
            assert float(gold_B_K1[row, k]) == pytest.approx(p(step.state), abs=1e-5)
        assert gold_B_K1[row, len(trajectory.steps) :].isnan().all()
        assert not tables.batch.has_reward_B_K[row, len(trajectory.steps) - 1 :].any()
    assert compared > 3


def command(capsys, *words):
    code = main(["fidelity", *map(str, words)])
    return code, capsys.readouterr().out.splitlines()


def test_the_command_prints_a_table_and_goes_on_where_it_was_cut_off(tiny_lab, tmp_path, capsys):
    words = (tiny_lab.policy, "--dir", tmp_path, "--prompts", 3, "--rollouts", 3, "--continuations", 4)
    code, said = command(capsys, *words)
    assert code == 0
    lines = [
        line for line in said if line.startswith(("none, grpo ", "turn-group-v1d, alpha 0.3", "turn_gae"))
    ]
    assert len(lines) == 10 and not any("not measured" in line for line in lines)
    assert lines[2].startswith("turn_gae, true values, lam 0 ")
    home = tmp_path / "policy"
    values = (home / "values.jsonl").read_text()
    turns = [json.loads(line) for line in (home / "turns.jsonl").read_text().splitlines()]
    assert {(turn["prompt"], turn["trajectory"]) for turn in turns} == {
        (p, t) for p in range(3) for t in range(3)
    }
    values_by_context = {
        row["context"]: row["outcomes"].count("1") / 4 for row in map(json.loads, values.splitlines())
    }
    assert all(turn["value"] == values_by_context[turn["before"]] for turn in turns)
    assert all(0 < turn["gold_probability"] <= 1 and turn["brought"] in (True, False) for turn in turns)
    result = json.loads((tmp_path / "fidelity.json").read_text())
    (policy,) = result["policies"]
    assert (policy["turns"], policy["prompts"], policy["step"]) == (len(turns), 3, None)
    assert (tmp_path / "fidelity.html").read_text().count("data:image/svg") == 1
    assert {"run", "mode", "control"} >= {credit["kind"] for credit in policy["credits"].values()}
    assert "pearson" in policy["credits"]["brought a needed article"]  # the lab's data name them
    assert "none, grpo" in policy["credits"] and json.loads((home / "fidelity.json").read_text()) == result
    assert policy["gradients"] == policy["headroom"] == {}
    (home / "values.jsonl").write_text("\n".join(values.splitlines()[:2]) + "\n")
    assert command(capsys, *words)[0] == 0
    assert (home / "values.jsonl").read_text().splitlines()[:2] == values.splitlines()[:2]
    assert sorted((home / "values.jsonl").read_text().splitlines()) == sorted(values.splitlines())
    assert json.loads((tmp_path / "fidelity.json").read_text()) == result
    code, said = command(capsys, *words, "--seed", 1)
    assert code == 4 and "seed is 0, wanted 1" in said[-1]


def test_a_budget_of_minutes_leaves_whole_prompts_and_processes_do_not_change_values(
    tiny_lab, tmp_path, capsys
):
    words = (tiny_lab.policy, "--dir", tmp_path, "--prompts", 6, "--rollouts", 2, "--continuations", 2)
    code, said = command(capsys, *words, "--minutes", 1e-9, "--modes", "none,joint", "--parallel", 2)
    assert code == 0 and any("the first 4 of 6 prompts" in line for line in said)
    (policy,) = json.loads((tmp_path / "fidelity.json").read_text())["policies"]
    assert (policy["prompts"], policy["of_prompts"]) == (4, 6)
    assert {"none, grpo", "joint"} < set(policy["credits"]) and "separate" not in policy["credits"]
    assert not any("6 prompts, " in line for line in command(capsys, *words, "--parallel", 1)[1])
    whole, values = json.loads((tmp_path / "fidelity.json").read_text()), "policy/values.jsonl"
    before = set(multiprocessing.active_children())
    assert command(capsys, *words[:2], tmp_path / "again", *words[3:], "--parallel", 2)[0] == 0
    assert json.loads((tmp_path / "again/fidelity.json").read_text()) == whole
    alone, together = ((tmp_path / part / values).read_text().splitlines() for part in ("", "again"))
    assert sorted(alone) == sorted(together)
    assert set(multiprocessing.active_children()) == before


def test_gradients_of_the_same_credits_in_a_second_table(tiny_lab, tmp_path, capsys):
    words = (
        tiny_lab.policy,
        "--dir",
        tmp_path,
        "--prompts",
        3,
        "--rollouts",
        3,
        "--continuations",
        4,
        "--gradient",
    )
    assert command(capsys, *words, "--modes", "joint")[1][-1].endswith("add none to --modes")
    code, said = command(capsys, *words, "--modes", "none,joint")
    assert code == 0 and any(line.startswith("gradient of ") for line in said)
    (policy,) = json.loads((tmp_path / "fidelity.json").read_text())["policies"]
    made = {name for name, credit in policy["credits"].items() if "reason" not in credit}
    assert set(policy["gradients"]) == {*made, "Monte Carlo, all continuations"}
    assert policy["gradients"]["none, grpo"]["own"]["value"] is None  # fewer prompts than a batch
    answer = policy["headroom"]["says"]
    assert answer in said and answer in (tmp_path / "fidelity.html").read_text()
    assert "Not known, own cosine needs at least 18 questions" in answer
    assert (tmp_path / "fidelity.html").read_text().count("data:image/svg") == 2


OWN = """
def own_mode(tables):
    return tables.reward_B_K * 0 + 7.0, tables.outcome_B, tables.ones()

def even(rewards):
    return [r - sum(rewards) / len(rewards) + 3 for r in rewards]

def hops(group):
    return [[float(t.extra_info["hops"])] * len(t.tool_turns) for t in group.trajectories]
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "fidelity_own_mode.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "fidelity_own_mode"


def test_the_credit_of_the_run_has_its_own_mode_signal_and_outcome_operator(subject, groups, own_module):
    rows = [t for group in groups for t in group]
    batch = turn_batch(rows, subject.data)
    policy = PackedPolicy(subject.model)

    def credit(*overrides):
        config = load_config("lab", [f"lab.dir={subject.config.lab.dir}", *overrides])
        settings = CreditSettings.from_config(config)
        forward = PackedRows(policy)
        with policy.packing():
            return run_credit(batch, groups, settings, forward, subject.tokenizer, step=4, planned_steps=9)

    mode = "algorithm.info_gain_norm_mode"
    own_N = credit(f"{mode}={own_module}:own_mode").advantage_N
    assert own_N.tolist() == [one for row in rows for one in [7.0] * (len(row.steps) - 1) + [row.reward]]
    even_N = credit(f"{mode}=none", f"algorithm.advantage_mode={own_module}:even").advantage_N
    endings_N = np.cumsum([len(row.steps) for row in groups[0]]) - 1
    assert even_N[endings_N].sum() == pytest.approx(3 * len(groups[0]))
    signal = credit(f"{mode}=separate", f"algorithm.turn_signal={own_module}:hops")
    assert signal.reason == "" and signal.advantage_N is not None
    for overrides, why in [
        (["algorithm.turn_signal=tool_reward"], "no turn has a reward"),
        (["algorithm.transform_mode=grpo_s"], "gives credit to tokens"),
        (["algorithm.adv_estimator=grpo"], "is one of verl's own"),
    ]:
        assert why in credit(f"{mode}=separate", *overrides).reason


def test_a_runs_checkpoint_is_its_policy(subject, tiny_lab, tmp_path, capsys):
    actor = tmp_path / "run/checkpoints/global_step_3/actor"
    config = OmegaConf.merge(subject.config, {"run_dir": str(tmp_path / "run")})
    config.trainer.default_local_dir = str(tmp_path / "run/checkpoints")
    actor.parent.mkdir(parents=True)
    OmegaConf.save(config, tmp_path / "run/config.yaml", resolve=True)
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out")
    assert code == 4 and "no whole checkpoint in" in said[-1]
    subject.model.config.save_pretrained(actor / "huggingface")
    subject.tokenizer.save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    torch.save(dict(subject.model.state_dict()), actor / "model_world_size_1_rank_0.pt")
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out", "--steps", "0,2,3")
    assert (
        code == 4
        and len(said) == 1
        and "step 2 is not saved; " in said[-1]
        and said[-1].endswith(" has 0, 3")
    )
    model, _ = load_checkpoint(actor.parent)
    ids = torch.tensor([random.Random(0).choices(range(50), k=30)])
    assert torch.equal(model(ids).logits, subject.model(ids).logits)
    small = ("--prompts", 2, "--rollouts", 2, "--continuations", 2)
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out", *small)
    assert code == 0 and any("global_step_3" in line for line in said)
    assert any(line.startswith("this run: turn-group-v1d ") for line in said)
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "both", "--steps", "0,3", *small)
    assert code == 0
    start, third = json.loads((tmp_path / "both/fidelity.json").read_text())["policies"]
    assert (start["step"], start["policy"]) == (0, str(tiny_lab.policy))
    assert third == json.loads((tmp_path / "out/step_3/fidelity.json").read_text())["policies"][0]
    assert {k: v for k, v in third.items() if k not in ("step", "policy")} == {
        k: v for k, v in start.items() if k not in ("step", "policy")
    }  # the checkpoint has the same weights


def test_refused_in_one_line(tiny_lab, tmp_path, capsys):
    out = ("--dir", tmp_path / "out")
    for words, why in [
        ((tmp_path / "nothing",), "no such folder"),
        ((tmp_path,), "expected RUN/global_step_N of a run"),
        ((tiny_lab.policy, "--steps", "3"), "--steps 3: expected with a run's folder"),
        ((tiny_lab.policy, "--steps", "3,x"), "--steps 3,x: expected step numbers"),
        ((tiny_lab.policy, "--modes", "turn-grup"), "--modes turn-grup (did you mean turn-group?): expected"),
        ((tiny_lab.policy, "--modes", "no_such_module:f"), "cannot import 'no_such_module'"),
        ((tiny_lab.policy, "--minutes", "0"), "--minutes 0: expected more than 0"),
        ((tiny_lab.policy, "--prompts", 1000), "expected 1 to 64"),
        ((tiny_lab.policy, "--prompts", 1, "--continuations", 3), "expected an even number"),
        ((tiny_lab.policy, "--rollouts", 1), "expected at least 2"),
        ((tiny_lab.policy, "--lab", tmp_path), "expected a lab in"),
    ]:
        code, said = command(capsys, *words, *out)
        assert code == 4 and why in said[-1] and said[-1].startswith("verl-credit fidelity "), words
        assert len([line for line in said if not line.startswith("fidelity ")]) == 1
