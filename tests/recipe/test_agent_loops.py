"""Recipes with tools and agent loops of the user's: what may be called, which rows fit, and what is refused."""

import pytest

from kit.idle import without_effect
from kit.recipes import load_config
from verl_credit.config.fit import DEFAULT, MOST
from verl_credit.errors import ConfigError
from verl_credit.host.process.verl_checks import check_names
from verl_credit.recipe.agent_loops import LISTED, MULTI_TURN, agents_of_rows, own_loops
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.rules import validate

TOOLS = f"{MULTI_TURN}.tool_config_path={__file__}"  # a file that is there, which these rules do not read
TURN_AGENT = f"{DEFAULT}=turn_agent"
NO_SEARCH = ("search.max_searches=0", "search.url=null")
OWN = "- {name: my_agent, _target_: my_loops.MyAgentLoop}\n"


def lab(*overrides):
    return load_config("lab", list(overrides))


def refused(*overrides) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(lab(*overrides))
    return caught.value


def listed(folder, text=OWN):
    (folder / "loops.yaml").write_text(text)
    return f"{LISTED}={folder}/loops.yaml"


def test_tools_without_a_search_train_with_turn_credit_under_the_turn_agent():
    validate(lab(TURN_AGENT, TOOLS, *NO_SEARCH))
    error = refused(TOOLS, "credit=grpo", *NO_SEARCH)
    assert (error.key, error.value) == tuple(
        TOOLS.split("=")
    ) and f"set {DEFAULT}=turn_agent" in error.accepted
    error = refused(*NO_SEARCH)
    assert (error.key, error.value) == ("search.max_searches", 0)
    assert "without a tool there is one turn" in error.accepted and f"{DEFAULT}=turn_agent" in error.accepted


def test_the_turn_agent_without_a_tool_is_refused():
    for searches in ("search.max_searches=0", "search.max_searches=2"):
        error = refused(TURN_AGENT, searches)
        assert (error.key, error.value) == (DEFAULT, "turn_agent")
        assert "function_tool_path name, and both are null" in error.accepted


def test_the_turns_that_verls_key_allows_fit_the_response():
    room = ("search.max_new_tokens=40", "data.max_response_length=200")
    validate(lab(TURN_AGENT, TOOLS, *NO_SEARCH, *room, f"{MOST}=5"))
    validate(lab(TURN_AGENT, TOOLS, *NO_SEARCH, *room))
    error = refused(TURN_AGENT, TOOLS, *NO_SEARCH, *room, f"{MOST}=6")
    assert (error.key, error.value) == ("data.max_response_length", 200)
    assert error.accepted == "at least 240" and f"{MOST}=6 turns of search.max_new_tokens=40" in str(error)


def test_a_loop_of_ones_own_has_its_own_budgets(tmp_path):
    own = (listed(tmp_path), f"{DEFAULT}=my_agent", f"{MOST}=1000")
    validate(lab(*own, "algorithm.info_gain_scorer=rows"))
    error = refused(*own, "algorithm.info_gain_scorer=server")
    assert (error.key, error.value) == ("algorithm.info_gain_scorer", "server")
    assert "take branch or rows" in error.accepted and f"with {DEFAULT}=my_agent: " in str(error)


@pytest.mark.parametrize("scorer", ["branch", "rows", "server"])
def test_scorers_count_the_contexts_of_the_turn_agent(scorer):
    from verl_credit.config.settings import CreditSettings
    from verl_credit.turns.score.scorers import SCORERS

    def said(*overrides):
        config = lab(TURN_AGENT, TOOLS, *NO_SEARCH, *overrides)
        return SCORERS[scorer].says(config, CreditSettings.from_config(config))

    most = f"{MOST}=3"
    assert "up to 3 " in said(most) and "per context" in said() and "up to" not in said()
    contexts = SCORERS[scorer].answers_behind_row(lab(TURN_AGENT, TOOLS, most))
    assert contexts == {"branch": 3, "rows": 1, "server": 0}[scorer]


def test_turns_that_the_search_agent_does_not_read_are_said(tmp_path):
    def said(*overrides):
        return [line for line in without_effect(lab(*overrides)) if MOST in line]

    assert said(f"{MOST}=3") == [f"{MOST}=3: search_agent has search.max_searches+1 turns"]
    assert said() == said(f"{MOST}=3", TOOLS, TURN_AGENT) == said(f"{MOST}=3", listed(tmp_path)) == []


def test_a_manager_that_hides_the_record_is_refused_with_any_tool():
    error = refused(TURN_AGENT, TOOLS, *NO_SEARCH, "reward.reward_manager.name=dapo")
    assert (error.key, error.value) == ("reward.reward_manager.name", "dapo")
    assert "use one of naive" in error.accepted and f"with {DEFAULT}=turn_agent: " in str(error)


def test_rows_may_name_the_loops_that_can_work(tmp_path):
    own = listed(tmp_path)
    assert agents_of_rows(lab(), tools=False) == ("search_agent",)
    assert agents_of_rows(lab(TOOLS), tools=True) == ("search_agent", "turn_agent")
    assert agents_of_rows(lab(TOOLS, TURN_AGENT, *NO_SEARCH, own), tools=True) == ("turn_agent", "my_agent")
    assert agents_of_rows(lab("credit=grpo", *NO_SEARCH), tools=False) == ("search_agent",)


def test_the_files_of_a_recipe_are_read_with_its_agent_loops(tmp_path):
    from kit.preflight import GOOD, write

    file = write(tmp_path / "rows.parquet", [{**GOOD, "agent_name": "my_agent"}])
    config = lab(listed(tmp_path), f"data.val_files={file}")
    assert len(Context(None, config).rows("data.val_files")) == 1


@pytest.mark.parametrize(
    "text, accepted",
    [
        ("- {name: a}\n", "expected a YAML file with a list of {name"),
        ("- a\n", "expected a YAML file"),
        ("a: [", "expected a YAML file"),
        ("[" * 3000, "expected a YAML file"),
        ("- {name: turn_agent, _target_: x.Y}\n", "it would replace turn_agent; rename your agent loop"),
        (None, "expected a YAML file"),
    ],
)
def test_a_file_of_agent_loops_that_verl_could_not_use_is_refused(tmp_path, text, accepted):
    path = listed(tmp_path, text) if text else f"{LISTED}={tmp_path}/none.yaml"
    error = refused(path)
    assert (error.key, error.value) == tuple(path.split("=")) and error.accepted.startswith(accepted)
    assert text is not None or "; FileNotFoundError: " in error.accepted


def test_the_loop_of_rows_without_a_name_writes_turn_ids(tmp_path):
    """verl's own loops are in its registry, too."""
    from verl_credit.host.process.verl_checks import register_all

    register_all()
    own = listed(tmp_path)
    assert own_loops(lab(own)) == ("my_agent",)
    for name in ("search_agent", "turn_agent", "my_agent"):
        check_names(lab(own, f"{DEFAULT}={name}"))
    with pytest.raises(ConfigError) as caught:
        check_names(lab(f"{DEFAULT}=tool_agent"))
    assert (caught.value.key, caught.value.value) == (DEFAULT, "tool_agent")
    assert caught.value.accepted == ["search_agent", "turn_agent"]
