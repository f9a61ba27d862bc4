"""A step through two hosts: verl's v1 trainer over its store, and V0's padded `DataProto` with V0's advantages."""

import pytest
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from kit.data_proto_host import DataProtoHost
from kit.recipes import load_config
from kit.stored_step import OUTCOMES, OVERRIDES, PROMPTS, ROWS, STEP, StoredStep
from verl_credit.config.settings import CreditSettings
from verl_credit.host.step import store
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import CLIP_SCALE
from verl_credit.turns.step.assign import CreditRun
from verl_credit.turns.step.step import credited, scored
from verl_credit.turns.step.step_checks import StepChecks

NAMES = [f"{prompt}_{number}_0" for number, prompt in enumerate(PROMPTS)]
GAINS = "algorithm.turn_signal=auto", "algorithm.info_gain_scorer=rows"
SEPA = "algorithm.transform_mode=gtpo", "algorithm.uncertainty_kind=shannon_entropy"
SECONDS = "credit/gain/seconds"


def forward_of(host_turns):
    """The log-probs of `kit.stored_step.Workers`, padded: they follow from the token's place and the row's number."""

    def forward(data):
        turns = host_turns()
        place_T = torch.arange(data.batch["responses"].shape[1])
        rows = [
            -0.1 - 0.01 * (len(prompt) - 1 + place_T).double() - 0.02 * number
            for number, prompt in enumerate(turns.prompt_ids)
        ]
        log_prob_B_T = torch.stack(rows) * (place_T < torch.tensor([[len(r)] for r in turns.response_ids]))
        fields = {"old_log_probs": log_prob_B_T, "entropys": -log_prob_B_T}
        return DataProto(TensorDict(fields, batch_size=len(rows)))

    return forward


@pytest.mark.parametrize("own", [(), SEPA, GAINS, ("algorithm.adv_estimator=grpo",)])
def test_two_hosts_make_the_same_step(tmp_path, monkeypatch, own):
    stored = StoredStep(tmp_path / "v1", monkeypatch)
    of_v1, field = stored.make(CreditTrainer, *own, filled=False)

    config = load_config("lab", [*OVERRIDES, *own, f"run_dir={tmp_path / 'v0'}"])
    (tmp_path / "v0").mkdir()
    tokenizer, settings = stored.tokenizer, CreditSettings.from_config(config)
    shuffled = [2, 0, 3, 1]
    rows, names, outcomes = ([of[row] for row in shuffled] for of in (ROWS, NAMES, OUTCOMES))
    host = DataProtoHost(
        rows, names, outcomes, tokenizer, forward_of(lambda: host.turns()),
        lambda extra: store.score_rows(stored.workers.compute_log_prob, extra, dp_size=1),
        config.algorithm, step=STEP, planned_steps=30,
    )  # fmt: skip
    host.order()
    checks, run, turns = StepChecks(config, settings), CreditRun.of(settings, tokenizer), host.turns()
    checks.rows(host, turns)
    inputs, cost = scored(host, run, turns)
    if step := credited(host, inputs):
        checks.credit(host, step)
    for name in ("advantages", CLIP_SCALE):
        padded_B_T = host.data.batch[name]
        for row, values in enumerate(field(name)):
            assert torch.equal(padded_B_T[row, : len(values)], values), (name, row)
    assert set(cost) == set(of_v1) & {SECONDS}
    named = {name: value for name, value in of_v1.items() if name.startswith("credit/") and name != SECONDS}
    assert host.metrics == pytest.approx(named, abs=0, rel=0, nan_ok=True)
    assert (step is None) == (own == ("algorithm.adv_estimator=grpo",))
