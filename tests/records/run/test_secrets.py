"""Passwords and tokens stand in no file of a run, no output, no log and no tracker."""

import logging

import pytest
from omegaconf import OmegaConf

from kit.lab_run import launches, run
from kit.recipes import load_config
from kit.scripted_server import scripted_server, search
from verl_credit.cli import another_run
from verl_credit.errors import ConfigError
from verl_credit.records.run.files import STATE
from verl_credit.records.run.state import describe_resume, save_state
from verl_credit.redact import override_without_secrets, redact_value, without_secrets
from verl_credit.turns.rollout.search.client import SearchClient
from verl_credit.turns.rollout.search.faults import SearchFault

PARAMS = "algorithm.turn_signal_params"
HERE = __name__
GIVEN = {  # what is written -> what is shown
    "search.url=http://me:hush@127.0.0.1:1": "search.url=http://***@127.0.0.1:1",
    "search.url=[http://h:1,http://me:hush@h:2]": "search.url=[http://h:1,http://***@h:2]",
    "search.token_env=MY_TOKEN": "search.token_env=MY_TOKEN",
    f"{PARAMS}.api_key=hush": f"{PARAMS}.api_key=***",
    f"{PARAMS}.auth.user=hush": f"{PARAMS}.auth.user=***",
    f"{PARAMS}.url=https://judge/?auth=hush&top=3": f"{PARAMS}.url=https://judge/?auth=***&top=3",
    PARAMS + "={api_key: hush, keywords:[a,b], url: 'http://me:hush@h'}": PARAMS
    + "={api_key: ***, keywords:[a,b], url: 'http://***@h'}",
    '+ray_kwargs.ray_init.runtime_env.HF_TOKEN="hush, hush"': "+ray_kwargs.ray_init.runtime_env.HF_TOKEN=***",
    "+ray_kwargs.ray_init._redis_password=hush": "+ray_kwargs.ray_init._redis_password=***",
    "trainer.logger=[console,wandb]": "trainer.logger=[console,wandb]",
    "~data.shuffle": "~data.shuffle",
}


@pytest.fixture
def server():
    with scripted_server() as scripted:
        yield scripted


@pytest.mark.parametrize("given, shown", GIVEN.items())
def test_a_command_line_is_kept_without_secrets(given, shown):
    assert override_without_secrets(given) == shown


@pytest.mark.parametrize("recipe", ["lab", "multihop_qwen3_4b", "real_math_cpu"])
def test_what_the_recipes_declare_is_no_secret(recipe):
    """A run's files keep data.prompt_key, ppo_max_token_len_per_gpu and the like."""
    config = OmegaConf.to_container(load_config(recipe, ["run_dir=x"]), resolve=False)
    assert without_secrets("", config) == config


def test_addresses_in_lists_lose_their_passwords():
    given = {"urls": ["http://me:hush@a", {"api_key": "hush"}], "top": 3}
    shown = {"urls": ["http://***@a", {"api_key": "***"}], "top": 3}
    assert redact_value("", given) == without_secrets("", given) == shown


TOKENS = ("VERL_CREDIT_RETRIEVER_TOKEN", "MY_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN")


def asks(group, **params):
    """A turn signal of the user's."""
    return [[0.0 for _ in one.tool_turns] for one in group.trajectories]


ENDINGS = [
    ("search.url=[http://me:hush@127.0.0.1:1,http://127.0.0.1:2]", None),
    ("search.token_env=MY_TOKEN", "401 for http://me:hush@judge"),
]


@pytest.mark.slow
@pytest.mark.parametrize("given, error", ENDINGS)
def test_no_secret_of_a_start_is_in_a_file_or_its_output(tmp_path, capsys, monkeypatch, given, error):
    for name in TOKENS:
        monkeypatch.setenv(name, "hush")
    ends_with = launches(monkeypatch)
    ends_with(error and ends_with.failed(error))
    params = [f"+{PARAMS}.api_key=hush", f"+{PARAMS}.url=http://me:hush@judge"]
    _, lines = run(capsys, tmp_path / "run", f"algorithm.turn_signal={HERE}.asks", given, *params)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "events.jsonl"} <= {path.name for path in files}, lines
    assert any("lineage" in str(path) for path in files)
    assert not [path for path in files if "hush" in path.read_text(errors="replace")]
    assert "hush" not in "\n".join(lines)
    stored = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert stored.algorithm.turn_signal_params == {"api_key": "***", "url": "http://***@judge"}


@pytest.mark.slow
def test_a_checkpoint_holds_no_secret_and_a_new_key_resumes_exactly(tmp_path):
    def config(*overrides):
        own = [f"algorithm.turn_signal={HERE}.asks", f"run_dir={tmp_path}", *overrides]
        return load_config("lab", own)

    folder = tmp_path / "checkpoints" / "global_step_3"
    save_state(folder, config(f"+{PARAMS}.api_key=hush"), 3, {})
    (folder / "data.pt").write_bytes(b"")
    assert "hush" not in (folder / STATE).read_text()
    assert describe_resume(config(f"+{PARAMS}.api_key=new"), 3)[0] == "resume: exact, from step 3"


def test_a_secret_that_no_run_stores_is_asked_for():
    config = OmegaConf.create(
        {"search": {"url": None}, "algorithm": {"turn_signal_params": {"api_key": "***"}}}
    )
    with pytest.raises(ConfigError) as error:
        another_run._check_overrides([], {}, config)
    assert (error.value.key, error.value.value) == (f"{PARAMS}.api_key", "***")
    assert error.value.accepted == "a run stores no passwords; give it with an override"
    another_run._check_overrides([f"{PARAMS}.api_key=hush"], {}, config)


@pytest.mark.parametrize("step", [(500, b"no"), (429, b"busy"), (200, b"{}"), "close", None])
def test_a_search_shows_no_password_and_no_token(server, caplog, step):
    caplog.set_level(logging.DEBUG)
    server.script = [step] * 2 if step else []
    address = server.url.replace("://", "://me:hush@")
    for client in (
        SearchClient(address, max_retries=1),
        SearchClient(server.url, token="hush", max_retries=1),
    ):
        said = ""
        try:
            search(client)
        except SearchFault as fault:
            said = f"{fault} {fault!r} {fault.__cause__}"
        assert "hush" not in said + caplog.text
    assert {h.get("Authorization", "")[:6] for h in server.request_headers} == {"Basic ", "Bearer"}


def test_what_verl_prints_and_hands_to_trackers_has_no_secret(tmp_path, monkeypatch):
    main_ppo = pytest.importorskip("verl.trainer.main_ppo")
    from verl.trainer.ppo.v1 import trainer_base

    from verl_credit.host.process.launch import CreditTaskRunner

    printed, tracked = [], []
    runner = CreditTaskRunner.__ray_actor_class__
    monkeypatch.setattr(main_ppo.TaskRunnerV1.__ray_actor_class__, "run", lambda self, config: None)
    monkeypatch.setattr(main_ppo, "pprint", printed.append)
    monkeypatch.setattr(trainer_base, "Tracking", lambda **settings: tracked.append(settings))
    runner.run(object.__new__(runner), load_config("lab", [f"run_dir={tmp_path}"]))
    trainer = {"wandb_proxy": "http://me:pass@proxy", "project_name": "mine"}
    config = {"search": {"url": "http://me:hush@h"}, "judge": {"api_key": "hush"}, "trainer": trainer}
    main_ppo.pprint(config)
    trainer_base.Tracking(
        project_name="mine", experiment_name="one", default_backend=["wandb"], config=config
    )
    assert "hush" not in str(printed + tracked) and "pass" not in str(printed)
    assert tracked[0]["project_name"] == "mine" and tracked[0]["default_backend"] == ["wandb"]
    assert tracked[0]["config"]["trainer"] == trainer  # verl connects through it
