"""Own operators are tried before the start: one call with the params of the run; nothing of Python's own is ever called."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.recipes import check, refused
from verl_credit.config.keys import LOSS
from verl_credit.credit import plugins
from verl_credit.credit.laws import check as check_laws
from verl_credit.credit.laws import own_subject

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
ALONE = ("algorithm.info_gain_norm_mode=none", f"{LOSS}.dynamic_clip=false")
KEYS = {
    "outcome": "advantage_mode",
    "transform": "transform_mode",
    "uncertainty": "uncertainty_kind",
    "algorithm": "algorithm_mode",
    "detector": "planning.detector",
}

MINE = """
import shutil, subprocess
from functools import partial
from os import system

gain = lambda rewards, params: [params["gain"] * r for r in rewards]
by_class = type("ByClass", (), {"__call__": lambda self, rewards: rewards})()
def nan(rewards): return [float("nan") for _ in rewards]
def leaves(rewards): raise SystemExit("bye")
def short(context): return context.logprobs_G[:1]
def fine(context): return context.logprobs_G
def number(context): return 3
def level(context): return [context.params["level"]] * len(context.logprobs)
def detector(token_ids, mask, decode): return mask[:, :1]
def two_arguments(token_ids, mask): return mask
def all_of_it(token_ids, mask, decode): return mask & (len(decode([1])) == 1)
bound = partial(shutil.rmtree, ignore_errors=True)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_tried.py").write_text(MINE)
    yield "mine_tried"
    sys.modules.pop("mine_tried", None)


def chosen(kind, path, *more):
    return [f"algorithm.{KEYS[kind]}={path}", *ALONE, *more]


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("outcome", "gain", "a call with a small batch raised KeyError: 'gain'"),
        ("outcome", "nan", "finite numbers"),
        ("outcome", "leaves", "SystemExit: bye"),
        ("transform", "short", "returned 1 lists for a group of"),
        ("algorithm", "number", "returned int for a group of"),
        ("uncertainty", "level", "KeyError: 'level'"),
        ("detector", "detector", "it returned the shape"),
        ("detector", "two_arguments", "TypeError: two_arguments"),
    ],
)  # fmt: skip
def test_what_an_operator_raises_or_returns_wrongly_is_said_before_the_start(mine, kind, name, message):
    error = refused(*chosen(kind, f"{mine}.{name}"))
    assert (error.key, error.value) == (f"algorithm.{KEYS[kind]}", f"{mine}.{name}")
    assert message in error.accepted and len(str(error).splitlines()) == 1
    params = {"outcome": "advantage_params", "uncertainty": "transform_params"}.get(kind)
    assert params is None or error.beside == (f"algorithm.{params}",)


@pytest.mark.parametrize(
    "kind, name, more",
    [
        ("outcome", "gain", ["+algorithm.advantage_params.gain=2"]),
        ("outcome", "by_class", []),
        ("uncertainty", "level", ["+algorithm.transform_params.level=0.5"]),
        ("transform", "fine", []),
        ("algorithm", "fine", []),
        ("detector", "all_of_it", []),
    ],
)
def test_an_operator_that_works_with_the_params_of_the_run_is_accepted(mine, kind, name, more):
    check(*chosen(kind, f"{mine}.{name}", *more))


THEIRS = ["os.system", "os.abort", "shutil.rmtree", "subprocess.call", "builtins.print", "sys.exit"]


@pytest.mark.parametrize(
    "kind, path",
    [
        pytest.param(kind, path, marks=[pytest.mark.slow] * (kind != "outcome" and path != "os.system"))
        for kind in KEYS
        for path in (*THEIRS, "mine_tried.system", "mine_tried.bound")
    ],
)
def test_what_is_pythons_own_is_refused_and_not_called(mine, kind, path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("it was called"))
    error = refused(*chosen(kind, path))
    assert (error.key, error.value) == (f"algorithm.{KEYS[kind]}", path) and "Python's own" in error.accepted


@pytest.mark.slow
def test_of_an_installed_package_only_a_declared_operator_is_called(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (folder / "mine_installed.py").write_text(
        "def erase(path): raise AssertionError('called')\ndef known(rewards): return rewards[:1]\n"
    )
    check(*chosen("outcome", "mine_installed.erase"))
    check(*chosen("transform", "mine_installed.erase"))
    for path, reason in (
        ("mine_installed.known", "returned 1 values"),
        ("numpy.frombuffer", "compiled code of numpy"),
    ):
        error = refused(*chosen("outcome", path))
        assert (error.key, error.value) == ("algorithm.advantage_mode", path) and reason in error.accepted


CLOSED = ("scorer", "type", "first_turn", "context", "aliases")


@pytest.mark.parametrize("key", [*(f"algorithm.info_gain_{name}" for name in CLOSED), f"{LOSS}.ratio_level"])
def test_what_cannot_be_plugged_in_is_refused_and_the_docs_say_so(key):
    error = refused(f"{key}=my_module.mine")
    assert (error.key, error.value) == (key, "my_module.mine")
    assert isinstance(error.accepted, list)  # of names, without dotted paths
    (paragraph,) = re.findall(r"\*\*Not pluggable\*\*.*?\n\n", DOCS.read_text(), re.DOTALL)
    assert f"{key.rpartition('.')[2]}`" in paragraph


@pytest.mark.slow
def test_the_examples_of_the_docs_keep_the_laws_with_the_params_that_the_docs_give(tmp_path, monkeypatch):
    text = DOCS.read_text()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_module.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    examples = [
        chosen("outcome", "my_module.best_of_group"),
        ["algorithm.transform_mode=my_module.late_tokens"],
    ]
    (given,) = re.findall(r"`(\+algorithm\.advantage_params\.[^`]+)`", text)
    try:
        check(*examples[0], given)
        assert "KeyError: 'gain'" in refused(*examples[0]).accepted
        check(*examples[1])
        check("algorithm.info_gain_norm_mode=my_module.reward_to_go", "+algorithm.turn_params.weight=1.0")
        (params,) = re.findall(r"my_module:best_of_group --params '(.*?)'", text)
        for name, own in (("best_of_group", json.loads(params)), ("late_tokens", {}), ("reward_to_go", {})):
            found = plugins.load(f"my_module.{name}", "operator")
            findings = check_laws(own_subject(found, name, params=own))
            assert [f for f in findings if f.wrong] == []
    finally:
        sys.modules.pop("my_module", None)
