"""verl's FSDP2 engine with prompts computed once, in float64: values and gradients are those of rows on their own."""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from kit.tiny_engine import Trajectories, batch, build_engine, infer, single_rank
from kit.tiny_models import tiny_model
from verl_credit.host.engine.fsdp import COMPUTED, SharedPromptEngine
from verl_credit.names import BRANCHES, SCORE_BRANCHES
from verl_credit.turns.score.branches import encode_branches

ROWS = [(5, 12), (4, 7), (5, 1), (5, 9), (4, 7), (3, 6), (5, 12)]
"""Prompt and response tokens: four rollouts of the first prompt, not neighbours; its last repeats its first."""
CASES = {  # case: (family, keys of the model, settings of the batch, whether it shares)
    "plain": ("qwen3", {}, {"temperature": 1.0}, True),
    "a temperature": ("qwen3", {}, {"temperature": 0.7}, True),
    "checkpointed": ("qwen3", {"enable_gradient_checkpointing": True}, {"temperature": 1.0}, True),
    "a window": ("mistral", {}, {"temperature": 1.0}, True),
    "an adapter": ("qwen3", {"lora_rank": 4, "target_modules": "all-linear"}, {"temperature": 1.0}, True),
    "temperatures of rows": ("qwen3", {}, {"temperature": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]}, False),
}


def rollouts() -> Trajectories:
    turns = Trajectories(ROWS)
    turns.prompt_ids[4] = turns.prompt_ids[1]
    turns.response_ids[6] = turns.response_ids[0]
    turns.response_ids[3][:4] = turns.response_ids[0][:4]
    return turns


def given(settings, **more):
    turns, settings = rollouts(), settings | more
    temperature = settings["temperature"]
    data = batch(turns, **settings | {"max_token_len_per_gpu": 256, "temperature": 1.0})

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    tu.assign_non_tensor_stack(
        data, "multi_modal_inputs", [{} for _ in ROWS]
    )  # as verl's trainer has it for texts
    data.pop("temperature")
    if isinstance(temperature, list):
        data["temperature"] = torch.tensor(temperature)
    else:
        tu.assign_non_tensor(data, temperature=temperature)
    data["prompts"], data["responses"] = nested(turns.prompt_ids), nested(turns.response_ids)
    return data


def response_parts(output, data):
    return {name: no_padding_2_padding(value, data) for name, value in output.items()}


def loss_of(model_output, data, dp_group=None):
    """Every response token with a weight of its own, so that exchanged rows would show."""
    total = 0.0
    for name, value_B_T in response_parts(model_output, data).items():
        weight = torch.linspace(0.5, 1.5, value_B_T.numel(), dtype=value_B_T.dtype).view_as(value_B_T)
        total = total + (weight * value_B_T).sum() * (1 if name == "log_probs" else 0.3)
    return total, {}


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Of these keys of the model: an engine in this process."""
    folder = tmp_path_factory.mktemp("models")

    def made(family="qwen3", **model):
        if not (folder / family).exists():
            tiny_model(family, attention="sdpa").save_pretrained(folder / family)
        options = {"enable_gradient_checkpointing": False} | model
        return build_engine(f"{folder}/{family}", precision="fp64", training=True, **options)

    with single_rank():
        yield made


@contextmanager
def tokens_of(engine):
    """[tokens], one number for every forward."""
    made = []
    hook = engine.module.register_forward_pre_hook(
        lambda _, __, inputs: made.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield made
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def measured(engine_of):
    """Of a case: {"shared" or "alone": what came out}."""

    @cache
    def of(case):
        family, model, settings, _ = CASES[case]
        engine = engine_of(family, **model)
        with mock.patch.object(SharedPromptEngine, "_shares", lambda *_: False):
            alone = outputs(engine, settings)
        return {"shared": outputs(engine, settings), "alone": alone}

    return of


def outputs(engine, settings):
    with tokens_of(engine) as tokens:
        found = {"values": response_parts(infer(engine, given(settings)), given(settings)), "share": []}
    found["tokens"] = sum(tokens)
    for entropy in (True, False):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            output = engine.forward_backward_batch(given(settings, calculate_entropy=entropy), loss_of)
            found["share"] += output["metrics"][COMPUTED]
            found["gradients", entropy] = {
                name: weight.grad.full_tensor().clone()
                for name, weight in engine.module.named_parameters()
                if weight.grad is not None
            }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_rows_alone(case, measured):
    shared, alone = measured(case)["shared"], measured(case)["alone"]
    assert shared["values"].keys() == alone["values"].keys() == {"log_probs", "entropy"}
    for name, value in alone["values"].items():
        torch.testing.assert_close(shared["values"][name], value, rtol=1e-9, atol=1e-9, msg=name)
    for entropy in (True, False):
        expected, found = alone["gradients", entropy], shared["gradients", entropy]
        assert found.keys() == expected.keys() and max(float(g.abs().max()) for g in expected.values()) > 1
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_shared_tokens_are_computed_once(case, measured):
    """Of 31 prompt tokens 5 + 4 + 3 are left; neither a repeated rollout costs anything nor 4 tokens of a common start."""
    rows = sum(p + r for p, r in ROWS)
    shares = CASES[case][-1]
    assert measured(case)["alone"]["tokens"] == rows
    computed = rows - (31 - 12) - 12 - 4 if shares else rows
    assert measured(case)["shared"]["tokens"] == computed
    assert measured(case)["shared"]["share"] == 2 * [computed / rows]
    assert measured(case)["alone"]["share"] == 2 * [1.0]


@pytest.fixture(scope="module")
def plain(engine_of):
    return engine_of()


def test_the_start_says_so(plain):
    assert plain.describe_log_probs().endswith("a prompt's rollouts share it within a micro-batch")


def computed(engine, data) -> int:
    with tokens_of(engine) as tokens:
        infer(engine, data)
    return sum(tokens)


def test_rows_with_answers_behind_them_are_computed_whole(plain):
    data = given({"temperature": 1.0})
    data[BRANCHES] = torch.nested.as_nested_tensor(
        [encode_branches([(2, [7, 8])]) for _ in ROWS], layout=torch.jagged
    )
    tu.assign_non_tensor(data, **{SCORE_BRANCHES: True})
    assert computed(plain, data) == sum(p + r + 2 for p, r in ROWS)


def test_rows_whose_logits_verl_reads_are_computed_whole(plain):
    """Distillation compares all logits of a row, and its outputs are made by verl."""
    data = given({"temperature": 1.0, "calculate_entropy": False, "calculate_sum_pi_squared": True})
    assert computed(plain, data) == sum(p + r for p, r in ROWS)
