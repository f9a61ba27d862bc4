"""Scores by the frozen reference: which workers are asked, what the twin's reference is, and what its scores are not."""

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.plain_forward import ONE, TWO, WHO, ModelForward, by_hand, made
from kit.recipes import load_config
from kit.settings import settings
from kit.tiny_models import tiny_model
from kit.turn_rows import Row, turn_batch
from verl_credit.credit import info_gain
from verl_credit.host.step.v1_host import V1Host, score_rows
from verl_credit.names import ANSWER_WHEN_SOLVED
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.twin_check import check_twin
from verl_credit.study.twin_step import TwinHost
from verl_credit.turns.score.gains import plan_gains, score_answers
from verl_credit.turns.score.requests import PseudoAnswer
from verl_credit.turns.score.scorers import ScoreRow
from verl_credit.turns.step.assign import CreditRun
from verl_credit.turns.step.step import credited, scored

ROWS = [Row(TWO, WHO), Row(ONE, WHO)]
OUTCOMES, GROUPS = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
TRACE = {"info_gain_norm_mode": "trace", "info_gain_type": "log_gap", "dynamic_clip": False}
ASKED = [ScoreRow((1, 2, 3), PseudoAnswer((4, 5), 0, 2)), ScoreRow((1, 2), PseudoAnswer((4, 5, 6), 1, 3))]
LORA = "actor_rollout_ref.model.lora_rank=4"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_scores_are_the_references_log_probs_of_the_gold_answer(tokenizer):
    """d_k = .1 - mean log p_ref(gold): V_1 - V_0 = log(d_0 / d_1), by plain forward passes of another model."""
    turns, reference = turn_batch(ROWS, tokenizer), made(tokenizer, "auto")
    chosen = settings(**TRACE, info_gain_scorer="reference", info_gain_aliases="first")
    plan, forward = plan_gains(turns, chosen, tokenizer), ModelForward(reference, turns)
    forward.score_by_reference, forward.score_rows = forward.score_rows, None  # the policy is not asked
    scores = score_answers(plan, forward)
    gain = info_gain(*scores, info_gain_type="log_gap").info_gain_B_K
    plain = made(tokenizer, "sdpa")
    ends = ("", "".join(TWO[:2]), "".join(TWO[:4]))
    d = [0.1 - by_hand(tokenizer, plain, WHO + end + "<answer>", "Paris") for end in ends]
    expected = [d[k] / d[k + 1] for k in range(2)]
    assert gain[0].exp().tolist() == pytest.approx(expected, abs=1e-9)
    assert max(abs(1 - ratio) for ratio in expected) > 1e-3


class Workers:
    """Answers with token t's place as its log-prob, and notes how it was asked."""

    def __init__(self, ranks):
        self._dispatch_info, self._ranks, self.asked = {}, ranks, []

    def _query_dispatch_info(self, mesh):
        return list(range(self._ranks[mesh]))

    def compute_log_prob(self, batch):
        return self._answer("actor", batch)

    def compute_ref_log_prob(self, batch):
        return self._answer("reference", batch)

    def _answer(self, role, batch):
        self.asked.append((role, len(batch), batch.get("no_lora_adapter", None) is not None))
        of_rows = [-torch.arange(1.0, len(ids) + 1) for ids in batch["input_ids"].unbind()]
        return {"log_probs": torch.nested.as_nested_tensor(of_rows, layout=torch.jagged)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, asked",
    [
        (["credit=trace"], ("reference", 4, False)),  # two rows on four ranks
        (["credit=trace", LORA, "actor_rollout_ref.model.lora.merge=true"], ("actor", 2, True)),
        (
            [
                "credit=trace", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
            ],
            ("reference", 8, False),
        ),
    ],
)  # fmt: skip
def test_verls_reference_is_asked_by_its_own_keys_and_the_actor_only_without_its_adapter(overrides, asked):
    config, workers = load_config("lab", overrides), Workers({"actor": 2, "ref": 4})
    host = V1Host(config, None, None)
    host.reference = workers
    assert host.score_by_reference(ASKED).tolist() == [-3.5, -3.5]
    assert workers.asked == [asked]
    assert score_rows(workers, config, ASKED).tolist() == [-3.5, -3.5]  # the policy's own, with its adapter
    assert workers.asked[1:] == [("actor", 2, False)]


def test_the_twins_reference_stays_where_the_policy_began(tokenizer):
    """After the policy has moved, its own gains have too, and those by the reference have not."""
    turns = turn_batch(ROWS, tokenizer)
    policy, reference = (PackedPolicy(tiny_model("qwen3", vocab_size=300).eval()) for _ in range(2))

    def gains(scorer):
        chosen = settings(**TRACE, info_gain_scorer=scorer, info_gain_aliases="first")
        steps = {"step": 1, "planned_steps": 2, "reference": reference}
        host = TwinHost(policy, turns, OUTCOMES, GROUPS, **steps, entropy=False)
        with policy.packing():
            inputs, _ = scored(host, CreditRun.of(chosen, tokenizer), host.turns())
            credit = credited(host, inputs)
        return inputs.gain_B_K, credit

    (before, _), (own, _) = gains("reference"), gains("rows")
    torch.testing.assert_close(before, own)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.5)
    (after, credit), (moved, by_policy) = gains("reference"), gains("rows")
    assert torch.equal(after, before) and (moved - own).abs().max() > 1e-3
    r = (after[0, 0] + 0.8 * after[0, 1]) / 1.8 + 2 * 0.8**2
    assert credit.credit.advantage_B_K1[0, 0].item() == pytest.approx(1 + 0.2 * float(r), abs=1e-5)
    # The reference's probability is no sign of the policy's collapse.
    assert ANSWER_WHEN_SOLVED in by_policy.metrics and ANSWER_WHEN_SOLVED not in credit.metrics


@pytest.mark.slow
def test_the_twin_takes_a_reference_that_adds_nothing_to_the_loss():
    check_twin(load_config("lab", ["credit=trace"]))
    with pytest.raises(ValueError, match="use_kl_loss=true: the twin knows False alone"):
        check_twin(load_config("lab", ["credit=cigpo"]))
