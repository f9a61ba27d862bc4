"""Recipes with tools and agent loops of the user's: what may be called, which rows fit, and what is refused."""

import pytest

from kit.recipes import load_config, refused
from verl_credit.config.fit import DEFAULT, MOST
from verl_credit.errors import ConfigError
from verl_credit.host.process.verl_checks import check_names
from verl_credit.names import LOOP_MANAGER
from verl_credit.recipe.agent_loops import LISTED, MULTI_TURN, agents_of_rows, may_call, own_loops
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import Reads
from verl_credit.recipe.rules import validate

TOOLS = f"{MULTI_TURN}.tool_config_path={__file__}"  # a file that is there, which these rules do not read
TURN_AGENT = f"{DEFAULT}=turn_agent"
NO_SEARCH = ("search.max_searches=0", "search.url=null")
OWN = "- {name: my_agent, _target_: my_loops.MyAgentLoop}\n"


def lab(*overrides):
    return load_config("lab", list(overrides))


def listed(folder, text=OWN):
    (folder / "loops.yaml").write_text(text)
    return f"{LISTED}={folder}/loops.yaml"


ROOM = ("search.max_new_tokens=40", "data.max_response_length=200")
WITHOUT_SEARCH = (TURN_AGENT, TOOLS, *NO_SEARCH)


@pytest.mark.parametrize(
    "given, refused_one, said",
    [
        ((TOOLS, "credit=grpo", *NO_SEARCH), TOOLS, f"set {DEFAULT}=turn_agent"),
        (NO_SEARCH, NO_SEARCH[0], f"{DEFAULT}=turn_agent"),
        ((TURN_AGENT, NO_SEARCH[0]), TURN_AGENT, "function_tool_path name, and both are null"),
        ((TURN_AGENT, "search.max_searches=2"), TURN_AGENT, "function_tool_path name, and both are null"),
        ((*WITHOUT_SEARCH, ROOM[1], "search.max_new_tokens=240"), ROOM[1], "at least 240"),
        (
            (*WITHOUT_SEARCH, "reward.reward_manager.name=dapo"),
            "reward.reward_manager.name=dapo",
            "use one of naive",
        ),
    ],
)
def test_what_fits_no_agent_loop_is_refused(given, refused_one, said):
    error = refused(*given)
    assert f"{error.key}={error.value}" == refused_one and said in error.accepted


@pytest.mark.slow
def test_tools_without_a_search_train_with_turn_credit_under_the_turn_agent():
    for room in (
        (),
        ROOM,
        (*ROOM, f"{MOST}=6"),
    ):  # as in verl, not all turns at full length have to fit the response
        validate(lab(*WITHOUT_SEARCH, *room))


@pytest.mark.slow
def test_a_loop_of_ones_own_has_its_own_budgets(tmp_path):
    own = (listed(tmp_path), f"{DEFAULT}=my_agent", f"{MOST}=1000")
    validate(lab(*own, "algorithm.info_gain_scorer=rows"))


@pytest.mark.parametrize("scorer", ["branch", "rows"])
def test_scorers_count_the_contexts_of_the_turn_agent(scorer):
    from verl_credit.config.settings import CreditSettings
    from verl_credit.turns.score.scorers import SCORERS

    def said(*overrides):
        config = lab(TURN_AGENT, TOOLS, *NO_SEARCH, *overrides)
        return SCORERS[scorer].says(config, CreditSettings.from_config(config))

    most = f"{MOST}=3"
    assert "up to 3 " in said(most) and "per context" in said() and "up to" not in said()
    contexts = SCORERS[scorer].answers_behind_row(lab(TURN_AGENT, TOOLS, most))
    assert contexts == {"branch": 3, "rows": 1}[scorer]


def test_rows_may_name_the_loops_that_can_work(tmp_path):
    own = listed(tmp_path)
    assert agents_of_rows(lab(), tools=False) == ("search_agent",)
    loop = "algorithm.turn_ids=loop"
    assert agents_of_rows(lab(TOOLS, loop), tools=True) == ("search_agent", "turn_agent")
    assert agents_of_rows(lab(TOOLS), tools=True) == ("search_agent", "turn_agent", "tool_agent")
    assert agents_of_rows(lab(TOOLS, TURN_AGENT, *NO_SEARCH, own, loop), tools=True) == (
        "turn_agent",
        "my_agent",
    )
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
    assert caught.value.accepted == ["env_agent", "search_agent", "turn_agent"]
    check_names(lab(f"{DEFAULT}=tool_agent", TOOLS))
    with pytest.raises(ConfigError):
        check_names(lab(f"{DEFAULT}=tool_agent", TOOLS, "algorithm.turn_ids=loop"))


class Half:
    def create(self):
        pass


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module.Manager", "ModuleNotFoundError"),
        (f"{__name__}.Absent", "AttributeError"),
        ("Manager", "ValueError"),
        (f"{__name__}.Half", "it has no generate_sequences"),
        (f"{__name__}.TURN_AGENT", "it has no create and no generate_sequences"),
    ],
)
def test_a_manager_of_agent_loops_that_verl_could_not_use_is_refused_before_ray(path, said):
    with pytest.raises(ConfigError) as caught:
        check_names(lab(f"{LOOP_MANAGER}={path}"))
    assert (caught.value.key, caught.value.value) == (LOOP_MANAGER, path) and said in caught.value.accepted


@pytest.mark.parametrize("path", ["null", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"])
def test_any_manager_with_verls_interface_is_taken(path):
    check_names(lab(f"{LOOP_MANAGER}={path}"))


def test_agents_of_a_manager_of_somebody_else_may_have_turns_without_a_tool_of_the_recipe():
    theirs = f"{LOOP_MANAGER}=verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"
    given = (*NO_SEARCH, "algorithm.info_gain_norm_mode=turn_gae", "algorithm.turn_values=group")
    assert may_call(lab(theirs, *given)) and not may_call(lab(*given))
    validate(lab(theirs, "algorithm.turn_signal=none", *given))
    assert Reads.of(lab(theirs, *given)).agents is None and Reads.of(lab(*given)).agents == ("search_agent",)
