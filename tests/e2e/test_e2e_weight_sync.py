"""A weight sync that fails on the rollout engine's side ends the run with the exception's words, in every trainer."""

import pytest

from kit.faults import KillPoint, planted, started
from verl_credit.errors import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SEPARATE = ["trainer.v1.trainer_mode=credit_separate_async", "data.train_batch_size=8"]


@pytest.mark.parametrize("trainer", [[], SEPARATE], ids=["credit", "credit_separate_async"])
def test_the_words_of_the_engines_exception_are_printed(tmp_path, tiny_lab, trainer):
    """With servers of their own, the sending rank meanwhile waits for them."""
    fault = KillPoint("sync", "verl_credit.host.hf_rollout.sync:WeightSink.load", "fail", call=2)
    run = started(tmp_path, tiny_lab.root, *trainer, **planted(fault, tmp_path / "fired"))
    assert run.wait() == ExitCode.FAILED, run.output
    assert (tmp_path / "fired").exists() and "steps done: ValueError: a planted failure" in run.output
