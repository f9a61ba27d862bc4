"""The twin's rows and updates against plain transformers and one row at a time."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kit.delta_models import delta_model
from kit.families import family_config
from kit.tiny_models import tiny_model
from verl_credit.errors import PreflightError
from verl_credit.policy.attention.implementation import AUTO, install
from verl_credit.policy.packed import PackedPolicy, groups_of
from verl_credit.study.twin_step import Objective, UpdateBatch, update

# Three rows of one prompt: a trunk, one that leaves it, one that is its beginning; and a row of another prompt.
PROMPTS = [torch.tensor(ids) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [7])]
RESPONSES = [torch.tensor(ids) for ids in ([3, 4, 5, 6], [3, 9, 4, 8], [3, 4], [2])]
TURNS = torch.tensor([[0, 0, -1, 1], [0, -1, 1, 1], [0, -1, -1, -1], [0, -1, -1, -1]])
TOKENS = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
OBJECTIVE = Objective(0.2, 0.28, 3.0, "token", False, "token-mean", mini_batch_rows=2)


@pytest.fixture
def model():
    install()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, attn_implementation=AUTO,
        initializer_range=0.3,  # else attention hardly matters
    )  # fmt: skip
    return LlamaForCausalLM(config)


def by_hand(model, row, temperature):
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    ids = torch.cat([PROMPTS[row], RESPONSES[row]])
    log_p = (plain(ids[None]).logits[0] / temperature).log_softmax(-1)
    before = log_p[len(PROMPTS[row]) - 1 : -1]
    return before.gather(1, RESPONSES[row][:, None])[:, 0], -(before.exp() * before).sum(-1)


@pytest.mark.parametrize("budget", [1, 9, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_rows_are_read_as_alone(model, budget, temperature):
    log_prob_B_T, entropy_B_T = PackedPolicy(model, temperature=temperature, budget=budget).responses(
        PROMPTS, RESPONSES, TOKENS, entropy=True
    )
    for row, response in enumerate(RESPONSES):
        log_prob, entropy = by_hand(model, row, temperature)
        torch.testing.assert_close(log_prob_B_T[row, : len(response)], log_prob, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy_B_T[row, : len(response)], entropy, atol=1e-5, rtol=0)
        assert not log_prob_B_T[row, len(response) :].any()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5"])
def test_a_hybrid_is_refused(family):
    """Its states would run from one rollout of a prompt into the next."""
    with pytest.raises(PreflightError, match=f"{family}: .* carry a state .* one packed row"):
        PackedPolicy(delta_model(family))


def test_a_model_that_caps_its_logits_is_refused():
    with pytest.raises(PreflightError, match="gemma2: the model changes the logits"):
        PackedPolicy(tiny_model("gemma2"))
    PackedPolicy(tiny_model("gemma2", final_logit_softcapping=None))


@pytest.mark.slow
def test_rows_past_the_border_of_longrope_are_refused():
    torch.manual_seed(0)
    policy = PackedPolicy(LlamaForCausalLM(family_config("llama_dynamic", max_position_embeddings=4)))
    with policy.packing():
        assert policy.hidden([torch.arange(4), torch.arange(3)])[0].shape[0] == 4
        with pytest.raises(PreflightError, match="more than 4 tokens beside it, and a row has 5"):
            policy.hidden([torch.arange(5)])


def test_rows_of_a_prompt_are_one_trunk_with_branches():
    prompts = [torch.tensor([1, 2])] * 5 + [torch.tensor([3])]
    endings = ([5, 6, 7], [5, 8], [9], [5, 8], [5, 6], [5])
    first, second = groups_of(prompts, [torch.tensor(ids) for ids in endings])
    assert (first.rows, second.rows) == (range(5), range(5, 6))
    assert first.stream.tolist() == [1, 2, 5, 6, 7, 8, 9] and first.shape == [(3, 1), (2, 1)]
    for row in first.rows:
        assert first.stream[first.places[row]].tolist() == [1, 2, *endings[row]]


def test_another_attention_would_mix_the_rows(model):
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation=sdpa"):
        PackedPolicy(model).responses(PROMPTS, RESPONSES, TOKENS)


def batch(policy, advantage=1.0):
    with torch.no_grad():
        log_prob_B_T, _ = policy.responses(PROMPTS, RESPONSES, TOKENS)
    advantage_B_T = advantage * torch.tensor([[1.0], [-1.0], [0.5], [2.0]]).expand(4, 4)
    mask_B_T = TURNS >= 0
    return UpdateBatch(PROMPTS, RESPONSES, TURNS, mask_B_T, log_prob_B_T, advantage_B_T, torch.ones(4, 4))


def test_micro_batches_do_not_change_the_update(model):
    ends = []
    for budget in (1, 2048):
        own = copy.deepcopy(model)
        policy = PackedPolicy(own, budget=budget)
        update(policy, torch.optim.AdamW(own.parameters(), lr=1e-3), batch(policy), OBJECTIVE)
        ends.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-5)


def test_every_mini_batch_is_an_update_of_its_own(model):
    policy = PackedPolicy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert len(update(policy, optimizer, batch(policy), OBJECTIVE)) == 2
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    with pytest.raises(ValueError, match="4 rows do not divide into mini-batches of 3"):
        update(policy, optimizer, batch(policy), Objective(**{**vars(OBJECTIVE), "mini_batch_rows": 3}))
