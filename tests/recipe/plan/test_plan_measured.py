"""The plan against the allocator: a tiny actor's update and log-prob forward, measured (evidence/plan/measure_lab.py)."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl_credit.policy.attention import sdpa, varlen
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.recipe.plan import activations
from verl_credit.recipe.plan.activations import kept
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.update_memory import actor_peak

TINY = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "vocab_size": 512,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
ROWS, LENGTH = 4, 96


@pytest.fixture(scope="module")
def measure():
    path = Path(__file__).parents[3] / "evidence" / "plan" / "measure_lab.py"
    spec = importlib.util.spec_from_file_location("measure_lab", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_the_peak_of_an_update_and_of_a_log_prob_forward(measure, checkpointing, dtype):
    """20 % is asked for; wrong counts of single tensors would hide in that."""
    found = measure.compare(TINY, rows=ROWS, length=LENGTH, checkpointing=checkpointing, dtype=dtype)
    assert abs(found["update"]["off"]) < 0.08
    assert abs(found["log_prob"]["off"]) < 0.08


ATTENDING = {**TINY, "intermediate_size": 64, "vocab_size": 32}  # attention is what a forward holds most for


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length", "answers"), [(2, 256, 60), (1, 512, 100)])
def test_scored_answers_hold_no_more_than_their_budget(measure, rows, length, answers, dtype, monkeypatch):
    """A mask of 32,768 numbers at a time; without a budget it would have 400,000 and more."""
    model = measure.build(ATTENDING, dtype=dtype)
    shape, job = shape_of(ATTENDING), measure.job_of(model, rows=rows, length=length, checkpointing=False)
    found = []
    for budget in (2**24, 2**15):
        monkeypatch.setattr(sdpa, "MASK_NUMBERS", budget)
        monkeypatch.setattr(activations, "MASK_NUMBERS", budget)
        found.append(measure.compare_log_prob(model, shape, job, rows=rows, length=length, answers=answers))
    plain, bounded = found
    assert bounded["measured"] < 0.97 * plain["measured"]
    assert -0.05 < bounded["off"] < 0.15  # a second copy of the mask is planned, which a GPU may make
    assert -0.05 < plain["off"] < 0.5


def test_what_varlen_gathers_is_what_is_planned(measure, monkeypatch):
    """Keys and values of the answers, call by call."""
    held = []

    def call(q, k, v, *rest, **options):
        held.append(k.numel() * k.element_size() + v.numel() * v.element_size())
        return torch.zeros_like(q)

    row, answers, heads = 300, 40, {"heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = replace(shape_of(TINY), **heads)
    job = replace(Job(max_prompt=row, log_prob_tokens=row), compute_bytes=4, attention="flash")
    pack = pack_rows([row], [[(row - i, 2) for i in range(answers)]])
    for budget in (2**16, 1000, 100):  # all at once, by threes, one by one
        monkeypatch.setattr(varlen, "KEY_TOKENS", budget)
        monkeypatch.setattr(activations, "KEY_TOKENS", budget)
        held.clear()
        query, key = torch.zeros(1, 4, pack.length, 32), torch.zeros(1, 2, pack.length, 32)
        varlen.varlen(query, key, key, pack, scaling=1.0, call=call)
        planned = activations.answers_attention(shape, job, answers=2 * answers)
        assert max(held[1:]) <= planned + 2 * 2 * 64 * 4  # the tokens of one answer
        assert len(held) == 1 + {2**16: 1, 1000: 14, 100: 40}[budget]


@pytest.mark.slow
def test_one_micro_batch(measure):
    """Without accumulation the loss meets no gradients."""
    model = measure.build(TINY)
    shape = shape_of(TINY)
    job = measure.job_of(model, rows=ROWS, length=LENGTH, checkpointing=False, micro_batches=1)
    measured = measure.tensor_peak(
        model, lambda: measure.updates(model, rows=ROWS, length=LENGTH, micro_batches=1)
    )
    assert actor_peak(shape, job) == pytest.approx(measured, rel=0.08)


def saved_bytes(model) -> int:
    """Bytes that autograd saves in a forward of the layers, weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # no address is used twice
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids, pack = torch.arange(3, 3 + ROWS * LENGTH), pack_rows([LENGTH] * ROWS)
    given = {
        "input_ids": ids[None],
        "position_ids": pack.position_ids()[None],
        PACK: pack,
        "use_cache": False,
    }
    model.model(**given)  # the kernel's trial saves tensors of its own
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(**given)
    return sum(saved.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_the_backward(measure, family, dtype):
    """Storages that autograd saves, weights left out: the peak alone would hardly show one tensor too many."""
    config = {**TINY, "model_type": family}
    model = measure.build(config, dtype=dtype)
    saved = saved_bytes(model)
    job = measure.job_of(model, rows=ROWS, length=LENGTH, checkpointing=False)
    assert kept(shape_of(config), job) == pytest.approx(saved, rel=0.03)
