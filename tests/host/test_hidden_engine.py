"""Hidden states that verl's engine reads beside its log-probs: those of a plain forward of transformers on single rows."""

import pytest
import torch
from verl.utils import tensordict_utils as tu

from kit.tiny_engine import Trajectories, batch, build_engine, infer, single_rank
from kit.tiny_models import tiny_model
from verl_credit.names import HIDDEN_SPANS, HIDDEN_STATES, READ_HIDDEN
from verl_credit.turns.branches import plan_branches
from verl_credit.turns.hidden import encode_spans

ROWS = [(5, 12), (4, 7), (5, 1), (5, 9), (4, 7), (3, 6)]
"""Prompt and response tokens: three rollouts of the first prompt, not neighbours."""
SPANS = [[(4, 1), (0, 17)], [(3, 1)], [(4, 1), (5, 1), (2, 3)], [(0, 5), (13, 1)], [], [(8, 1)]]
LORA = {"lora_rank": 4, "lora_alpha": 16, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "gemma2"):
        stock = "eager" if family == "gemma2" else "sdpa"
        tiny_model(family, attention=stock).save_pretrained(folder / family)
    return folder


def plain(engine, folder, adapter: bool) -> torch.nn.Module:
    """transformers' model, or peft's, with the engine's weights and nothing of ours or verl's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    weights = {
        name: getattr(one, "full_tensor", lambda one=one: one)()
        for name, one in engine.module.state_dict().items()
    }
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def expected(model, turns, layer) -> list[torch.Tensor]:
    rows = []
    for prompt, response, spans in zip(turns.prompt_ids, turns.response_ids, SPANS, strict=True):
        output = model(input_ids=torch.tensor([prompt + response]), output_hidden_states=True)
        hidden_N_D = output.hidden_states[layer][0]
        rows.append(torch.cat([hidden_N_D[at : at + n].mean(0) for at, n in spans or [(0, 1)]]))
    return rows


def given(turns, plan=None, *, shared: bool, read: int = -1):
    data = batch(turns, plan, temperature=1.0, **{READ_HIDDEN: read} if read else {})
    if shared:  # verl's trainer has both; without them rows share no prompt
        for name, rows in (("prompts", turns.prompt_ids), ("responses", turns.response_ids)):
            data[name] = torch.nested.as_nested_tensor([*map(torch.tensor, rows)], layout=torch.jagged)
        tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{} for _ in ROWS])
    if read:
        data[HIDDEN_SPANS] = encode_spans(SPANS)
    return data


@pytest.mark.parametrize(
    ("family", "model", "shared", "branches", "layer"),
    [
        ("qwen3", {}, False, False, -1),
        ("qwen3", {}, True, False, -2),
        ("qwen3", {}, False, True, -1),
        ("qwen3", LORA, True, False, -2),
        ("gemma2", {}, False, False, -1),
    ],
)
def test_states_are_those_of_a_plain_forward(models, family, model, shared, branches, layer):
    turns = Trajectories(ROWS)
    plan = plan_branches(turns.requests(), turns) if branches else None
    with single_rank():
        engine = build_engine(str(models / family), enable_gradient_checkpointing=False, **model)
        without = infer(engine, given(turns, plan, shared=shared, read=0))
        output = infer(engine, given(turns, plan, shared=shared, read=layer))
        oracle = plain(engine, models / family, bool(model))
    states = output.pop(HIDDEN_STATES).unbind()
    for state, want in zip(states, expected(oracle, turns, layer), strict=True):
        torch.testing.assert_close(state, want, atol=2e-5, rtol=1e-4)
    assert without.keys() == output.keys()
    for name, value in without.items():
        assert torch.equal(value.values(), output[name].values()), name
    hooks = [module for module in engine.module.modules() if module._forward_hooks]
    assert not any("hidden" in repr(hook) for module in hooks for hook in module._forward_hooks.values())


def test_bf16_states_have_the_forwards_dtype_and_padded_rows_are_refused(models):
    turns = Trajectories(ROWS)
    with single_rank():
        engine = build_engine(str(models / "qwen3"), precision="bf16", enable_gradient_checkpointing=False)
        states = infer(engine, given(turns, shared=False))[HIDDEN_STATES]
        assert states.dtype == torch.bfloat16
        data = given(turns, shared=False)
        tu.assign_non_tensor(data, use_remove_padding=False)
        with pytest.raises(ValueError, match="packed rows that one rank holds whole"):
            infer(engine, data)
