"""verl's FSDP2 engine with prompts computed once, in float64: values and gradients are those of rows on their own."""

import pytest
import torch

from kit.tiny_engine import Trajectories, batch, build_engine, gloo_rank, infer, on_ranks
from kit.tiny_models import tiny_model
from verl_credit.turns.branches import encode_branches

pytestmark = pytest.mark.slow

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

    from verl.utils import tensordict_utils as tu

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
    from verl.workers.utils.padding import no_padding_2_padding

    return {name: no_padding_2_padding(value, data) for name, value in output.items()}


def loss_of(model_output, data, dp_group=None):
    """Every response token with a weight of its own, so that exchanged rows would show."""
    total = 0.0
    for name, value_B_T in response_parts(model_output, data).items():
        weight = torch.linspace(0.5, 1.5, value_B_T.numel(), dtype=value_B_T.dtype).view_as(value_B_T)
        total = total + (weight * value_B_T).sum() * (1 if name == "log_probs" else 0.3)
    return total, {}


def rank_main(rank, ranks, folder, store, results):
    from verl_credit.host.engine import shared_prompt_engine as module

    with gloo_rank(rank, ranks, store):
        shares = module.SharedPromptEngine._shares
        for case, (family, model, settings, _) in CASES.items():
            options = {"enable_gradient_checkpointing": False} | model
            engine = build_engine(f"{folder}/{family}", precision="fp64", training=True, **options)
            tokens = []
            engine.module.register_forward_pre_hook(
                lambda _, __, inputs, tokens=tokens: tokens.append(inputs["input_ids"].shape[1]),
                with_kwargs=True,
            )
            found = {}
            for way, chosen in (("shared", shares), ("alone", lambda *_: False)):
                module.SharedPromptEngine._shares = chosen
                tokens.clear()
                found[way] = {"values": response_parts(infer(engine, given(settings)), given(settings))}
                found[way]["tokens"] = sum(tokens)
                found[way]["share"] = []
                for entropy in (True, False):
                    data = given(settings, calculate_entropy=entropy)
                    engine.optimizer_zero_grad()
                    with engine.train_mode():
                        output = engine.forward_backward_batch(data, loss_of)
                        found[way]["share"] += output["metrics"][module.COMPUTED]
                        found[way]["gradients", entropy] = {
                            name: weight.grad.full_tensor().clone()
                            for name, weight in engine.module.named_parameters()
                            if weight.grad is not None
                        }
            module.SharedPromptEngine._shares = shares
            results[case] = found
        results["said"] = engine.describe_log_probs()
        results["branches"] = _with_answers(engine)


def _with_answers(engine) -> bool:
    from verl.utils import tensordict_utils as tu

    from verl_credit.names import BRANCHES, SCORE_BRANCHES

    data = given({"temperature": 1.0})
    data[BRANCHES] = torch.nested.as_nested_tensor(
        [encode_branches([(2, [7, 8])]) for _ in ROWS], layout=torch.jagged
    )
    tu.assign_non_tensor(data, **{SCORE_BRANCHES: True})
    return engine._shares(data)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, *_ in CASES.values()}:
        tiny_model(family, attention="sdpa").save_pretrained(folder / family)
    return on_ranks(1, rank_main, folder)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_rows_alone(case, measured):
    shared, alone = measured[case]["shared"], measured[case]["alone"]
    assert shared["values"].keys() == alone["values"].keys() == {"log_probs", "entropy"}
    for name, value in alone["values"].items():
        torch.testing.assert_close(shared["values"][name], value, rtol=1e-9, atol=1e-9, msg=name)
    for entropy in (True, False):
        expected, found = alone["gradients", entropy], shared["gradients", entropy]
        assert found.keys() == expected.keys() and max(float(g.abs().max()) for g in expected.values()) > 1
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_shared_tokens_are_computed_once(case, measured):
    """Of 31 prompt tokens 5 + 4 + 3 are left; neither a repeated rollout costs anything nor 4 tokens of a common start."""
    rows = sum(p + r for p, r in ROWS)
    shares = CASES[case][-1]
    assert measured[case]["alone"]["tokens"] == rows
    computed = rows - (31 - 12) - 12 - 4 if shares else rows
    assert measured[case]["shared"]["tokens"] == computed
    assert measured[case]["shared"]["share"] == 2 * [computed / rows]
    assert measured[case]["alone"]["share"] == 2 * [1.0]


def test_the_start_says_so(measured):
    assert measured["said"].endswith("a prompt's rollouts share it within a micro-batch")
    assert not measured["branches"]
