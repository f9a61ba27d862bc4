"""A step of the twin whose anchors read the policy's hidden states."""

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.tiny_models import tiny_model
from kit.turn_rows import Row, lost_row, turn_batch
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.twin_step import TwinHost
from verl_credit.turns.assign import CreditRun
from verl_credit.turns.step import credited, scored

ROWS = [Row(("ask", page, "so", page[::-1], answer), prompt) for prompt, page, answer in [
    ("Who?", "a page", "Paris"), ("Who?", "another", "Rome"), ("Where?", "maps", "Oslo"), ("Where?", "a sea", "Rome"),
    ("When?", "never", "Oslo"), ("When?", "always", "Paris")]]  # fmt: skip
ROWS += [Row(("Oslo",), "Who?"), lost_row("connect", prompt="Who?")]
OUTCOMES, GROUPS = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 0, 0])


@pytest.fixture
def step_of():
    tokenizer, policy = make_tokenizer(), PackedPolicy(tiny_model("qwen3", vocab_size=300).eval())
    turns = turn_batch(ROWS, tokenizer)

    def step_of(provider, **changes):
        given = {
            "info_gain_norm_mode": "turn_gae",
            "turn_signal": "none",
            "turn_values": provider,
            "lam": 0.5,
        }
        chosen = settings(**given | changes)
        host = TwinHost(policy, turns, OUTCOMES, GROUPS, step=1, planned_steps=2, entropy=False)
        with policy.packing():
            inputs, _ = scored(host, CreditRun.of(chosen, tokenizer), host.turns())
            return host, inputs, credited(host, inputs)

    return step_of


def test_values_ask_for_none(step_of, monkeypatch):
    monkeypatch.setattr(TwinHost, "read_hidden", None)
    _, inputs, credit = step_of("group")
    assert inputs.hidden_B_K1_D is None and credit.tables.optional["value_B_K1"][:7].any()


def test_clusters_of_hidden_states_are_the_anchors_of_gigpo(step_of):
    """At distance 0 rollouts of a question share its prompt alone, since no page was shown twice."""
    given = {"info_gain_norm_mode": "gigpo", "turn_anchor": "hidden"}
    for distance, states in ((0.0, [3 + 12]), (0.99, range(3, 15))):
        _, inputs, credit = step_of(None, **given, turn_anchor_distance=distance)
        anchor_B_K1 = credit.tables.optional["anchor_B_K1"]
        assert len(anchor_B_K1[anchor_B_K1 >= 0].unique()) in states
        assert torch.equal(anchor_B_K1 >= 0, inputs.hidden_B_K1_D.isfinite().all(dim=2))
        assert len(anchor_B_K1[[0, 1, 6], 0].unique()) == 1
    first = step_of(None, **given, turn_anchor_layer=-2)[1].hidden_B_K1_D
    assert first.shape == inputs.hidden_B_K1_D.shape and not torch.allclose(
        first, inputs.hidden_B_K1_D, equal_nan=True
    )
    exact = step_of(None, **given | {"turn_anchor": "observation"})[2]
    at_0 = step_of(None, **given, turn_anchor_distance=0.0)[2]
    assert torch.equal(at_0.credit.advantage_B_K1, exact.credit.advantage_B_K1)
