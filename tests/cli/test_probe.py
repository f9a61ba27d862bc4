"""`verl-credit probe` up to what needs a model: which rollouts, which prompts, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from kit.stored_rollouts import UPDATE, stored
from verl_credit.cli import another_run
from verl_credit.cli.probe import divide, probe, run
from verl_credit.config.keys.section import declared
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.study.probe.file import ProbeSettings
from verl_credit.study.probe.kept_rollouts import Rollouts


def settings(**tree) -> ProbeSettings:
    return declared(ProbeSettings, tree, "probe.yaml")


def rows(prompts: int) -> Rollouts:
    n = 2 * prompts
    return Rollouts(
        prompt_ids=[torch.tensor([row // 2]) for row in range(n)],
        response_ids=[torch.tensor([1])] * n,
        written_B_T=torch.ones(n, 1, dtype=torch.bool),
        group_B=torch.arange(n) // 2,
    )


def test_e_and_u_share_no_prompt_and_follow_the_seed():
    e, u = divide(rows(10), settings(batch_config={"B_E": 6, "B_U": 3}))
    assert (len(e.prompts), len(u.prompts), len(e), len(u)) == (6, 3, 12, 6)
    assert not set(e.prompts) & set(u.prompts)
    again = divide(rows(10), settings(batch_config={"B_E": 6, "B_U": 3}))
    assert [part.prompts for part in again] == [e.prompts, u.prompts]
    other = divide(rows(10), settings(batch_config={"B_E": 6, "B_U": 3, "seed": 1}))
    assert [part.prompts for part in other] != [e.prompts, u.prompts]


def test_more_prompts_than_there_are_rollouts_of_are_refused():
    with pytest.raises(ConfigError, match="B_U=3 need 11 prompts, and there are rollouts of 10"):
        divide(rows(10), settings(batch_config={"B_E": 8, "B_U": 3}))


def saved_run(folder, step=11):
    """A run with a saved step and its configuration, without weights."""
    (folder / "checkpoints" / f"global_step_{step}" / "actor").mkdir(parents=True)
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    config = {
        "run_dir": str(folder),
        "trainer": {"default_local_dir": str(folder / "checkpoints")},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 1}, "rollout": {"response_length": 4}},
    }
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    return folder / "checkpoints" / f"global_step_{step}"


def test_stored_rollouts_that_the_run_did_not_keep_are_refused(tmp_path, capsys):
    file = tmp_path / "probe.yaml"
    file.write_text("generation: {source: stored}\n")
    assert probe(saved_run(tmp_path / "run"), file, tmp_path / "out", []) == ExitCode.PREFLIGHT
    said = capsys.readouterr().out
    assert "generation.source=stored" in said and "train with keep_rollouts={steps: N, groups: null}" in said
    assert not (tmp_path / "out").exists()


def test_a_typo_in_the_file_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(another_run, "collect", None)
    file = tmp_path / "probe.yaml"
    file.write_text("generation: {sorce: run}\n")
    assert probe(saved_run(tmp_path / "run"), file, None, []) == ExitCode.PREFLIGHT
    assert "unknown key generation.sorce (did you mean source?)" in capsys.readouterr().out


def test_the_run_s_mini_batch_is_the_update(tmp_path, monkeypatch, capsys):
    asked = []

    def collect(checkpoint, folder, *, prompts, overrides):
        asked.append((checkpoint.name, folder, prompts, list(overrides)))
        raise RuntimeError("enough")

    monkeypatch.setattr(another_run, "collect", collect)
    assert probe(saved_run(tmp_path / "run"), None, tmp_path / "out", ["a=b"]) == ExitCode.FAILED
    assert asked == [("global_step_11", tmp_path / "out" / "rollouts", 32 + 1, ["a=b"])]


def test_rollouts_of_an_earlier_probe_are_those_of_the_same_step_and_take_no_overrides(tmp_path, capsys):
    checkpoint, out = saved_run(tmp_path / "run"), tmp_path / "out"
    stored(out / "rollouts")
    assert probe(checkpoint, None, out, ["seed=2"]) == ExitCode.PREFLIGHT
    assert "seed=2: overrides are for new rollouts" in capsys.readouterr().out
    link = out / "rollouts" / "from" / checkpoint.name
    link.mkdir(parents=True)
    (link / "actor").symlink_to(tmp_path)
    assert probe(checkpoint, None, out, []) == ExitCode.PREFLIGHT
    assert "of another run's step 11; give another --out" in capsys.readouterr().out
    (link / "actor").unlink()
    (link / "actor").symlink_to(checkpoint / "actor")
    assert probe(checkpoint, None, out, []) == ExitCode.PREFLIGHT
    assert "there are rollouts of 2" in capsys.readouterr().out  # it went on to them


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy_step": 9}, "written by the policy of step 9, not 11"),
        ({"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 20}}, "sampled with top_k=20"),
        ({"sampling": {"temperature": 0, "top_p": 1.0, "top_k": -1}}, "sampled greedily"),
    ],
)
def test_rollouts_of_another_policy_or_sampler_are_refused(tmp_path, changes, said):
    path = stored(tmp_path, UPDATE | changes)
    saved = SimpleNamespace(step=11, config=None, folder=tmp_path)
    with pytest.raises(ConfigError, match=said):
        run(saved, path, settings(batch_config={"B_E": 1, "B_U": 1}), say=None)
