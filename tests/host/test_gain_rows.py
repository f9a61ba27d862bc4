"""Scoring by rows: the mean log-prob of the gold tokens is that of the policy, read one row at a time."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from kit.recipes import load_config
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.host.step.store import score_rows
from verl_credit.turns.score.requests import PseudoAnswer, context_ends
from verl_credit.turns.score.scorers import ScoreRow

VOCAB = 11
PARIS = PseudoAnswer((1, 2, 7, 8, 9, 3), gold_start=2, gold_end=5)
ROME = PseudoAnswer((1, 2, 6, 3), gold_start=2, gold_end=3)


def log_prob(ids, place):
    """Of a token: a number that depends on it, on all tokens before it, and on their places."""
    return -sum((j + 1) * (token + 1) ** 0.5 for j, token in enumerate(ids[: place + 1])) / 100


def mean_gold_log_prob(row):
    begin, whole = len(row.context_ids), row.context_ids + row.answer.token_ids
    asked = range(begin + row.answer.gold_start, begin + row.answer.gold_end)
    return sum(log_prob(whole, place) for place in asked) / len(asked)


class Workers:
    """verl's actor workers: the batch is split over them evenly, and each computes its rows.

    What comes back is nested like ``input_ids``: position j holds the log-prob of token j + 1, and the last
    position of a row is nobody's (NaN here).
    """

    def __init__(self, dp_size=1):
        self.dp_size, self.batches = dp_size, []

    def __call__(self, batch):
        self.batches.append(batch)
        shards = tu.chunk_tensordict(batch, self.dp_size)
        return tu.concat_tensordict([self._shard(shard) for shard in shards])

    def _shard(self, shard):
        rows = [ids.tolist() for ids in shard["input_ids"].unbind()]
        values = [[*(log_prob(ids, place) for place in range(1, len(ids))), math.nan] for ids in rows]
        found = nested([torch.tensor(row, dtype=torch.float64) for row in values])
        return TensorDict({"log_probs": found}, batch_size=len(rows))

    @property
    def contexts(self):
        """Contexts of the last batch, padding included, in the order they were sent."""
        return [tuple(ids.tolist()) for ids in self.batches[-1]["prompts"].unbind()]


def rows_of(count, seed=0):
    """Contexts of different lengths, shortest 1, with either answer behind them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, *torch.randint(2, 40, (count - 1,), generator=generator).tolist()]
    contexts = [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [ScoreRow(context, (PARIS, ROME)[i % 2]) for i, context in enumerate(contexts)]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_scores_are_those_of_the_policy_row_by_row(dp_size):
    rows = rows_of(7)
    scores = score_rows(Workers(dp_size), rows, dp_size=dp_size)
    assert scores.dtype == torch.float64 and scores.shape == (7,)
    assert scores.tolist() == pytest.approx([mean_gold_log_prob(row) for row in rows], rel=1e-12)
    assert scores.std() > 0.1  # the rows differ, so their order was seen


def test_the_mean_is_taken_in_float64():
    """The sum of these three float32 log-probs is no float32 number."""

    def first_is_large(batch):
        values = torch.full((len(batch["input_ids"].values()),), -1.0)
        values[4] = -(2.0**25)
        found = torch.nested.nested_tensor_from_jagged(values, batch["input_ids"].offsets())
        return TensorDict({"log_probs": found}, batch_size=1)

    got = score_rows(first_is_large, [ScoreRow((0, 0, 0), PARIS)], dp_size=1)
    assert got.item() == -(2.0**25 + 2) / 3


def test_identical_rows_are_scored_once():
    first, second, third = rows_of(3)
    workers = Workers()
    scores = score_rows(workers, [first, second, first, third, second, first], dp_size=1)
    assert workers.contexts == [row.context_ids for row in (first, second, third)]
    expected = [mean_gold_log_prob(row) for row in (first, second, third)]
    assert scores[[0, 1, 3]].tolist() == pytest.approx(expected)
    assert torch.equal(scores[[2, 4, 5]], scores[[0, 1, 0]])


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_padding_for_the_workers_changes_neither_values_nor_order(dp_size, count):
    workers, rows = Workers(dp_size), rows_of(count)
    padded = score_rows(workers, rows, dp_size=dp_size)
    assert torch.equal(padded, score_rows(Workers(), rows, dp_size=1))
    sent = workers.contexts
    assert len(sent) % dp_size == 0 and len(sent) - count < dp_size
    assert sent[:count] == [row.context_ids for row in rows]


class StaticWorkers(Workers):
    """Each rank divides its rows into micro-batches of a fixed size, by verl's own rule."""

    micro_batch = 4

    def _shard(self, shard):
        data = shard.copy()
        tu.assign_non_tensor(
            data, use_dynamic_bsz=False, micro_batch_size_per_gpu=self.micro_batch, sp_size=1
        )
        micro_batches, _ = prepare_micro_batches(data)
        return tu.concat_tensordict([super(StaticWorkers, self)._shard(one) for one in micro_batches])


@pytest.mark.parametrize("dp_size, count", [(1, 7), (2, 7), (2, 9), (2, 16)])
def test_rows_fill_micro_batches_of_a_fixed_size(dp_size, count):
    workers, rows = StaticWorkers(dp_size), rows_of(count)
    scores = score_rows(workers, rows, dp_size=dp_size, micro_batch=4)
    assert torch.equal(scores, score_rows(Workers(), rows, dp_size=1))
    assert len(workers.contexts) - count < 4 * dp_size


@pytest.mark.parametrize("dynamic, micro_batch", [("false", 4), ("true", 1)])
def test_the_trainer_says_how_its_workers_divide_rows(monkeypatch, dynamic, micro_batch):
    from verl_credit.host.step import store
    from verl_credit.host.step.v1_host import score_rows

    asked = {}
    monkeypatch.setattr(store, "score_rows", lambda compute, rows, **how: asked.update(how))
    size = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"
    static = [
        f"actor_rollout_ref.{key}={dynamic}"
        for key in ("actor.use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz")
    ]
    workers = SimpleNamespace(compute_log_prob=None, _dispatch_info={"actor": [0, 0, 1, 1]})
    score_rows(workers, load_config("lab", [*static, size]), [])
    assert asked == {"dp_size": 2, "micro_batch": micro_batch, "adapter": True}


def test_what_is_asked_of_the_workers():
    workers = Workers()
    score_rows(workers, rows_of(3), dp_size=1)
    (batch,) = workers.batches
    asked = {name: tu.get(batch, name) for name in ("calculate_entropy", "compute_loss", "temperature")}
    assert asked == {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
    names = ("input_ids", "position_ids", "prompts", "responses", "loss_mask")
    for row, places, prompt, response, mask in zip(*(batch[name].unbind() for name in names), strict=True):
        assert places.tolist() == list(range(len(row)))
        assert torch.equal(row, torch.cat([prompt, response]))
        assert mask.tolist() == [1] * len(response)


def test_tokens_inside_a_turn_that_are_not_the_policys_do_not_end_its_context():
    turn_ids = [-1, 0, -1, 0, -1, -1, 1]
    assert context_ends(turn_ids, "call") == [4]
    assert context_ends(turn_ids, "observation") == [6]
