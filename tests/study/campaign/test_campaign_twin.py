"""Campaigns whose runs are the twin's: what is refused, what starts again, and what the record and the page say."""

import json

import pytest

from verl_credit.errors import ConfigError
from verl_credit.study.campaign import runner
from verl_credit.study.campaign.design import composed
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.report import page
from verl_credit.study.campaign.results import results

pytestmark = pytest.mark.slow  # each composes a campaign's conditions


@pytest.fixture
def twins(stand, monkeypatch):
    """The engines of the runs that were started, too."""
    stand.tree["engine"], stand.engines = "twin", []

    def command(engine, *given):
        stand.engines.append(engine)
        return stand.run_command(engine, *given)

    monkeypatch.setattr(runner, "run_command", command)
    return stand


def test_an_interrupted_run_starts_again_without_what_it_measured(twins, capsys):
    twins.does(**{"grpo/seed-1": "killed"})
    assert twins.run(seeds=[1]) == 1
    run = twins.folder / "grpo/seed-1"
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (run / "validation.jsonl").write_text('{"step": 0, "val-aux/lab-sampled/em/mean@1": 0.9}\n')
    twins.does()
    assert twins.run() == 0
    said = "grpo/seed-1: a run of the twin does not go on: dropped after step 2, it starts again"
    assert capsys.readouterr().out.count(said) == 1
    assert twins.started == ["grpo/seed-1", "joint/seed-1", "grpo/seed-1"]
    assert set(twins.engines) == {"twin"}
    assert not (run / "metrics.jsonl").exists()
    assert [json.loads(line)["step"] for line in (run / "validation.jsonl").open()] == [0, 15, 30]
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").open()]
    assert kinds == ["start", "start", "end"]  # what was spent before is still counted
    assert twins.run() == 0 and twins.started == []
    assert "Runs of the twin" in page(results(twins.folder))


def test_what_the_twin_would_leave_out_is_refused_by_condition(stand, tmp_path):
    conditions = {"grpo": [], "cosine": ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]}
    campaign = parse(stand.tree | {"engine": "twin", "conditions": conditions}, "f.yaml")
    with pytest.raises(ConfigError, match="^campaign mine, condition cosine: ") as error:
        composed(campaign, tmp_path)
    assert (error.value.key, error.value.value) == (
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
        "cosine",
    )
    assert error.value.accepted == "the twin knows constant alone; `train` takes every value"
    composed(campaign.model_copy(update={"engine": "train"}), tmp_path)
