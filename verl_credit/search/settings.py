"""The `search` section of a configuration: what it may say, and the client that it asks for."""

from __future__ import annotations

import difflib
import os
import re

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.errors import ConfigError
from verl_credit.search.client import SearchClient
from verl_credit.search.redact import redact
from verl_credit.search.servers import endpoint, loopback

KEYS = (
    "url",
    "topk",
    "max_searches",
    "max_new_tokens",
    "max_page_chars",
    "timeout_s",
    "max_retries",
    "breaker_failures",
    "breaker_pause_s",
    "token_env",
    "index_fingerprint",
    "shuffle_seed",
    "require_schema",
)
NUMBERS = {  # key: (smallest, largest, whole number?)
    "search.topk": (1, 1000, True),
    "search.max_searches": (0, 1000, True),
    "search.max_new_tokens": (1, float("inf"), True),
    "search.max_page_chars": (1, float("inf"), True),
    "search.timeout_s": (1e-3, float("inf"), False),
    "search.max_retries": (0, 100, True),
    "search.breaker_failures": (1, float("inf"), True),
    "search.breaker_pause_s": (1e-3, float("inf"), False),
}


def validate_search(config: DictConfig) -> None:
    """Unknown keys, and values that are no numbers; the numbers are checked with all others. Raises ConfigError."""
    try:
        settings = OmegaConf.to_container(config.search, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"search: {error}") from error
    for key in settings:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f" (did you mean search.{near[0]}?)" if near else ""
            raise ConfigError(f"unknown key search.{key}{hint}: accepted are {', '.join(KEYS)}")
    if gone := [key for key in KEYS if key not in settings]:
        raise ConfigError(f"search.{gone[0]} is missing: the recipe must list credit_defaults, which has it")
    _url(settings["url"])
    _reached_from_everywhere(config)
    name = settings["token_env"]
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
        # The value stays out of the message: it may be the token itself.
        raise ConfigError("search.token_env: expected the name of an environment variable, or null")
    expected = settings["index_fingerprint"]
    if expected is not None and not (isinstance(expected, str) and expected.strip()):
        raise ConfigError(
            f"search.index_fingerprint={expected!r}: expected text (put digits in quotes), or null"
        )
    seed = settings["shuffle_seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"search.shuffle_seed={seed!r}: expected a whole number, or null")


def _url(value) -> None:
    if value is None:
        return
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"search.url={redact(value)}: expected an address, a list of addresses, or null")
    for url in urls:
        try:
            endpoint(url)
        except ValueError as error:
            raise ConfigError(f"search.url: {error}") from error


def _reached_from_everywhere(config: DictConfig) -> None:
    """Agent loops, which search, run on all nodes."""
    nodes = config.trainer.nnodes
    if nodes == 1 or config.search.url is None or not config.search.max_searches:
        return
    for url in urls_of(config.search):
        if loopback(url):
            raise ConfigError(
                f"search.url={redact(url)} with trainer.nnodes={nodes}: agent loops search from every node, and that "
                "address is each node itself; give the address by which all of them reach the server, which has to listen "
                "there (verl-credit-retriever serve --host ADDRESS --allow-remote --token-file FILE)"
            )


def urls_of(settings) -> list[str]:
    """The addresses, one or several."""
    return [settings.url] if isinstance(settings.url, str) else list(settings.url)


def token_of(settings) -> str | None:
    """The token in the environment variable `search.token_env`. Raises ValueError when there is none."""
    if settings.token_env is None:
        return None
    token = os.environ.get(settings.token_env, "")
    if not token:
        raise ValueError(
            f"search.token_env={settings.token_env}: this environment variable is not set, or empty; "
            "export the servers' token in it where the run is started, and on every node"
        )
    return token


def client_for(settings) -> SearchClient:
    """The client of the tool, and of the check before the run. Raises ValueError."""
    return SearchClient(
        urls_of(settings),
        topk=settings.topk,
        timeout_s=settings.timeout_s,
        max_retries=settings.max_retries,
        max_page_chars=settings.max_page_chars,
        shuffle_seed=settings.shuffle_seed,
        token=token_of(settings),
        index_fingerprint=settings.index_fingerprint,
        breaker_failures=settings.breaker_failures,
        breaker_pause_s=settings.breaker_pause_s,
    )
