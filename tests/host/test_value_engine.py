"""verl's critic in our engine: the values of packed rows are those of transformers' model with a head on single rows."""

import pytest
import torch

from kit.tiny_engine import Trajectories, batch, build_engine, infer, single_rank
from kit.tiny_models import tiny_config, tiny_model

ROWS = [(5, 12), (4, 7), (5, 1), (3, 9)]


def engine_of(folder):
    return build_engine(str(folder), kind="value_model", training=True, enable_gradient_checkpointing=False)


def rows_of(turns):
    return [torch.tensor([p + r]) for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]


@torch.no_grad()
def test_values_are_those_of_a_plain_forward(tmp_path):
    """Of a model that has its head already: a critic that was trained before keeps it."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    config = tiny_config("qwen3", num_labels=1, classifier_dropout=0.0)
    plain = AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    plain.save_pretrained(tmp_path)
    turns = Trajectories(ROWS)
    with single_rank():
        values = infer(engine_of(tmp_path), batch(turns, temperature=1.0))["values"].unbind()
    for row, value_T in zip(rows_of(turns), values, strict=True):
        wanted_T = plain(input_ids=row).logits[0, :, 0]
        assert wanted_T.abs().max() > 0.1
        torch.testing.assert_close(value_T, wanted_T, rtol=0, atol=2e-5)


def test_the_head_of_a_policy_is_0_in_every_start(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    with single_rank():
        engine = engine_of(tmp_path)
        values = infer(engine, batch(Trajectories(ROWS), temperature=1.0))["values"].values()
        assert engine.module_attention == "auto" and values.shape == (46,) and not values.any()
        assert engine.model_config.model_type == "value_model"


def test_a_model_of_another_kind_is_refused(tmp_path):
    config = tiny_config("qwen3")
    tiny_model("qwen3").save_pretrained(tmp_path)
    config.architectures = ["Qwen3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with (
        single_rank(),
        pytest.raises(ValueError, match="critic.model: a model of class Qwen3ForCond.*ForCausalLM"),
    ):
        engine_of(tmp_path)
