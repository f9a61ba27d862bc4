"""The entropy probe's steps without workers: which updates, which rows, what the metrics say, and its share of the time."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verl_credit.config.keys import Probe
from verl_credit.credit.entropy_change import entropy_change
from verl_credit.credit.entropy_gradient import Tokens, entropy_gradient
from verl_credit.host.step import entropy_probe
from verl_credit.names import PROBE_GROUP, PROBE_PATH, PROBE_SCORE
from verl_credit.records.run.files import EVENTS, read_json_lines
from verl_credit.study.probe.prediction import predict

PROMPTS = [
    "f",
    "b",
    "e",
    "b",
    "a",
    "d",
    "c",
    "a",
    "e",
    "f",
    "pad",
]  # d and c have one rollout, the last row is padding
LENGTHS = [7, 3, 5, 6, 2, 4, 6, 5, 1, 3, 3]
ROWS, WIDTH, COUNTED = len(PROMPTS), max(LENGTHS), 10


def nested(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


class World:
    """Rows of a step, and what actors would say of them: log-probs and entropies at two points, derivatives along a step."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        draw = lambda: torch.rand(ROWS, WIDTH, generator=random, dtype=torch.float64)  # noqa: E731
        inside = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
        self.written = inside & (draw() < 0.8)
        self.written[:, 0] = True
        self.new = Tokens(-draw() * inside, draw() * inside)
        self.old = Tokens(
            self.new.log_prob_B_T - 0.1 * draw() * inside, (self.new.entropy_B_T + 0.1 * draw()) * inside
        )
        self.slope = Tokens(draw() - 0.5, draw() - 0.5)
        self.turns = SimpleNamespace(
            prompt_ids=[[1, 2]] * ROWS,
            response_ids=[[row] * n for row, n in enumerate(LENGTHS)],  # a token says whose row it is
            turn_ids_B_T=torch.where(self.written, 0, -1),
            row_valid_B=torch.arange(ROWS) < COUNTED,
        )

    def read(self, batch, *names, rows=None):
        rows = range(ROWS) if rows is None else rows
        cut = lambda values: nested([values[row, : LENGTHS[row]] for row in rows])  # noqa: E731
        whole = [[row] * LENGTHS[row] for row in rows]
        fields = {
            "old_log_probs": cut(self.new.log_prob_B_T), "entropy": cut(self.new.entropy_B_T), "responses": nested(whole),
            "prompts": nested([[1, 2]] * len(whole)), "input_ids": nested([[1, 2, *row] for row in whole]),
            "position_ids": nested([list(range(len(row) + 2)) for row in whole]),
            "response_mask": nested([[1] * len(row) for row in whole]),
            "loss_mask": nested([[1] * len(row) for row in whole]),
        }  # fmt: skip
        return TensorDict({name: fields[name] for name in names}, batch_size=len(whole))


class Actors:
    """The worker group: adds up what the weights say, in groups; ``row_s`` seconds a row."""

    def __init__(self, world, clock, ranks):
        self.world, self.clock, self._dispatch_info, self.kept = (
            world,
            clock,
            {"actor": list(range(ranks))},
            [],
        )
        self.row_s = 0.0

    def keep_parameters(self):
        self.kept.append("θ")

    def measure_update(self, data):
        assert data["temperature"] == 0.9
        self.clock.now += self.row_s * len(data)
        rows = [int(row[0]) for row in data["responses"].unbind()]
        groups = data[PROBE_GROUP].tolist()
        along = [[self._until(group, rows, groups, data), 16.0] for group in range(max(groups) + 1)]
        cut = lambda values: nested([values[row, : LENGTHS[row]].float() for row in rows])  # noqa: E731
        w = self.world
        fields = {
            "log_probs": cut(w.new.log_prob_B_T), "entropy": cut(w.new.entropy_B_T),
            "old_log_probs": cut(w.old.log_prob_B_T), "old_entropy": cut(w.old.entropy_B_T),
            "along": torch.tensor(along, dtype=torch.float64).expand(len(rows), -1, -1),
        }  # fmt: skip
        return TensorDict(fields, batch_size=len(rows))

    def _until(self, last, rows, groups, data):
        value = 0.0
        for n, (row, group) in enumerate(zip(rows, groups, strict=True)):
            if group <= last:
                for name, slope in ((PROBE_SCORE, "log_prob_B_T"), (PROBE_PATH, "entropy_B_T")):
                    weights = data[name].unbind()[n]
                    value += float((weights * getattr(self.world.slope, slope)[row, : len(weights)]).sum())
        return value


def make(tmp_path, monkeypatch, ranks=1, total=7, micro=None, **probe):
    world, clock = World(), SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    actor = SimpleNamespace(use_dynamic_bsz=micro is None, ppo_micro_batch_size_per_gpu=micro)
    rollout = SimpleNamespace(temperature=0.9)
    workers = SimpleNamespace(actor=actor, rollout=rollout)
    settings = Probe(**{"every": 2, "budget": 1.0, "groups": 2} | probe)
    monkeypatch.setattr(entropy_probe, "read_section", lambda *_: settings)
    made = entropy_probe.EntropyProbe(SimpleNamespace(run_dir=tmp_path, actor_rollout_ref=workers))
    probing = SimpleNamespace(
        probe=made, workers=Actors(world, clock, ranks), world=world, clock=clock, total=total
    )
    monkeypatch.setattr(entropy_probe, "time", clock)
    monkeypatch.setattr(entropy_probe.store, "read", world.read)
    monkeypatch.setattr(entropy_probe.store, "prompt_ids", lambda batch: PROMPTS)
    return probing


def run_step(probing, step, others_s=10.0):
    before, last = probing.clock.now, step >= probing.total
    metrics = probing.probe.before_update("batch", probing.world.turns, probing.workers, step=step, last=last)
    probing.clock.now += others_s
    probing.probe.finished(metrics, step, probing.clock.now - before)
    return metrics


def test_every_nth_update_is_measured_in_the_next_step(tmp_path, monkeypatch):
    probing = make(tmp_path, monkeypatch, total=6)
    rows = [run_step(probing, step) for step in range(1, 7)]
    assert [row.get("credit/probe/of_step") for row in rows] == [None, None, 2, None, 4, None]
    assert len(probing.workers.kept) == 2  # no step follows the last one
    assert not (tmp_path / EVENTS).exists()


def test_switched_off_it_does_nothing(tmp_path, monkeypatch):
    probing = make(tmp_path, monkeypatch, every=0)
    assert [run_step(probing, step) for step in range(1, 4)] == [{}, {}, {}]
    assert probing.workers.kept == []


@pytest.mark.parametrize("ranks, micro", [(1, None), (2, None), (2, 3)])
def test_on_all_prompts_it_is_the_probe_of_a_checkpoint(tmp_path, monkeypatch, ranks, micro):
    """The same gradient, prediction and truth as `verl_credit.study.probe` has of the rows that count; padding is no row."""
    probing = make(tmp_path, monkeypatch, ranks, micro=micro, every=1)
    assert run_step(probing, 1) == {}
    run_step(probing, 2)  # one prompt a group
    found, w = run_step(probing, 3), probing.world
    number = torch.tensor(["abcdef".index(name) for name in PROMPTS[:COUNTED]])
    new, old, slope = (
        Tokens(t.log_prob_B_T[:COUNTED], t.entropy_B_T[:COUNTED]) for t in (w.new, w.old, w.slope)
    )
    written = w.written[:COUNTED]
    gradient = entropy_gradient(new, written, number)
    truth = entropy_change(new, old, written, number)
    assert found["credit/probe/delta_h1"] == pytest.approx(predict(gradient, slope).slope, rel=1e-9)
    assert found["credit/probe/delta_h"] == pytest.approx(-truth.change, rel=1e-4)  # the actors' are float32
    assert found["credit/probe/delta_h_se"] == pytest.approx(truth.se, rel=1e-4)
    assert found["credit/probe/ess"] == pytest.approx(truth.ess, rel=1e-4)
    assert 0 < found["credit/probe/delta_h1_se"] < 10 and found["credit/probe/clipped"] == 0
    tokens = float((gradient.length_B * gradient.row_weight_B).sum() * 6)
    assert found["credit/probe/grad_norm"] == pytest.approx(4 / tokens)
    assert (found["credit/probe/prompts"], found["credit/probe/rows"]) == (6, COUNTED)


def test_the_first_takes_the_least_and_the_next_what_the_budget_holds(tmp_path, monkeypatch):
    probing = make(tmp_path, monkeypatch, every=1, budget=0.5)
    probing.workers.row_s = 2.0
    run_step(probing, 1)
    first = run_step(probing, 2)
    assert (first["credit/probe/prompts"], first["credit/probe/rows"]) == (2, 4)  # a and b
    assert first["credit/probe/time_s"] == 8.0 and first["credit/probe/time_share"] == pytest.approx(8 / 18)
    # 4 rows had 24 tokens, a third of a second each; a prompt has 62 / 6 of them: 3.4 s. 10 s hold two.
    assert run_step(probing, 3)["credit/probe/prompts"] == 2
    run_step(probing, 4, others_s=20.0)
    assert run_step(probing, 5, others_s=20.0)["credit/probe/prompts"] == 4
    assert not (tmp_path / EVENTS).exists()


def test_a_step_with_too_few_prompts_measures_nothing_and_says_so(tmp_path, monkeypatch):
    probing = make(tmp_path, monkeypatch, every=2, groups=7)
    run_step(probing, 2)
    assert run_step(probing, 3) == {}
    probing.world.turns.row_valid_B[:] = False
    run_step(probing, 4)
    assert run_step(probing, 5) == {}
    said = [row["text"] for row in read_json_lines(tmp_path / EVENTS)]
    text = "the update of step {} is not measured: step {} has valid rows of {} prompts, and probe.groups=7"
    assert said == [text.format(2, 3, 6), text.format(4, 5, 0)]
