"""A reward function of one's own gets what it has parameters for, and is refused by name where verl could not call it."""

import pytest
from verl.trainer.ppo.reward import get_custom_reward_fn

from kit.recipes import load_config
from verl_credit.errors import ConfigError
from verl_credit.host.process.reward_check import check_reward_function
from verl_credit.recipe.rules.known import REWARD

ROW = {"data_source": "lab", "solution_str": "c", "ground_truth": "c", "extra_info": {}}
FOUR = "data_source, solution_str, ground_truth, extra_info"


@pytest.fixture
def scored(tmp_path):
    """Writes a function with these parameters, and calls it as verl's workers do after the check."""

    def run(parameters, *overrides, body="return sorted(set(locals()) - set(row))"):
        path = tmp_path / "mine.py"
        path.write_text(f"row = {list(ROW)}\ndef score({parameters}):\n    {body}\n")
        config = load_config("lab", [f"{REWARD}.path={path}", f"{REWARD}.name=score", *overrides])
        check_reward_function(config)
        return get_custom_reward_fn(config)(**ROW)

    return run


@pytest.mark.parametrize(
    "parameters, seen",
    [
        (f"{FOUR}=None", []),  # a function written for stock verl
        (f"{FOUR}, format_penalty=0.5", ["format_penalty"]),  # one for an earlier version of verl_credit
        (f"{FOUR}, *, include_reasoning", ["include_reasoning"]),
        (f"{FOUR}, **others", ["others"]),
    ],
)
def test_a_function_gets_those_of_our_values_that_it_has_parameters_for(scored, parameters, seen):
    assert scored(parameters) == seen


def test_one_with_any_parameters_gets_all_and_one_s_own_values_arrive(scored):
    assert scored("**row_and_ours", body="return len(row_and_ours)") == 6
    own = f"+{REWARD}.reward_kwargs.scale=2", f"{REWARD}.reward_kwargs.format_penalty=0.25"
    assert scored(f"{FOUR}, scale, format_penalty", *own, body="return scale + format_penalty") == 2.25


@pytest.mark.parametrize(
    "parameters, override, said",
    [
        (FOUR, "format_penalty=0.5", "format_penalty=0.5: .*mine.py: score has no parameter of that name; it takes no f"),
        (f"{FOUR}, scale=1", "+scalee=2", "reward_kwargs.scalee=2: .* it takes scale"),
        ("data_source, solution_str, ground_truth", None, "score has no parameter extra_info, which verl gives; verl"),
        (f"{FOUR}, threshold", None, "score has a parameter threshold without a value; verl calls it with data_source, "),
    ],
)  # fmt: skip
def test_a_function_that_verl_could_not_call_is_refused_with_the_parameter(
    scored, parameters, override, said
):
    plus = override and override.startswith("+")
    given = [f"{'+' * bool(plus)}{REWARD}.reward_kwargs.{override.strip('+')}"] if override else []
    with pytest.raises(ConfigError, match=said):
        scored(parameters, *given)


@pytest.mark.parametrize("name, said", [("other", "Object not found"), ("score", "ZeroDivisionError")])
def test_a_file_that_cannot_be_loaded_is_refused_with_its_reason(tmp_path, name, said):
    path = tmp_path / "mine.py"
    path.write_text("def score(**row):\n    return 1\n" + ("1 / 0\n" if name == "score" else ""))
    config = load_config("lab", [f"{REWARD}.path={path}", f"{REWARD}.name={name}"])
    with pytest.raises(
        ConfigError, match=f"mine.py: its function {name} cannot be loaded: .*{said}"
    ) as refused:
        check_reward_function(config)
    assert refused.value.key == f"{REWARD}.path"
