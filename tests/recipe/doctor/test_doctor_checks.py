"""The one list of checks: who makes which, what a failure does to the others, and the command on a faked machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.machine import FAIL, MACHINE, PASS, SKIP, WARN, on_cuda, says
from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.cli.recipe import doctor
from verl_credit.cli.train import start, with_verl
from verl_credit.config.keys import AUTO
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.recipe.doctor import checks
from verl_credit.recipe.doctor.checks import CHECKS, Check, Stage, Train, before_training, examine, require
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.status import Status, failed, passed, skipped, warned

LAB = load_config("lab", [])


def check(name, found=None, needs=(), train=Train.ALWAYS, stage=Stage.MACHINE, error=None):
    def function(context):
        if error is not None:
            raise error
        return found

    return Check(name, stage, train, function, "what is right", needs)


def test_names_are_told_apart_and_a_check_needs_earlier_ones():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, entry in enumerate(CHECKS):
        assert set(entry.needs) <= {"recipe", *names[:place]}, entry.name


def test_the_documented_list_is_the_list():
    rows = [f"| `{c.name}` | {c.stage} | {c.right} | {c.train} |" for c in CHECKS]
    table = "\n".join(["| check | stage | what has to hold | `train` makes it |", "|---|---|---|---|", *rows])
    assert table in (Path(__file__).parents[3] / "docs" / "plan.md").read_text(), f"write there:\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize("config, without", [(LAB, ["no", "on CUDA"]), (on_cuda(LAB), ["no"])])
def test_what_train_makes_is_what_explain_names(config, without, capsys):
    assert [c for c in CHECKS if c.train not in without] == before_training(config)
    if config is LAB:
        assert main(["explain"]) == 0
        names = ", ".join(check.name for check in before_training(config))
        assert f"checked before the start: {names}\n" in capsys.readouterr().out


def test_a_check_that_breaks_or_refuses_fails_and_ends_no_other():
    listed = [
        check("odd", error=KeyError("x")),
        check("refuses", error=PreflightError("a.b=1: nobody there")),
        check("several", [passed("one", name="a"), passed("two")]),
    ]
    odd, refuses, *several = examine(Context(MACHINE), listed)
    assert says(odd, FAIL, "the check itself broke: KeyError: 'x'") and odd.name == "odd"
    assert (refuses.name, refuses.found, refuses.right) == ("refuses", "a.b=1: nobody there", "what is right")
    assert [(r.name, r.status) for r in several] == [("a", PASS), ("several", PASS)]


def test_what_needs_a_check_that_failed_or_was_skipped_is_skipped():
    listed = [
        check("a", failed("bad", "good")),
        check("b", passed("never asked"), ("a",)),
        check("c", passed("never asked"), ("b",)),
        check("d", warned("odd")),
        check("e", passed("asked"), ("d",)),
        check("f", passed("never asked"), ("recipe",)),
    ]
    found = examine(Context(MACHINE), listed, [skipped("no recipe was given", "recipe")])
    told = {result.name: (result.status, result.found) for result in found}
    assert told["b"] == told["c"] == (SKIP, "see a") and told["f"] == (SKIP, "see recipe")
    assert told["e"] == (PASS, "asked")


def test_train_is_refused_by_the_first_failure_of_a_stage(monkeypatch):
    def listed(*entries):
        monkeypatch.setattr(checks, "CHECKS", entries)
        return require(Context(MACHINE, LAB), Stage.MACHINE)

    ran = listed(
        check("a", warned("odd")),
        check("b", failed("bad", "good"), train=Train.NEVER),
        check("c", failed("bad", "good"), train=Train.ON_CUDA),
        check("d", failed("bad", "good"), stage=Stage.INPUTS),
    )
    assert [(entry.name, result.status) for entry, result in ran] == [("a", WARN)]
    with pytest.raises(PreflightError, match="^b: bad; good; so$"):
        listed(check("b", failed("bad", "good", "so")))
    with pytest.raises(PreflightError, match="^a.b=1: nobody there$"):
        listed(check("b", error=PreflightError("a.b=1: nobody there")))
    with pytest.raises(PreflightError, match="^b: the check itself broke: KeyError"):
        listed(check("b", error=KeyError("x")))


def test_train_keeps_warnings_by_kind_and_tells_what_it_is_asked_to(monkeypatch):
    def entry(*, event="idle", shown=False, found):
        return replace(check("c", found), event=event, shown=shown)

    kept, spoken = [], []
    progress = SimpleNamespace(note=lambda *words: kept.append(words), say=spoken.append)
    listed = (
        entry(found=warned("odd", "even")),
        entry(found=warned("2 left out"), event="data"),
        entry(found=passed("index: x"), shown=True),
        entry(found=passed("fine")),
        entry(found=skipped("nothing"), shown=True),
    )
    monkeypatch.setattr(checks, "CHECKS", listed)
    start._check(Context(MACHINE, LAB), progress, Stage.MACHINE)
    assert kept == [("idle", "warning: c: odd; even"), ("data", "2 left out")] and spoken == ["index: x"]


@pytest.mark.slow
def test_the_checks_with_verl_as_doctor_makes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(with_verl, "set_environment", lambda config: None)
    tokenizer = make_tokenizer()  # its template writes no tools
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    given = ["data.train_files=x", "data.val_files=x", "search.url=http://x", "search.require_schema=false"]
    given += ["actor_rollout_ref.rollout.multi_turn.function_tool_path=nowhere.py"]
    config = load_config("search_cpu", [*given, f"actor_rollout_ref.model.path={tmp_path}"])
    listed = [entry for entry in CHECKS if entry.name in with_verl.WITH_VERL]
    results = examine(Context(MACHINE, config, doctor._with_verl), listed)
    found = {result.name: result for result in results}
    assert says(found["verl"], PASS, "verl accepts the configuration")
    assert says(found["template"], PASS, "auto: multi_turn.format=hermes, multi_turn.max_parallel_calls=4")
    assert says(found["tools"], FAIL, "nowhere.py: verl cannot load it")
    assert (OmegaConf.select(config, FORMAT), OmegaConf.select(config, AT_ONCE)) == ("hermes", 4)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, with_verl.__name__, None)
    missing = examine(Context(MACHINE, config, doctor._with_verl), listed)[0]
    assert says(missing, FAIL, "verl", "pip install 'verl-credit[verl]'")


@pytest.mark.slow
def test_without_a_tokenizer_auto_stays_in_doctor_and_is_refused_by_train(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (entry,) = [entry for entry in CHECKS if entry.name == "template"]
    given = "actor_rollout_ref.model.path=acme/absent"

    def context(*more, **options):
        config = load_config("search_cpu", [given, *more])
        return Context(MACHINE, config, with_verl.check_with_verl, **options)

    looked = context()
    assert (
        examine(looked, [entry])[0].status is Status.SKIP and OmegaConf.select(looked.config, FORMAT) == AUTO
    )
    with pytest.raises(
        ConfigError, match=f"{FORMAT}=auto: the tokenizer of acme/absent cannot be loaded here"
    ):
        entry.function(context(may_fetch=True))
    nothing_searches = ("search.max_searches=0", "algorithm.info_gain_norm_mode=none")
    for more, form in (((f"{FORMAT}=glm",), "glm"), (nothing_searches, "hermes")):
        named = context(*more, may_fetch=True)
        assert examine(named, [entry])[0].status is Status.SKIP
        assert (OmegaConf.select(named.config, FORMAT), OmegaConf.select(named.config, AT_ONCE)) == (form, 4)


@pytest.fixture
def faked(monkeypatch):
    """The command on MACHINE, with these results alone."""

    def fake(*results):
        monkeypatch.setattr("verl_credit.recipe.this_machine.gather", lambda **_: MACHINE)
        monkeypatch.setattr(checks, "examine", lambda context, first: [*first, *results])

    return fake


PYTHON = passed("Python 3.11.9", "python")


def test_exit_codes_and_json(faked, capsys):
    faked(PYTHON)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "Python 3.11.9" in said and said.endswith("1 passed, 1 not applicable\n")
    faked(PYTHON, failed("broken", "whole", "fix it", "x"))
    assert main(["doctor", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert found["checks"][-1] == {
        "name": "x", "status": "fail", "found": "broken", "right": "whole", "fix": "fix it",
    }  # fmt: skip
    faked(warned("odd", "even", name="x"))
    assert main(["doctor"]) == 0


def test_a_recipe_that_is_refused_fails_and_the_machine_is_still_looked_at(faked, capsys):
    faked(PYTHON)
    assert main(["doctor", "--config-name", "lab", "algorithm.gama=1"]) == 4
    said = capsys.readouterr().out
    assert "did you mean algorithm.gamma" in said and "Python 3.11.9" in said
    assert main(["doctor", "algorithm.gamma=1"]) == 4
    assert "--config-name NAME" in capsys.readouterr().out
