"""`verl-credit fidelity` through a run's rollouts, up to the start of the run: what it would be, and what is refused."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kit.recipes import load_config
from verl_credit.cli.another_run import RECIPE
from verl_credit.cli.fidelity import by_run
from verl_credit.cli.fidelity.by_run import why_by_run
from verl_credit.cli.fidelity.fidelity import fidelity
from verl_credit.config.resolved import flat_values
from verl_credit.errors import ExitCode
from verl_credit.recipe import compose
from verl_credit.recipe.rules import validate
from verl_credit.study.fidelity.request import REQUEST, RESULT, TABLE, Request

TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
MODEL = "actor_rollout_ref.model"
LORA = f"{MODEL}.lora.merge=true"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=turn_agent"
SETTINGS = dict.fromkeys(("steps", "minutes", "parallel", "lab"))
SETTINGS |= {"prompts": 4, "rollouts": 8, "continuations": 8, "modes": "none,joint", "gradient": False}
SETTINGS |= {"split": "train", "seed": 0, "engine": "run", "overrides": []}


@pytest.fixture(scope="module")
def saved_config():
    """The run's configuration; ROOT stands for the folder above the run's."""
    config = load_config("lab", ["run_dir=ROOT/r", "lab.dir=ROOT/lab"])
    config.search.url = "http://127.0.0.1:1"
    return OmegaConf.to_yaml(config, resolve=True)


@pytest.fixture
def run_dir(saved_config, tmp_path):
    folder = tmp_path / "r"
    for step in (5, 10):
        actor = folder / f"checkpoints/global_step_{step}/actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_text("weights")
    (tmp_path / "lab/policy").mkdir(parents=True)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("10")
    (folder / "config.yaml").write_text(saved_config.replace("ROOT", str(tmp_path)))
    return folder


@pytest.fixture
def started(monkeypatch):
    """Replaces the run, and lists (its folder, its overrides, its request) for every start."""
    found = []

    def run(folder, overrides, otherwise):
        request = Request.read(folder)
        found.append((folder, overrides, request))
        policy = {"policy": request.policy, "step": request.step}
        (Path(request.out) / RESULT).write_text(json.dumps({"settings": {}, "policies": [policy]}))
        (Path(request.out) / TABLE).write_text("one line\nanother\n")
        (Path(request.out) / "turns.jsonl").write_text("")

    monkeypatch.setattr(by_run, "run_alone", run)
    monkeypatch.setattr("verl_credit.records.report.fidelity_page.fidelity_page", lambda *_: "")
    return found


@pytest.mark.slow
def test_a_run_of_its_own_that_loads_the_policy_and_makes_no_step(run_dir, started, tmp_path, capsys):
    out = tmp_path / "out"
    code = fidelity(
        run_dir, out, **SETTINGS | {"steps": "0,5", "minutes": 10.0, "overrides": ["search.topk=2"]}
    )
    assert code == ExitCode.DONE, capsys.readouterr().out
    start, later = (load_config(RECIPE, overrides, str(folder)) for folder, overrides, _ in started)
    validate(start), validate(later)
    of_start, of_later = (request for *_, request in started)
    was, now = flat_values(OmegaConf.load(run_dir / "config.yaml")), flat_values(later)
    changed = {key for key in {*was, *now} if was.get(key) != now.get(key)}
    trainer = "v1.trainer_mode default_local_dir resume_mode resume_from_path save_freq test_freq "
    trainer += "val_before_train max_actor_ckpt_to_keep"
    own = ("run_dir", "lineage.dir", "search.url", "search.topk")
    assert changed == {*own, *(f"trainer.{name}" for name in trainer.split())}
    assert now["faults.max_failed_rollouts"] == 0
    assert now["trainer.v1.trainer_mode"] == "credit_fidelity"
    linked = Path(now["trainer.resume_from_path"])
    assert (linked / "actor").resolve() == run_dir / "checkpoints/global_step_5/actor"
    assert start.trainer.resume_mode == "disable"
    assert (of_start.step, of_later.step, of_later.modes) == (0, 5, ["none", "joint"])
    assert 4.5 < of_start.minutes <= 5 and 9 < of_later.minutes <= 10  # what is left is divided
    assert of_later.folder == str(Path.cwd())
    assert (out / "step_5/run" / REQUEST).is_file()
    assert json.loads((out / RESULT).read_text())["policies"][1]["step"] == 5
    assert "one line\nanother" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_measurement_goes_on_and_another_one_is_refused(run_dir, started, tmp_path, capsys):
    """A refused call leaves the first measurement as it is; the number of prompts, time and addresses may change."""
    out = tmp_path / "out"
    goes_on = [{}, {"prompts": 8}, {"rollouts": 4}, {"minutes": 3.0}]
    goes_on.append({"overrides": ["search.url=http://me:word@127.0.0.1:2"]})
    other = {
        "seed": {"seed": 1},
        "continuations": {"continuations": 16},
        "split": {"split": "test"},
        "settings": {"overrides": ["search.topk=2"]},
        "data": {"overrides": ["data.train_files=[other.parquet]"]},
    }
    assert fidelity(run_dir, out, **SETTINGS | {"overrides": ["search.topk=many"]}) == ExitCode.PREFLIGHT
    assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"}) == ExitCode.DONE
    for name, changes in other.items():
        assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"} | changes) == ExitCode.PREFLIGHT, name
        assert f"about.json: {name} is" in capsys.readouterr().out and len(started) == 1
        assert (out / "step_5" / RESULT).is_file()
    for number, changes in enumerate(goes_on, start=2):
        assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"} | changes) == ExitCode.DONE, changes
        assert len(started) == number, changes
    assert not any(b"word@" in path.read_bytes() for path in out.rglob("*.json"))


@pytest.mark.slow
def test_a_policy_that_was_trained_anew_is_another_one(run_dir, started, tmp_path, capsys):
    out = tmp_path / "out"
    assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"}) == ExitCode.DONE
    (run_dir / "checkpoints/global_step_5/actor/model_world_size_1_rank_0.pt").write_text("other weights")
    assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"}) == ExitCode.PREFLIGHT
    assert "about.json: policy is" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_without_seeds_begins_elsewhere_when_it_goes_on(run_dir, started, tmp_path, monkeypatch):
    monkeypatch.setattr(compose, "validate", lambda *_: None)  # vLLM asks for more than this test sets
    config = OmegaConf.load(run_dir / "config.yaml")
    config.actor_rollout_ref.rollout.name = "vllm"
    OmegaConf.save(config, run_dir / "config.yaml")
    out, seeds = tmp_path / "out", []
    for _ in range(2):
        assert fidelity(run_dir, out, **SETTINGS | {"steps": "5"}) == ExitCode.DONE
        seeds.append(OmegaConf.load(out / f"step_5/run/{RECIPE}.yaml").actor_rollout_ref.rollout.seed)
        (out / "step_5/values.jsonl").write_text(2 * '{"context": "c", "outcomes": "01010101"}\n')
    assert seeds == [0, 2]


@pytest.mark.parametrize(
    "overrides, why",
    [
        ([], "None"),
        ([TOOLS], "tool_config_path=tools.yaml"),
        ([TOOLS, LOOP], "default_agent_loop=turn_agent"),
        (["actor_rollout_ref.rollout.multi_turn.format=glm"], "multi_turn.format=glm"),
        (["reward.custom_reward_function.path=mine.py"], "custom_reward_function.path=mine.py"),
        (["data.train_files=mine.parquet"], "data.train_files=mine.parquet"),
    ],
)
def test_which_runs_have_to_roll_out_themselves(overrides, why):
    assert why in str(why_by_run(load_config("lab", overrides)))


def test_a_run_without_the_lab_has_to():
    assert why_by_run(load_config("search_cpu", [])) == "the run is not of the lab"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, said",
    [
        ({"gradient": True, "overrides": [LORA, f"{MODEL}.lora_rank=8"]}, f"{MODEL}.lora_rank=8: expected a policy without"),
        ({"gradient": True, "overrides": [LORA, f"{MODEL}.lora_adapter_path=mine"]}, f"{MODEL}.lora_adapter_path=mine: "),
        ({"parallel": 2}, "--parallel: not with --engine run"),
        ({"lab": Path("elsewhere")}, "--lab: not with --engine run"),
        ({"continuations": 7}, "--continuations 7: expected an even number of at least 2"),
        ({"rollouts": 1}, "--rollouts 1: expected at least 2"),
        ({"minutes": 0.0}, "--minutes 0: expected more than 0"),
        ({"gradient": True, "modes": "joint"}, "add none to --modes"),
        ({"gradient": True, "prompts": 2}, "--prompts 2: --gradient takes at least 3"),
        ({"split": "dev"}, "--split dev: --engine run has train (data.train_files) and test (data.val_files)"),
        ({"engine": "sampler", "overrides": ["search.topk=2"]}, "search.topk=2: overrides are taken with --engine run"),
        ({"overrides": ["run_dir=x"]}, "run_dir=x: run_dir is set by this command"),
        ({"overrides": ["trainer.v1={trainer_mode:credit}"]}, "trainer.v1.trainer_mode is set by this command"),
        ({"overrides": ["actor_rollout_ref.rollout.full_determinism=true"]}, "full_determinism=true: expected false"),
        ({"steps": "7"}, "checkpoints has 0, 5, 10"),
    ],
)  # fmt: skip
def test_what_is_refused(run_dir, started, tmp_path, capsys, changes, said):
    assert fidelity(run_dir, tmp_path / "out", **SETTINGS | changes) == ExitCode.PREFLIGHT
    assert said in capsys.readouterr().out and not started


@pytest.mark.slow
def test_policies_that_a_way_of_measuring_cannot_roll_out(run_dir, started, tmp_path, capsys):
    def refused(folder, **changes):
        assert fidelity(folder, tmp_path / "out", **SETTINGS | changes) == ExitCode.PREFLIGHT
        return capsys.readouterr().out

    shard = run_dir / "checkpoints/global_step_10/actor/model_world_size_1_rank_0.pt"
    shard.unlink()
    assert "no shards of verl's (the twin writes none); expected --engine sampler" in refused(run_dir)
    (tmp_path / "lab/policy/config.json").write_text("{}")
    assert "expected a run's folder or one of its checkpoints" in refused(tmp_path / "lab/policy")
    config = (run_dir / "config.yaml").read_text()
    config = config.replace("tool_config_path: null", "tool_config_path: tools.yaml")
    (run_dir / "config.yaml").write_text(config)
    assert "tool_config_path=tools.yaml; expected run" in refused(run_dir, engine="sampler")
