"""On a tiny lab: trajectories of the lab's own evaluation, gains of the project's own definition, and the command."""

import json
import random

import pytest
import torch
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.config.settings import CreditSettings
from verl_credit.fidelity.credit import PolicyForward, tables_of
from verl_credit.fidelity.measure import sample_groups
from verl_credit.fidelity.rollout import Start, roll
from verl_credit.fidelity.rows import turn_batch
from verl_credit.fidelity.subject import load_checkpoint, load_policy, make_subject
from verl_credit.generation.generator import BatchGenerator
from verl_credit.lab.config import SIZES
from verl_credit.lab.evaluate import Roller
from verl_credit.lab.questions import make_splits
from verl_credit.lab.retrieval import LocalRetriever
from verl_credit.lab.world import make_world

pytestmark = pytest.mark.slow  # a lab is trained


@pytest.fixture(scope="module")
def subject(tiny_lab):
    config = load_config("lab", [f"lab.dir={tiny_lab.root}", "credit=paper"])
    return make_subject(
        "lab", config, *load_policy(tiny_lab.policy), questions=tiny_lab.test, lab=tiny_lab.root, prompts=24
    )


@pytest.fixture(scope="module")
def groups(subject):
    return sample_groups(subject, rollouts=3, seed=0)


def test_greedy_trajectories_are_those_of_the_labs_evaluation(subject, tiny_lab):
    questions = make_splits(make_world(5, SIZES["tiny"].world), SIZES["tiny"].world, 5)["test"]
    assert [question.text for question in questions] == subject.questions
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


def test_batches_are_those_of_the_trainer(subject, groups):
    batch = turn_batch([t for group in groups for t in group], subject.truths)
    flat = [t for group in groups for t in group]
    assert batch.n_turns_B.tolist() == [len(t.steps) for t in flat]
    for row, trajectory in enumerate(flat):
        ids, turns = batch.response_ids[row], batch.turn_ids_B_T[row].tolist()
        for number, step in enumerate(trajectory.steps):
            assert tuple(t for t, k in zip(ids, turns, strict=False) if k == number) == step.turn_ids
            begin = turns.index(number)
            assert (*batch.prompt_ids[row], *ids[:begin]) == step.state.ids
    assert batch.ground_truths[3] == subject.truths[1]


def test_gains_are_the_projects(subject, groups):
    """prob_diff of ` <answer> gold</answer>`'s gold tokens, by one forward of each context alone."""
    settings = CreditSettings.from_config(subject.config)
    forward = PolicyForward(subject.model, subject.tokenizer.pad_token_id, rows_at_once=7)
    batch = turn_batch([t for group in groups for t in group], subject.truths)
    tables = tables_of(batch, groups, settings, forward, subject.tokenizer)
    generator = BatchGenerator(subject.model, pad_token_id=0)
    head, encode = "<answer>", subject.tokenizer.encode

    def p(state):
        gold = subject.truths[state.question]["target"][0]
        answer = encode(f"{head} {gold}</answer>", add_special_tokens=False)
        n_head = len(encode(head, add_special_tokens=False))
        n = len(answer) - n_head - 1  # the closing tag is one token
        log_probs = generator.prompt_log_probs([*state.ids, *answer])[len(state.ids) - 1 :]
        return torch.tensor(log_probs[n_head : n_head + n]).double().mean().exp().item()

    compared = 0
    for row, trajectory in enumerate([t for group in groups for t in group][:12]):
        for k, step in enumerate(trajectory.steps[:-1]):
            assert tables.has_reward_B_K[row, k]
            assert float(tables.reward_B_K[row, k]) == pytest.approx(p(step.next) - p(step.state), abs=1e-5)
            compared += 1
        assert not tables.has_reward_B_K[row, len(trajectory.steps) - 1 :].any()
    assert compared > 3


def command(capsys, *words):
    code = main(["fidelity", *map(str, words)])
    return code, capsys.readouterr().out.splitlines()


def test_the_command_prints_a_table_and_goes_on_where_it_was_cut_off(tiny_lab, tmp_path, capsys):
    words = (tiny_lab.policy, "--dir", tmp_path, "--prompts", 3, "--rollouts", 3, "--continuations", 4)
    code, said = command(capsys, *words)
    assert code == 0
    lines = [line for line in said if line.startswith(("none ", "turn-group-v1d, alpha 0.3", "turn_gae"))]
    assert len(lines) == 3 and "not measured: it needs values" in lines[-1]
    values = (tmp_path / "values.jsonl").read_text()
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert {turn["prompt"] for turn in turns} == {0, 1, 2} and {turn["trajectory"] for turn in turns} == {
        0,
        1,
        2,
    }
    result = json.loads((tmp_path / "fidelity.json").read_text())
    assert result["turns"] == len(turns) and "none" in result["modes"]
    (tmp_path / "values.jsonl").write_text("\n".join(values.splitlines()[:2]) + "\n")
    assert command(capsys, *words)[0] == 0
    assert (tmp_path / "values.jsonl").read_text().splitlines()[:2] == values.splitlines()[:2]
    assert sorted((tmp_path / "values.jsonl").read_text().splitlines()) == sorted(values.splitlines())
    assert json.loads((tmp_path / "fidelity.json").read_text()) == result
    code, said = command(capsys, *words, "--seed", 1)
    assert code == 4 and "seed is 0, wanted 1" in said[-1]


def test_a_runs_checkpoint_is_its_policy(subject, tiny_lab, tmp_path, capsys):
    actor = tmp_path / "run/checkpoints/global_step_3/actor"
    subject.model.config.save_pretrained(actor / "huggingface")
    subject.tokenizer.save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 1}))
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-9)
    torch.save(dict(subject.model.state_dict()), actor / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), actor / "optim_world_size_1_rank_0.pt")
    config = OmegaConf.merge(subject.config, {"run_dir": str(tmp_path / "run")})
    config.trainer.default_local_dir = str(tmp_path / "run/checkpoints")
    OmegaConf.save(config, tmp_path / "run/config.yaml", resolve=True)
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out")
    assert code == 4 and "no checkpoint in" in said[-1]
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out", "--step", 2)
    assert code == 4 and "step 2 is not saved" in said[-1] and len(said) == 1
    model, _ = load_checkpoint(actor.parent)
    ids = torch.tensor([random.Random(0).choices(range(50), k=30)])
    assert torch.equal(model(ids).logits, subject.model(ids).logits)
    small = ("--prompts", 2, "--rollouts", 2, "--continuations", 2)
    code, said = command(capsys, tmp_path / "run", "--dir", tmp_path / "out", *small)
    assert code == 0 and any("global_step_3" in line for line in said)


def test_refused_in_one_line(tiny_lab, tmp_path, capsys):
    out = ("--dir", tmp_path / "out")
    for words, why in [
        ((tmp_path / "nothing",), "no such folder"),
        ((tmp_path,), "expected RUN/global_step_N of a run"),
        ((tiny_lab.policy, "--step", 3), "this is a policy, which has no steps"),
        ((tiny_lab.policy, "--prompts", 1000), "expected 1 to 64"),
        ((tiny_lab.policy, "--prompts", 1, "--continuations", 3), "expected an even number"),
        ((tiny_lab.policy, "--rollouts", 1), "expected at least 2"),
        ((tiny_lab.policy, "--lab", tmp_path), "expected a lab in"),
    ]:
        code, said = command(capsys, *words, *out)
        assert code == 4 and why in said[-1] and said[-1].startswith("verl-credit fidelity "), words
        assert len([line for line in said if not line.startswith("fidelity ")]) == 1
