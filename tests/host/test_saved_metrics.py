"""A run may end between saving a step and writing its metrics: the same command writes them as they would have been."""

import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from kit.recipes import load_config
from kit.settings import settings
from verl_credit.credit.token.sepa_controller import SepaController
from verl_credit.credit.turn.values import States
from verl_credit.host.step.entropy_probe import EntropyProbe
from verl_credit.host.step.recorded import Recorder
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.host.step.v1_host import V1Host
from verl_credit.records.run.events import STAGE
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, VALUES, append_json, read_json_lines
from verl_credit.turns.step.step import state_of
from verl_credit.turns.step.turn_values import TurnValues

STEP, HELD_OUT = 3, {"val-core/lab-greedy/em/mean@1": 0.25}
UPDATE = {"actor/grad_norm": 0.5, "credit/outcome/em": 0.75}


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


ROWS = TensorDict(
    {
        "prompts": nested([1, 2], [3]),
        "responses": nested([4, 5, 6], [7, 8]),
        "response_mask": nested([1, 1, 1], [1, 1]),
        "advantages": nested([0.5, 0.5, 0.5], [-1.0, -1.0]),
        "returns": nested([0.5, 0.5, 0.5], [-1.0, -1.0]),
        "rm_scores": nested([0.0, 0.0, 1.0], [0.0, 0.0]),
        "num_turns": torch.tensor([2, 4]),
    },
    batch_size=2,
)


class Recorded(CreditSteps, PPOTrainerSync):
    """Before verl's synchronous trainer."""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_base.tq, "kv_batch_get", lambda **_: ROWS.clone())
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing_raw: metrics.pop("batch"))
    for name in ("_save_checkpoint", "_load_checkpoint"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self: None)

    def make(step):
        made = object.__new__(Recorded)
        folder = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
        made.config = load_config("lab", [f"run_dir={tmp_path}", folder])
        made.recorder, made.probe = Recorder(made.config), EntropyProbe(made.config)
        made.host, made.credit = V1Host(made.config, None, None), run_with(None)
        made.ahead, made.actor_rollout_wg, made.use_critic, made.steps_per_epoch = None, None, False, 2
        made.total_training_steps, made.global_steps = 4, step
        made._enter(None, {})
        made.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        made._rollout_moe_lb_metrics_accumulator = []
        return made

    return make


def run_with(controller=None, values=None):
    stage = controller and SimpleNamespace(controller=controller)
    return SimpleNamespace(stage=stage, values=values)


def alarms(tmp_path):
    return [row for row in read_json_lines(tmp_path / EVENTS) if row["kind"] != STAGE]


def finish(trainer, metrics):
    trainer._enter(None, metrics)
    trainer.recorder.finished(trainer.host, metrics, {}, last=False)


def saved(trainer):
    """(A trainer that has saved its step, the batch, its metrics)."""
    tag = {"min_global_steps": STEP - 1, "max_global_steps": STEP - 1}
    batch = SimpleNamespace(keys=["a", "b"], partition_id="train", tags=[tag, tag])
    first, metrics = trainer(STEP), UPDATE | {"batch": batch}
    first.step(metrics, {})
    first.host.keep(None)
    first._save_checkpoint()
    return first, batch, metrics


def go_on(trainer):
    again = trainer(STEP)
    again._load_checkpoint()
    again.global_steps += 1
    again.on_train_begin()


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("scores", [{}, {"critic/score/mean": 0.25}], ids=["verls", "of-sessions"])
def test_a_step_that_was_saved_and_not_recorded_is_recorded_by_the_next_run(
    tmp_path, trainer, monkeypatch, scores
):
    monkeypatch.setattr(CreditSteps, "_scores", scores)
    undisturbed, batch, metrics = saved(trainer)
    append_json(tmp_path / VALIDATION, {"step": STEP} | HELD_OUT)
    go_on(trainer)  # as if the first had ended there
    (restored,) = rows_of(tmp_path)

    timing = {"step": 2.0, "gen": 1.0}
    metrics.update(HELD_OUT)
    undisturbed._compute_metrics(batch, metrics, timing, STEP, (STEP - 1) // 2)
    written = rows_of(tmp_path)[-1]
    of_time = {name for name in written if name.startswith(("timing_", "perf/"))}
    assert of_time and not of_time & restored.keys()
    assert restored == {name: value for name, value in written.items() if name not in of_time}
    assert restored["critic/score/mean"] == scores.get("critic/score/mean", 0.5)
    assert restored["training/epoch"] == 1  # verl's, after saving
    assert restored["val-core/lab-greedy/em/mean@1"] == 0.25 and restored["credit/outcome/em"] == 0.75


@pytest.mark.slow
def test_a_step_that_was_recorded_stays_as_it_is(tmp_path, trainer):
    saved(trainer)
    append_json(tmp_path / METRICS, {"step": STEP, "credit/outcome/em": 0.75, "timing_s/step": 2.0})
    go_on(trainer)
    assert rows_of(tmp_path) == [{"step": STEP, "credit/outcome/em": 0.75, "timing_s/step": 2.0}]


@pytest.mark.slow
def test_a_ramp_goes_on_where_the_checkpoint_left_it(trainer):
    """SEPA's gate, once open, stays open: the state is in the checkpoint, and a run without one has none to load."""

    first, _, _ = saved(trainer)
    controller = SepaController(correct_rate_gate=0.5)
    controller.observe(STEP, 0.75, torch.rand(4))
    first.host.keep(state_of(run_with(controller)))
    first._save_checkpoint()
    again, fresh = trainer(STEP), SepaController(correct_rate_gate=0.5)
    again.credit = run_with(fresh)
    assert not fresh.gate_open
    again._load_checkpoint()
    assert fresh.gate_open and fresh.state_dict() == controller.state_dict()


@pytest.mark.slow
def test_values_go_on_with_the_steps_that_the_checkpoint_has(tmp_path, trainer):
    def values():
        return TurnValues(settings(info_gain_norm_mode="turn_gae", turn_values="group"))

    first, _, _ = saved(trainer)
    fitted, fresh = values(), values()
    target_N = torch.tensor([1.0, 0, float("nan")]).double()
    states = States(torch.rand(3, 12).double(), target_N, torch.arange(3))
    fitted._replay.append(states)
    first.host.keep(state_of(run_with(values=fitted)))
    first._save_checkpoint()
    assert (tmp_path / "checkpoints" / f"global_step_{STEP}" / VALUES).exists()
    again = trainer(STEP)
    again.credit = run_with(values=fresh)
    again._load_checkpoint()
    (restored,) = fresh._replay
    for name, table in vars(states).items():
        assert torch.equal(getattr(restored, name).nan_to_num(9), table.nan_to_num(9))


def test_an_alarm_is_an_event_once_a_start_with_half_of_the_runs_learning_rate(tmp_path, trainer):
    running = trainer(0)
    for running.global_steps in range(1, 21):
        finish(
            running, {"actor/entropy": 0.2 if running.global_steps <= 10 else 2.0, "critic/score/mean": 0.5}
        )
    (event,) = alarms(tmp_path)
    assert event["kind"] == "entropy_explodes" and event["text"].startswith("warning: in step 12 ")
    assert f"actor_rollout_ref.actor.optim.lr={5e-4 / 2:g} " in event["text"]

    resumed = trainer(20)  # a start that goes on has five steps of its own before the same alarm
    for resumed.global_steps in range(21, 26):
        finish(resumed, {"actor/entropy": 2.0, "critic/score/mean": 0.5})
    assert [row["text"][:25] for row in alarms(tmp_path)][1:] == ["warning: in step 25 entro"]
