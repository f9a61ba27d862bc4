"""A run that cannot work ends before Ray starts, saying why."""

import json

import pytest
import torch
from huggingface_hub import constants, errors
from omegaconf import OmegaConf
from safetensors.torch import save_file

from kit.preflight import GOOD, policy, write
from kit.recipes import load_config
from kit.scripted_server import dead_port, scripted_server
from verl_credit.cli import main
from verl_credit.config.keys import Search
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.inputs import ask_servers
from verl_credit.recipe.doctor.lengths import NotHere, load_tokenizer
from verl_credit.recipe.model_files import HubError, fetch_config, require_model, require_positions


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_model_folder_without_a_model(tmp_path):
    with pytest.raises(PreflightError, match=r"actor_rollout_ref.model.path=.*no config.json"):
        require_model(str(tmp_path))
    with pytest.raises(PreflightError, match="give a model folder or a hub name"):
        require_model(None)
    require_model("hdfs://here/or/there")  # verl's own


@pytest.mark.parametrize(
    "overrides, needed",
    [
        ([], 464),
        (["actor_rollout_ref.rollout.max_model_len=721"], 721),
        (["actor_rollout_ref.rollout.max_model_len=null"], 464),
    ],
)
def test_a_model_without_positions_for_the_longest_row_is_refused(tmp_path, overrides, needed):
    config = load_config("lab", [f"actor_rollout_ref.model.path={tmp_path}", *overrides])
    enough = {"max_position_embeddings": needed}
    for values in ({}, enough, {"text_config": enough}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        require_positions(config)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": needed - 1}))
    with pytest.raises(PreflightError, match=f"has {needed - 1} positions .* shorten the rows to 463"):
        require_positions(config)
    config.data.max_response_length -= 1
    config.actor_rollout_ref.rollout.max_model_len = needed
    with pytest.raises(PreflightError, match=r"set actor_rollout_ref.rollout.max_model_len=auto"):
        require_positions(config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PreflightError, match="model.path=.*config.json is not JSON"):
        require_positions(config)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("model-00001-of-00002.safetensors", POINTER, r"a Git-LFS pointer: .* run git lfs pull"),
        ("pytorch_model.bin", b"\x1f\x8b\x08\0\0", "compressed with gzip: unpack it first"),
        ("tokenizer.json", b"\n<!DOCTYPE html><html>", r"a web page \(HTML\), .*: download the file again"),
        ("config.json", POINTER, r"a Git-LFS pointer: .* run git lfs pull"),
    ],
)
def test_a_file_of_the_policy_that_is_of_another_format_is_named_with_what_to_do(
    tmp_path, hub, name, content, said
):
    folder = tmp_path / "model"
    folder.mkdir()
    for known in ("config.json", "tokenizer.json"):
        (folder / known).write_text("{}")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"a": torch.ones(1)}, folder / "training_args.bin")  # a ZIP archive that belongs there
    (folder / "README.md").write_text("<html>")
    require_model(str(folder))
    (folder / name).write_bytes(content)
    hub("a/b", folder)
    for path in (folder, "a/b"):
        with pytest.raises(PreflightError, match=f"model.path={path}: {name} is {said}"):
            require_model(str(path))


def test_a_model_that_is_not_on_the_hub_is_refused_before_the_start(tmp_path, hub):
    name = "Qwen/Qwen3-4B-Instruct-9999"
    with pytest.raises(PreflightError, match=f"path={name}: HF_HUB_OFFLINE is set.*hf download {name}"):
        require_model(name)
    with pytest.raises(PreflightError, match="path=models/mine/best: .*OWNER/NAME"):
        require_model("models/mine/best")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    folder = hub(name, tmp_path / "model")
    with pytest.raises(PreflightError, match="the cache has no weights of it"):
        require_model(name)
    (folder / "model.safetensors").write_text("")
    require_model(name)


@pytest.mark.parametrize("error", [errors.RepositoryNotFoundError, errors.GatedRepoError, TimeoutError])
def test_what_the_hub_answers_is_said(hub, monkeypatch, error):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def download(name, file, **_):
        raise error.__new__(error)

    monkeypatch.setattr("verl_credit.recipe.model_files.ask_hub", lambda name: None)
    with pytest.raises(HubError, match=f"{error.__name__}.*hf download a/b"):
        fetch_config("a/b", download)


def test_without_a_network_the_hub_is_asked_once_and_no_retry_is_printed(hub, monkeypatch, caplog):
    """A model that is not here, and the tokenizer of one."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a retry"))
    with dead_port() as url:
        where = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", where)
        with pytest.raises(HubError, match="refused.*hf download a/b"):
            fetch_config("a/b")
        with pytest.raises(NotHere, match="the tokenizer of a/b cannot be loaded here"):
            load_tokenizer(OmegaConf.create({"path": "a/b"}))
    assert caplog.text == ""


SEARCH = Search(timeout_s=5.0, max_retries=0).model_dump()


@pytest.fixture
def server():
    """Search-R1's script has POST /retrieve alone: no readiness check, no /info."""
    with scripted_server() as running:
        yield running


def settings(url, **changes):
    return OmegaConf.create({**SEARCH, "url": url, **changes})


def test_a_retriever_that_answers_is_ready(server, monkeypatch):
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:9"
    )  # the tool's client uses no proxy, nor does the check
    for url in (server.url, [server.url], f"{server.url}/retrieve"):
        fingerprint, said = ask_servers(settings(url))
        assert fingerprint is None
        assert said == f"{server.url} names no index (GET /info: status 404)"


def test_a_retriever_that_answers_nonsense_is_not_ready(server):
    server.script = [(200, {"detail": "no"})]
    with pytest.raises(PreflightError, match="not ready"):
        ask_servers(settings(server.url))
    with pytest.raises(PreflightError, match="search.url has no value"):
        ask_servers(settings(None))


@pytest.mark.parametrize(
    "info, said",
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1], 'no "fingerprint" of 1 to 200'),
        ({"fingerprint": 5}, 'no "fingerprint"'),
        ({"fingerprint": "a" * 201}, 'no "fingerprint"'),
        ({"fingerprint": "a\n\x1b[2J"}, 'no "fingerprint"'),
    ],
)
def test_an_info_of_another_kind_names_no_index_and_harms_nobody(server, info, said):
    server.info = info
    fingerprint, told = ask_servers(settings(server.url))
    assert fingerprint is None and said in told


@pytest.mark.parametrize("other, said", [({"fingerprint": "cd34"}, "cd34"), (None, "names no index")])
def test_one_index_is_served_by_all_and_is_the_expected_one(server, other, said):
    server.info = {"fingerprint": "ab12", "rows": 3}
    with scripted_server() as second:
        both = settings([f"{server.url}/retrieve", second.url])
        second.info = server.info
        assert ask_servers(both) == ("ab12", f"{server.url} ab12; {second.url} ab12")
        second.info = other
        with pytest.raises(PreflightError, match=f"the same index.*{server.url} ab12; {second.url} {said}"):
            ask_servers(both)
        expected = settings(second.url, index_fingerprint="ab12")
        with pytest.raises(PreflightError, match=f"search.index_fingerprint=ab12 .*{second.url} {said}"):
            ask_servers(expected)
        second.info = server.info
        assert ask_servers(expected)[0] == "ab12"


def test_one_server_of_several_that_is_down_is_named(server):
    with dead_port() as dead, pytest.raises(PreflightError, match=f"not ready.*{dead}"):
        ask_servers(settings([server.url, dead]))


def test_the_token_is_sent_and_never_shown(server, monkeypatch):
    guarded = settings(server.url, token_env="RETRIEVER_TOKEN")
    with pytest.raises(PreflightError, match="search.token_env=RETRIEVER_TOKEN"):
        ask_servers(guarded)
    monkeypatch.setenv("RETRIEVER_TOKEN", "s3cret")
    ask_servers(guarded)
    assert [headers["Authorization"] for headers in server.request_headers] == ["Bearer s3cret"] * 2
    server.script = [(401, b"who are you?")]
    with pytest.raises(PreflightError, match="status 401") as caught:
        ask_servers(guarded)
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("RETRIEVER_TOKEN", "s3cret\n")
    with pytest.raises(PreflightError, match="token: ") as caught:
        ask_servers(guarded)
    assert "s3cret" not in str(caught.value)


def started(tmp_path, rows, url):
    """The exit code of `train` on these rows."""
    file = write(tmp_path / "train.parquet", rows)
    arguments = [
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"search.url={url}",
        f"run_dir={tmp_path}/run",
    ]
    arguments += [f"actor_rollout_ref.model.path={policy(tmp_path)}", "search.require_schema=false"]
    return main(["train", "--config-name", "search_cpu", *arguments])


@pytest.mark.slow
def test_the_index_and_what_the_template_decides_go_into_the_run_s_configuration(
    server, tmp_path, monkeypatch, capsys
):
    """What the trainer, the checkpoint and config.yaml read."""
    server.info = {"fingerprint": "ab12"}
    seen = []
    monkeypatch.setattr("verl_credit.host.process.launch.check_with_verl", seen.append)
    monkeypatch.setattr("verl_credit.host.process.launch.launch", lambda config, say: seen.append(config))
    assert started(tmp_path, [GOOD] * 8, server.url) == 0
    said = capsys.readouterr().out
    assert "the longest answers of a row: 5 x 2 tokens" in said
    assert "auto: multi_turn.format=hermes, multi_turn.max_parallel_calls=4" in said
    saved = OmegaConf.load(tmp_path / "run/config.yaml")
    for config in (*seen, saved):  # what the template decides
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        assert (multi_turn.format, multi_turn.max_parallel_calls) == ("hermes", 4)
    assert [config.search.index_fingerprint for config in seen] == ["ab12"] * 2
    assert saved.search.index_fingerprint == "ab12"


@pytest.mark.slow
def test_train_without_a_retriever_exits_4_and_says_what_to_do(tmp_path, capsys):
    with dead_port() as url:
        assert started(tmp_path, [GOOD], url) == 4
    said = capsys.readouterr().out
    assert f"search.url={url}: the retriever is not ready" in said and "verl-credit-retriever serve" in said
