"""A loss of the user's is taken where the recipe names its module, and verl has it once that is imported."""

import pytest

from kit.recipes import check, refused
from verl_credit.config.keys import LOSS
from verl_credit.errors import ConfigError
from verl_credit.host.process.verl_checks import check_names, register_all
from verl_credit.recipe.rules.own import IN_ENVIRONMENT, MODULES, own_modules

KEY = f"{LOSS}.loss_mode"
MINE = """
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("{name}")
def loss(old_log_prob, log_prob, advantages, response_mask, **others):
    return -(log_prob * advantages * response_mask).sum(), {{}}
"""


@pytest.fixture
def registry(monkeypatch):
    """verl's losses and ours; what a test adds is gone after it."""
    from verl.trainer.ppo import core_algos

    register_all()
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))


def module(folder, monkeypatch, name, text=""):
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


@pytest.mark.slow
def test_a_loss_that_its_module_registers_is_taken(tmp_path, monkeypatch, registry):
    name = module(tmp_path, monkeypatch, "losses_a", MINE.format(name="mine_a"))
    for value in (name, f"[json,{name}]"):
        check_names(check(f"{KEY}=mine_a", f"{MODULES}={value}"))


def test_a_name_that_no_module_registers_is_refused_before_ray(tmp_path, monkeypatch, registry):
    name = module(tmp_path, monkeypatch, "losses_b", MINE.format(name="mine_b"))
    config = check(f"{KEY}=mine_bb", f"{MODULES}={name}")
    with pytest.raises(ConfigError) as caught:
        check_names(config)
    assert (caught.value.key, caught.value.value) == (KEY, "mine_bb")
    assert {"mine_b", "turn_ppo", "vanilla"} <= set(caught.value.accepted)
    assert "did you mean mine_b?" in str(caught.value)


@pytest.mark.slow
def test_where_nothing_could_register_it_a_name_is_refused_at_once(monkeypatch):
    monkeypatch.delenv(IN_ENVIRONMENT, raising=False)
    error = refused(f"{KEY}=vanila")
    assert (error.key, error.value) == (KEY, "vanila") and {"turn_ppo", "vanilla"} <= set(error.accepted)
    assert "(did you mean vanilla?)" in str(error) and f"a module in {MODULES} registers" in str(error)
    monkeypatch.setenv(IN_ENVIRONMENT, "a,b")
    assert own_modules(check(f"{KEY}=vanila")) == ["a", "b"]


@pytest.mark.parametrize(
    "text, reason", [("raise OSError('no\\nfile')", "OSError: no file"), (None, "ModuleNotFoundError")]
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text, reason):
    name = "losses_absent" if text is None else module(tmp_path, monkeypatch, "losses_c", text)
    with pytest.raises(ConfigError) as caught:
        check_names(check(f"{MODULES}={name}"))
    assert (caught.value.key, caught.value.value) == (MODULES, name)
    assert caught.value.accepted.startswith(f"it cannot be imported: {reason}")


def test_a_module_is_a_name():
    error = refused(f"{MODULES}=3")
    assert (error.key, error.value) == (MODULES, 3) and "a list of them, or null" in error.accepted
