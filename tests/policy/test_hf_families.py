"""What `rollout.name=hf` samples, family by family: its log-probs are those of an eager forward of each row alone."""

import pytest
import torch

from kit.families import FAMILIES, MISSING, VOCABULARY, WINDOW, family_config, family_model
from kit.tiny_models import log_probs
from verl_credit.policy import families
from verl_credit.policy.decoding_proof import prove_decoding
from verl_credit.policy.families import NOT_DECODED, family_of, positions, why_not_decoded
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams

MIX = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2}
SOFTCAP = {"attn_logit_softcapping": 2.0}
# Three layers of the delta rule round by more than 1e-5; small logits hide errors, and so does a window that no row leaves.
DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2}
CHANGES = {
    "gemma2": SOFTCAP, "doge": {"keep_window_size": 9},
    **{family: {"logit_scale": 1.0} for family in ("cohere", "cohere2", "cohere2_moe")},
    **{family: DELTA for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}  # fmt: skip
FAST = ["mistral_swa", "gemma2", "gpt_oss", "deepseek_v3_vdim", "qwen3_5_text", "lfm2"]
INSTALLED = [family for family in FAMILIES if family not in MISSING]
REFUSED = [family for family in INSTALLED if family_config(family).model_type in NOT_DECODED]
OTHERS = [(family, {}) for family in INSTALLED if family not in (*FAST, *REFUSED)]
# Decoding reads more than the table's rows of these families have.
PATHS = [
    ("gemma3n_text", {"num_kv_shared_layers": 2}), ("gemma4_text", {"num_kv_shared_layers": 2}),
    ("starcoder2", {"sliding_window": None}), ("dots1", MIX), ("mellum", MIX), ("longcat_flash", {"v_head_dim": 12}),
    ("laguna", {"mlp_layer_types": ["dense", "sparse"] * 2}),
]  # fmt: skip


def _drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    start, *ends = (torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in (14, 3, 11, 11, 25))
    shared = [[*start, *end] for end in ends[:3]]
    return shared, [shared[0], *shared, ends[3]]


SHARED, MIXED = _drawn(3)
"""Prompts with a common start, and such with a prompt twice and one of its own; all but one row leave the window."""


def changed(family, **changes):
    return family_config(family, **CHANGES.get(family, {}) | changes)


def built(family, **changes):
    config = changed(family, **changes)
    return family_model(config, family_of(config).stock[0])


def in_eager(model, family, **changes):
    reference = family_model(changed(family, **changes), "eager")
    reference.load_state_dict(model.state_dict())
    return reference


def params(prompts):
    return [SamplingParams(6 + 5 * (row % 4), seed=row) for row in range(len(prompts))]


def largest_error(model, reference, prompts):
    outputs = BatchGenerator(model, pad_token_id=0).generate(prompts, params(prompts))
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = log_probs(reference, [*prompt, *output.token_ids])[len(prompt) - 1 :]
        errors.append((torch.tensor(output.log_probs) - expected).abs().max())
    return float(max(errors))


def check(family, **changes):
    model = built(family, **changes)
    reference = in_eager(model, family, **changes)
    assert log_probs(reference, MIXED[-1]).std() > 0.3
    assert largest_error(model, reference, MIXED) < 1e-5
    assert largest_error(model, reference, SHARED) < 1e-5
    assert prove_decoding(BatchGenerator(model, pad_token_id=0)) < 1e-5


@pytest.mark.parametrize("family", FAST)
def test_sampled_log_probs_are_those_of_one_row(family):
    check(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family, changes", [*OTHERS, *(case for case in PATHS if case[0] not in MISSING)])
def test_every_other_family(family, changes):
    check(family, **changes)


@pytest.mark.parametrize(("family", "change"), [
    ("mistral_swa", {"sliding_window": None}), ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"sliding_window": WINDOW - 1}),
])  # fmt: skip
def test_a_missed_window_or_softcap_would_be_seen(family, change):
    model = built(family)
    assert largest_error(model, in_eager(model, family, **change), MIXED) > 1e-3


def test_states_are_never_padded():
    """Prompts of one length are read together."""
    model, shapes = built("qwen3_5_text"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    BatchGenerator(model, pad_token_id=0).generate(MIXED, [SamplingParams(1)] * 5)
    assert shapes == [(1, 17), (3, 25)]


def test_a_row_of_states_does_not_depend_on_its_batch():
    generator = BatchGenerator(built("qwen3_5_text"), pad_token_id=0)
    together = generator.generate(MIXED, params(MIXED))
    for prompt, one, output in zip(MIXED, params(MIXED), together, strict=True):
        assert generator.generate([prompt], [one])[0].token_ids == output.token_ids


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_decoded_says_why(family):
    config = family_config(family).to_dict()
    for given in (config, {"model_type": "some_root", "text_config": config}):
        why = why_not_decoded(given)
        assert f"model_type={config['model_type']}: " in why
        assert "rollout.name=vllm" in why
    assert why_not_decoded(family_config("qwen3").to_dict()) is None


def test_a_model_that_is_not_decoded_is_refused():
    with pytest.raises(ValueError, match="model_type=zamba2: "):
        BatchGenerator(built("zamba2"), pad_token_id=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_that_nobody_knows_is_proved(dtype, monkeypatch):
    assert prove_decoding(BatchGenerator(built("qwen3").to(dtype), pad_token_id=0)) < 0.1
    monkeypatch.setattr(families, "NOT_DECODED", ())
    with pytest.raises(
        RuntimeError, match=rf"model_type=doge samples differ .* {dtype}; .*rollout\.name=vllm"
    ):
        prove_decoding(BatchGenerator(built("doge").to(dtype), pad_token_id=0))


@pytest.mark.nightly
@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_would_fail_or_be_wrong(family, monkeypatch):
    monkeypatch.setattr(families, "NOT_DECODED", ())
    try:
        model = built(family)
        error = largest_error(model, in_eager(model, family), MIXED)
    except Exception:
        return
    assert error > 1e-3


def test_longrope_ends_where_its_angles_change():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    long = {"rope_parameters": rope | {"original_max_position_embeddings": 64, "rope_theta": 10000.0}}
    model = built("phi3", original_max_position_embeddings=64, **long)
    assert positions(model.config.to_dict()) == 64 and positions(family_config("phi3").to_dict()) == 512
    reference = in_eager(model, "phi3", original_max_position_embeddings=64, **long)
    assert largest_error(model, reference, MIXED) < 1e-5
    with pytest.raises(
        ValueError, match="61 prompt tokens . max_new_tokens=4 exceed the model's 64 positions"
    ):
        BatchGenerator(model, pad_token_id=0).generate([[5] * 61], [SamplingParams(4)])
