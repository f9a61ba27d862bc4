"""Who may ask a server: its token, where that comes from, and the hosts it listens on."""

import asyncio
import logging

import pytest
from omegaconf import OmegaConf

from kit.retriever_fakes import FakeIndex, app_of, client_of
from kit.serving import served
from verl_credit.config.keys import Search
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs import check_retriever
from verl_credit.recipe.doctor.status import Status
from verl_credit_retriever.settings import TOKEN_VARIABLE, ServeSettings, check_host, read_token

TOKEN = "a-token-of-some-length"
ROUTES = [("GET", path) for path in ("/readyz", "/metrics", "/info", "/nothing")]


@pytest.mark.parametrize("method, path", [*ROUTES, ("POST", "/retrieve")])
def test_without_the_token_only_livez_answers(method, path, caplog):
    caplog.set_level(logging.DEBUG)
    app, encoder = app_of(token=TOKEN)
    body = {"queries": ["a"]}
    wrong = [
        None,
        "",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        "Bearer ",
        "Bearer ü",
    ]

    async def run():
        async with client_of(app) as client:
            for value in wrong:
                headers = {} if value is None else {"Authorization": value.encode()}
                answer = await client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in answer.text
            assert (await client.get("/livez")).status_code == 200
            assert encoder.encoded == []
            for scheme in ("bearer", "BEARER", "Bearer"):
                headers = {"Authorization": f"{scheme} {TOKEN}"}
                assert (await client.get("/info", headers=headers)).status_code == 200
            return await client.request(method, path, json=body, headers=headers)

    assert asyncio.run(run()).status_code == (404 if path == "/nothing" else 200)
    assert TOKEN not in caplog.text


def test_the_doctor_asks_a_protected_server_with_the_token(monkeypatch):
    """It used to ask /info once more without it, and to report a server that has none."""
    section = {
        **dict.fromkeys(Search.model_fields), "topk": 3, "max_searches": 2, "max_page_chars": 500,
        "timeout_s": 30.0, "max_retries": 0, "token_env": "SEARCH_TOKEN",
    }  # fmt: skip
    app, _ = app_of(token=TOKEN)
    with served(app) as port:
        url = f"http://127.0.0.1:{port}"
        config = OmegaConf.create({"search": {**section, "url": url}})
        monkeypatch.setenv("SEARCH_TOKEN", TOKEN)
        right = check_retriever(Context(None, config))
        monkeypatch.setenv("SEARCH_TOKEN", "another")
        with pytest.raises(PreflightError, match="401") as wrong:
            check_retriever(Context(None, config))
    assert (right.status, right.found) == (Status.PASS, f"index: {url} {FakeIndex.fingerprint}")
    assert "another" not in str(wrong.value)


def test_where_a_token_comes_from(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {}) == read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    with pytest.raises(ValueError, match="both given"):
        read_token(file, {TOKEN_VARIABLE: TOKEN})
    for bad in ("", " \n", "two words", "a\nb", "schlüssel"):
        file.write_text(bad, encoding="utf-8")
        for source in ((file, {}), (None, {TOKEN_VARIABLE: bad})):
            with pytest.raises(ValueError, match="expected one line of printable ASCII") as caught:
                read_token(*source)
            assert not bad.strip() or bad.strip() not in str(caught.value)


def test_settings_hide_the_token(tmp_path):
    assert TOKEN not in repr(ServeSettings(tmp_path / "index", tmp_path / "encoder", token=TOKEN))
    for wrong in ({"threads": 0}, {"port": -1}, {"port": 65536}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"--{name}={value}"):
            ServeSettings(tmp_path, tmp_path, **wrong)


def test_other_hosts_need_a_flag_and_get_a_warning():
    for host in ("127.0.0.1", "::1", "localhost"):
        assert check_host(host, allow_remote=False, token=False) is None
    with pytest.raises(ValueError, match="--host=0.0.0.0: not loopback; add --allow-remote"):
        check_host("0.0.0.0", allow_remote=False, token=True)
    assert "there is no token" in check_host("0.0.0.0", allow_remote=True, token=False)
    assert "unencrypted" in check_host("::", allow_remote=True, token=True)
