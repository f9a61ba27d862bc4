"""The queue of the half hour on a GPU: what each run changes in its recipe is accepted, and cuts no row's length."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))

from gpu.half_hour import order


@pytest.mark.parametrize(
    "engine",
    [order.VLLM, *(pytest.param(engine, marks=pytest.mark.slow) for engine in (order.HF, "rehearsal"))],
)
@pytest.mark.parametrize("run", order.QUEUE, ids=lambda run: run.name)
def test_a_run_is_accepted_and_cuts_rows_in_number_only(run, engine, tmp_path, monkeypatch):
    """No GPU is here to start them: that they compose and pass validation is what can be known."""
    from gpu.half_hour import world

    from kit.recipes import OWN, load_config
    from verl_credit.recipe.rules import validate

    tiny = engine == "rehearsal"
    monkeypatch.setattr(world, "read_manifest", lambda *given: {"tiny": tiny})
    given = order.overrides(run, tiny=tiny, engine=order.HF if tiny else engine, hardware="h100x1")
    given += world.overrides(tmp_path, "http://127.0.0.1:1", tmp_path, run.recipe)
    config = load_config(run.recipe, [*given, f"run_dir={tmp_path}"])
    validate(config)
    assert config.actor_rollout_ref.rollout.name == (order.HF if tiny else engine)
    assert config.trainer.device == ("cpu" if tiny else "cuda")
    assert config.trainer.total_training_steps == run.steps
    own = load_config(run.recipe, OWN)
    lengths = (
        "data.max_prompt_length",
        "data.max_response_length",
        "search.max_new_tokens",
        "search.max_searches",
    )
    of = lambda tree: [OmegaConf.select(tree, key) for key in lengths]  # noqa: E731
    assert tiny or of(config) == of(own)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert rows < own.data.train_batch_size * own.actor_rollout_ref.rollout.n
