"""A measurement's subject behind a run: what is kept, what is refused; its rollouts are made up."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from kit.recipes import load_config
from kit.tiny_models import tiny_model
from verl_credit.errors import IntegrityError
from verl_credit.host.measuring_run import MeasuringTrainer, RunSubject, load_model, questions_of
from verl_credit.host.step.measured_rows import Row
from verl_credit.study.fidelity.gradients import turn_gradients
from verl_credit.study.fidelity.request import ROLLOUTS, Request
from verl_credit.study.fidelity.result import Result, as_dict
from verl_credit.study.fidelity.true_values import Value, score_turns, states_of, values_of
from verl_credit.study.stats import Measure
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Start
from verl_credit.worlds.rollouts.sampler import digest

CONFIG = OmegaConf.create(
    {
        "data": {"train_files": "train.parquet", "val_files": "test.parquet"},
        "actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "mine"}}},
    }
)


class Rollouts:
    """Two turns, token 10 + question, then 20; the tool says 30. Every other one is right."""

    def __init__(self):
        self.asked, self.replayed, self.tool, self.prompt = [], None, 30, lambda question: [1, question]

    def __call__(self, wanted):
        for one in wanted:
            self.asked.append((one.question, one.count, one.name, [list(turn) for turn in one.turns]))
            yield [self._row(one, number) for number in range(one.count)]

    def _row(self, one, number):
        replayed = len(one.turns) if self.replayed is None else self.replayed
        return Row(
            question=one.question,
            prompt_ids=self.prompt(one.question),
            response_ids=[10 + one.question, self.tool, 20],
            turn_ids=[0, -1, 1],
            record=RowRecord(replayed=replayed).as_dict(),
            scores={},
            turn_rewards=[None],
            outcome=float(number % 2),
        )


@pytest.fixture
def made(tmp_path):
    """Of a new subject in the same folder: (it, its rollouts)."""

    def make(prompts=3, split="train"):
        data = [{"reward_model": {"ground_truth": str(n)}, "extra_info": {}} for n in range(4)]
        request = Request(
            out=str(tmp_path), prompts=prompts, rollouts=4, continuations=4, split=split, name="step_5", policy="p",
            step=5, about={"engine": "run"}, folder=".",
        )  # fmt: skip
        data, rollouts = questions_of(request, CONFIG, data, data[:2]), Rollouts()
        return RunSubject(request, CONFIG, None, data, rollouts, None), rollouts

    return make


def test_a_result_says_which_engine_it_was_measured_with(made):
    subject, _ = made()
    groups = subject.roll(starts(subject))
    values = {name: Value(name, "10") for name in (digest(state.ids) for state in states_of(groups))}
    result = Result(
        groups=groups, turns=score_turns(groups, values), values=values, credits=[], gradients={},
        of_prompts=3, reliability=Measure(None), sure_pairs=(0, 0), headroom={},
    )  # fmt: skip
    said = as_dict(subject, result)
    assert (said["policy"], said["step"], said["engine"]) == (subject.name, 5, "run")
    assert subject.about() == {"engine": "run"}
    assert subject.prompts == [State(question, 0, ()) for question in range(3)]


def starts(subject, name="rollout"):
    return [Start(state, 4, 0, name) for state in subject.prompts]


@pytest.mark.parametrize("step", [0, 5])
def test_the_gradients_of_its_turns_are_those_of_the_policy_in_its_folder(made, tmp_path, monkeypatch, step):
    """Read by what the step has: Hugging Face's folder at the start, verl's checkpoint afterwards."""
    model, read = tiny_model("qwen3", "sdpa", num_hidden_layers=1), []
    for name in ("load_policy", "load_checkpoint"):
        loaded = lambda folder, name=name: read.append((name, folder)) or (model, None)  # noqa: E731
        monkeypatch.setattr(f"verl_credit.study.fidelity.subject.{name}", loaded)
    subject, _ = made()
    subject.model = load_model(Request(str(tmp_path), 3, 4, 4, policy="here", step=step))
    assert read == [("load_checkpoint" if step else "load_policy", Path("here"))]
    paths = subject.roll(starts(subject))[1]
    found = turn_gradients(subject.model, paths)
    assert list(found) == [((1, 1), (11,)), ((1, 1, 11, 30), (20,))]


def test_rollouts_are_kept_and_more_prompts_can_be_added(made, tmp_path):
    subject, rollouts = made()
    groups = subject.roll(starts(subject))
    assert [question for question, *_ in rollouts.asked] == [0, 1, 2]
    again, nothing = made(prompts=4)
    assert again.roll(starts(again))[:3] == groups
    assert [question for question, *_ in nothing.asked] == [3]
    assert len((tmp_path / ROLLOUTS).read_text().splitlines()) == 4
    other, new = made()
    other.roll(starts(other, "replicate"))
    assert len(new.asked) == 3


def test_contexts_are_rolled_out_behind_their_turns_by_numbers_of_their_own(made):
    subject, rollouts = made(prompts=2)
    groups = subject.roll(starts(subject))
    names = {name for _, _, name, _ in rollouts.asked}
    rollouts.asked.clear()
    found = values_of(states_of(groups), subject.roll, continuations=4, seed=0)
    assert [(question, turns) for question, _, _, turns in rollouts.asked] == [
        (0, []), (0, [[10]]), (1, []), (1, [[11]]),
    ]  # fmt: skip
    asked = {name for _, _, name, _ in rollouts.asked}
    assert len(asked) == 4 and not asked & names
    assert all(value.outcomes == "0101" and value.otherwise == 0 for value in found.values())


def test_other_answers_of_the_tool_are_counted(made):
    subject, rollouts = made(prompts=1)
    groups = subject.roll(starts(subject))
    rollouts.tool = 31
    found = values_of(states_of(groups), subject.roll, continuations=4, seed=0)
    assert sorted(value.otherwise for value in found.values()) == [
        0,
        4,
    ]  # the prompt's own context has no answer in it


@pytest.mark.parametrize("says", [-1, 1])
def test_an_agent_loop_that_knows_nothing_of_turns_that_stand_is_named(made, says):
    subject, rollouts = made()
    rollouts.replayed = says
    with pytest.raises(IntegrityError, match="agent loop \\(mine, "):
        subject.roll(starts(subject))


def test_one_prompt_with_two_answers_is_refused(made):
    subject, rollouts = made()
    rollouts.prompt = lambda question: [1, 0]
    with pytest.raises(IntegrityError, match="questions 0 and 1 of the data"):
        subject.roll(starts(subject))


def test_too_many_prompts_are_refused_with_the_file(made):
    with pytest.raises(IntegrityError, match="--prompts 3: test.parquet \\(data.val_files\\) has 2"):
        made(split="test")


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
    made = MeasuringTrainer(load_config("lab", [f"run_dir={tmp_path}"]))
    made.global_steps, made.total_training_steps, made.actor_rollout_wg = 5, 40, "workers"
    return made


def test_a_start_without_a_request_is_refused(trainer, tmp_path):
    with pytest.raises(IntegrityError, match=f"credit_fidelity: {tmp_path} has no "):
        trainer.fit(None)


def test_its_forward_is_the_trainers_while_the_engine_sleeps(trainer):
    slept = []
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: slept.append(True))
    assert (trainer._forward().workers, slept) == ("workers", [True])
