"""The `search` section of a configuration: the client and the tool that are made of it."""

import asyncio

import pytest
from omegaconf import OmegaConf, open_dict

from kit.recipes import OWN, check
from kit.scripted_server import scripted_server
from verl_credit.turns.rollout.search.client import client_for, token_of
from verl_credit.turns.rollout.search.faults import SearchFault


def section(*overrides):
    return check(*OWN, *overrides, recipe="search_cpu").search


@pytest.mark.slow
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
    client = client_for(section(*changed, "search.url=[http://a,http://b]"))
    assert (client.topk, client.timeout_s, client.max_retries, client.max_page_chars) == (2, 7, 5, 9)
    assert client.urls == ["http://a/retrieve", "http://b/retrieve"]


def test_the_index_of_the_run_reaches_the_client():
    with scripted_server() as server:
        server.script = [(200, {"result": []}, {"X-Index-Fingerprint": "cd34"})]
        settings = section(f"search.url={server.url}", "search.index_fingerprint=ab12")
        with pytest.raises(SearchFault, match="bad_answer: .*'cd34'; search.index_fingerprint=ab12"):
            asyncio.run(client_for(settings).search("river"))


def test_the_tool_shows_pages_cut_as_the_recipe_says_and_counts_retries():
    from verl_credit.host.rollout.search_agent import SearchTool

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
