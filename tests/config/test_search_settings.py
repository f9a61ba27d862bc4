"""The `search` section of a configuration: what is refused at the start, and the client and tool made of it."""

import asyncio

import pytest
from omegaconf import OmegaConf, open_dict

from kit.scripted_server import scripted_server
from verl_credit.config.compose import load_config
from verl_credit.config.keys import Search
from verl_credit.config.rules import validate
from verl_credit.errors import ConfigError
from verl_credit.search.faults import SearchFault
from verl_credit.search.settings import client_for, token_of

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "run_dir=x"]
ADDRESS = "search.url=http://127.0.0.1:9"


def section(*overrides):
    config = load_config("search_cpu", [*OWN, ADDRESS, *overrides])
    validate(config)
    return config.search


def test_every_key_has_a_default_and_a_check():
    assert set(section()) == set(Search.model_fields)


@pytest.mark.parametrize(
    "override",
    [
        "search.url=null",
        "search.url=[http://a:8000,http://b:8000/retrieve]",
        "search.token_env=RETRIEVER_TOKEN",
        "search.index_fingerprint=ab12",
        "search.shuffle_seed=3",
        "search.breaker_pause_s=0.5",
    ],
)
def test_what_is_accepted(override):
    section(override)


@pytest.mark.parametrize(
    "override, said",
    [
        ("search.token=s3cret", "unknown key search.token"),
        ("+search.tokn_env=X", r"unknown key search.tokn_env \(did you mean search.token_env\?\)"),
        ("search.token_env=5", "search.token_env=...: expected the name of an environment variable"),
        ("search.token_env=''", "search.token_env=...: expected the name"),
        ("search.breaker_failures=0", "search.breaker_failures=0: expected a whole number of at least 1"),
        ("search.breaker_failures=2.5", "search.breaker_failures=2.5: expected a whole number"),
        ("search.breaker_failures=true", "search.breaker_failures=True: expected a whole number"),
        ("search.breaker_pause_s=0", "search.breaker_pause_s=0: expected a number"),
        ("search.breaker_pause_s=soon", "search.breaker_pause_s='soon': expected a number"),
        ("search.url=5", "search.url=5: expected an address"),
        ("search.url=[]", r"search.url=\[\]: expected an address"),
        ("search.url=[http://a,5]", "search.url=.*5.*: expected an address"),
        (
            "search.url=localhost:8000",
            "search.url=localhost:8000: address 'localhost:8000'; expected http://HOST:PORT",
        ),
        ("search.shuffle_seed=yes", "search.shuffle_seed=.*: expected a whole number"),
        ("search.index_fingerprint=12", "search.index_fingerprint=12: expected text"),
        ("~search.url", "search.url is missing"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(ConfigError, match=said) as caught:
        section(override)
    assert "\n" not in str(caught.value) or "Keys accepted" in str(caught.value)


def test_neither_a_token_in_the_wrong_place_nor_a_password_is_shown():
    with pytest.raises(ConfigError) as caught:
        section("search.token_env=sk-s3cret")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        section("search.url=[ftp://me:s3cret@host]")
    assert "s3cret" not in str(caught.value) and "***@host" in str(caught.value)


def test_an_unknown_key_of_a_recipe_file_is_refused_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config, pkg://verl_credit_recipes]}\n"
        "defaults: [ppo_trainer, credit_defaults, {hardware: laptop}, _self_]\n"
        "run_dir: here\nsearch: {brekaer_failures: 3}\n"
    )
    config = load_config("mine", OWN, str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean search.breaker_failures"):
        validate(config)


def test_the_token_comes_from_the_environment_and_stays_out_of_the_configuration(monkeypatch):
    settings = section("search.token_env=RETRIEVER_TOKEN")
    for value in (None, ""):
        monkeypatch.setenv("RETRIEVER_TOKEN", value) if value is not None else None
        with pytest.raises(ValueError, match="search.token_env=RETRIEVER_TOKEN: .*not set, or empty"):
            client_for(settings)
    monkeypatch.setenv("RETRIEVER_TOKEN", "s3cret")
    assert token_of(settings) == "s3cret" and token_of(section()) is None
    with scripted_server() as server:
        with open_dict(settings):
            settings.url = server.url
        asyncio.run(client_for(settings).search("river"))
        assert server.request_headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in OmegaConf.to_yaml(settings)
    assert "s3cret" not in repr(client_for(settings))


def test_every_setting_reaches_the_client():
    changed = ["search.topk=2", "search.timeout_s=7", "search.max_retries=5", "search.max_page_chars=9"]
    client = client_for(section(*changed, "search.shuffle_seed=4", "search.url=[http://a,http://b]"))
    assert (client.topk, client.timeout_s, client.max_retries, client.max_page_chars) == (2, 7, 5, 9)
    assert client.shuffle_seed == 4 and client.urls == ["http://a/retrieve", "http://b/retrieve"]
    with scripted_server() as server:
        server.script = [(500, b"")] * 9
        client = client_for(section(f"search.url={server.url}", "search.breaker_failures=2"))

        async def run():
            codes = []
            for _ in range(3):
                (found,) = await asyncio.gather(client.search("river"), return_exceptions=True)
                codes.append(found.code)
            await client.aclose()
            return codes

        assert asyncio.run(run()) == ["http_5xx", "http_5xx", "breaker_open"]


def test_the_index_of_the_run_reaches_the_client():
    with scripted_server() as server:
        server.script = [(200, {"result": []}, {"X-Index-Fingerprint": "cd34"})]
        settings = section(f"search.url={server.url}", "search.index_fingerprint=ab12")
        with pytest.raises(SearchFault, match="bad_answer: .*'cd34'; search.index_fingerprint=ab12"):
            asyncio.run(client_for(settings).search("river"))


def test_the_tool_shows_pages_cut_as_the_recipe_says_and_counts_retries():
    from verl_credit.host.rollout.search_tool import SearchTool

    contents = ["Title\n" + "x" * 5000, "y" * 5000]
    answer = [{"document": {"id": n, "contents": text}, "score": 1.0} for n, text in enumerate(contents)]
    with scripted_server() as server:
        server.script = [(429, b""), (200, {"result": [answer]})]
        tool = SearchTool(section(f"search.url={server.url}", "search.max_page_chars=20"))

        async def run():
            found = await tool.lookup("river")
            await tool.client.aclose()
            return found

        text, page_ids, retries = asyncio.run(run())
    assert text == f"Page 1: Title\n{'x' * 20}\nPage 2: {'y' * 20}"
    assert (page_ids, retries) == (["0", "1"], 1)
