"""A step of our trainer through verl's store with a critic: its values are read, and its returns are written for it."""

import torch

from kit.stored_step import OUTCOMES, StoredStep, Workers
from verl_credit.host.step import store
from verl_credit.host.step.trainer import CreditTrainer

ON = (
    "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_signal=none", "algorithm.turn_values=critic",
    "critic.enable=true", "algorithm.lam=0",
)  # fmt: skip


def test_values_and_returns_go_through_the_store(tmp_path, monkeypatch):
    given, forward = [], Workers.compute_log_prob

    def with_values(workers, batch):
        batch = forward(workers, batch)
        random = torch.Generator().manual_seed(4)
        lengths = [len(row) for row in store.read(batch, "responses")["responses"].unbind()]
        given[:] = [torch.randn(length, generator=random) for length in lengths]
        return store.write(batch, {"values": torch.nested.as_nested_tensor(given, layout=torch.jagged)})

    monkeypatch.setattr(Workers, "compute_log_prob", with_values)
    metrics, field = StoredStep(tmp_path, monkeypatch).make(CreditTrainer, *ON)
    for row, outcome in enumerate(OUTCOMES):
        policy_T, value_T = field("response_mask")[row].bool(), given[row]
        returned_T, advantage_T = field("returns")[row], field("advantages")[row]
        assert torch.equal(returned_T[policy_T], torch.full((int(policy_T.sum()),), outcome))
        answer = int(policy_T.nonzero()[4])  # "call" has four tokens
        step = torch.where(
            torch.arange(len(value_T)) < answer, value_T[answer] - value_T[0], outcome - value_T[answer]
        )
        torch.testing.assert_close(advantage_T[policy_T], step[policy_T])
    assert torch.equal(field("returns")[4], given[4])  # the row that fills the batch teaches nothing
    assert "credit/values/explained_variance" in metrics
