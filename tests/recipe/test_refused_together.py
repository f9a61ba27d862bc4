"""All refusals of a kind come at once, in order; what follows from another refusal does not come."""

import pytest

from kit.recipes import load_config, refused
from verl_credit.cli import main
from verl_credit.errors import ConfigError, ConfigErrors
from verl_credit.recipe.older_verl import INSTEAD, RENAMED, remedy_of
from verl_credit.recipe.rules import validate

ROLLOUT = "actor_rollout_ref.rollout"


def keys_of(error) -> list[str]:
    return [one.key for one in (error.errors if isinstance(error, ConfigErrors) else [error])]


@pytest.mark.slow
def test_the_typos_of_a_file_are_one_answer(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [lab, _self_]\nseeed: 7\nalgorithm: {gama: 0.5}\ntrainer: {total_epoch: 3}\n"
        "search: {topk: many}\nactor_rollout_ref: {rollout: {temprature: 1}}\n"
    )
    with pytest.raises(ConfigErrors) as caught:
        validate(load_config("mine", (), str(tmp_path)))
    assert set(keys_of(caught.value)) == {
        "seeed",
        "algorithm.gama",
        "trainer.total_epoch",
        f"{ROLLOUT}.temprature",
    }
    assert main(["explain", "--config-name", "mine", "--config-dir", str(tmp_path)]) == 4
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[0].startswith("verl-credit explain: this would be refused: ")
    assert all(line.startswith("  also: ") for line in said[1:])
    for near in ("seed", "algorithm.gamma", "trainer.total_epochs", f"{ROLLOUT}.temperature"):
        assert sum(f"(did you mean {near}?)" in line for line in said) == 1


def test_overrides_that_hydra_refuses_come_together_and_before_what_the_rules_refuse():
    error = refused("max_turns=3", "seeed=1", "algorithm.gamma=4", f"{ROLLOUT}.n=1", "+data.shuffle=true")
    assert keys_of(error) == ["max_turns", "seeed", "data.shuffle"]
    assert "data.shuffle=true, without the +" in error.errors[2].accepted
    assert (error.key, error.accepted) == ("max_turns", error.errors[0].accepted)
    assert keys_of(refused("run_dir=[1", "search.topk=}", "seeed=1")) == ["run_dir", "search.topk"]


@pytest.mark.slow
def test_every_value_of_a_section_is_refused_at_once(capsys):
    wrong = ["algorithm.gamma=4", "algorithm.info_gain_type=x", "search.topk=-1"]
    keys = {one.partition("=")[0] for one in wrong}
    assert set(keys_of(refused(*wrong))) == keys
    assert main(["plan", "--config-name", "lab", *wrong]) == 4
    said = capsys.readouterr().out
    assert all(f"{key}=" in said for key in keys) and "also: " in said


def test_a_refusal_that_another_explains_does_not_come():
    """The typo leaves the length at its default, which then does not hold the turns."""
    turns, typo = "search.max_new_tokens=900", "+data.max_respnse_length=9000"
    assert keys_of(refused(turns)) == ["data.max_response_length"]
    assert keys_of(refused(turns, typo)) == ["data.max_respnse_length"]


def test_one_refusal_is_the_error_itself():
    error = refused("algorithm.gamma=4")
    assert type(error) is ConfigError and "\n" not in str(error)


@pytest.mark.parametrize(
    "key, place",
    [
        ("max_turns", "search.max_searches"),
        ("retriever.url", "search.url"),
        ("+algorithm.gigpo.step_advantage_w", "+algorithm.turn_params.step_weight"),
        ("+algorithm.gigpo.anything", "algorithm.info_gain_norm_mode=gigpo"),
        ("search_engine", "search.url"),
        ("rollout.nnodes", f"{ROLLOUT}.nnodes"),
        ("+env.max_steps", "search.max_searches"),
    ],
)
def test_a_key_of_another_project_gets_the_key_that_takes_its_place(key, place):
    error = refused(f"{key}=1")
    assert str(error).startswith(f"unknown key {key.lstrip('+')}") and f": write {place}" in str(error)
    assert "did you mean" not in str(error)


def test_the_places_of_other_projects_keys_are_keys():
    from verl_credit.recipe.rules.known import OPEN, known_keys

    names = known_keys("dp").names
    for key in {**RENAMED, **INSTEAD}:
        parent, _, leaf = remedy_of(key).partition("=")[0].lstrip("+").rpartition(".")
        assert parent in (*OPEN, "algorithm.turn_params") or leaf in names[parent], key


def test_a_long_list_of_accepted_keys_is_cut_to_the_near_ones():
    error = refused("+algorithm.zzz=1")
    assert "did you mean" not in str(error) and len(str(error)) < 150 and len(error.accepted) > 30
    assert "gamma" in str(refused("+algorithm.gama=1")) and "hicra" not in str(refused("+algorithm.gama=1"))


def test_violations_of_one_rule_and_another_are_one_answer():
    """Rules of the engine, of rows, of the loss and of the pipeline."""
    wrong = (
        f"{ROLLOUT}.enable_rollout_routing_replay=true", f"{ROLLOUT}.name=nobody",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9",
        "reward.custom_reward_function.reward_kwargs.format_penalty=0.5", "algorithm.use_kl_in_reward=true",
    )  # fmt: skip
    error = refused(*wrong, "algorithm.advantage_mode=maxrl")
    assert set(keys_of(error)) == {one.partition("=")[0] for one in wrong}


def test_every_option_that_a_mode_lacks_is_refused_and_an_unknown_signal_too():
    params = ("+algorithm.turn_params.gamma=1", "+algorithm.turn_params.nothing=2")
    error = refused(*params, "algorithm.turn_signals={none_such: 2}")
    options = ["algorithm.turn_params.gamma", "algorithm.turn_params.nothing"]
    assert keys_of(error) == [*options, "algorithm.turn_signals"]


def test_every_name_that_verl_does_not_know_is_refused_at_once():
    from verl_credit.host.process.verl_checks import check_names, register_all

    register_all()
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    config = load_config("lab", [f"{loss}=nobody", f"{ROLLOUT}.multi_turn.format=nothing"])
    with pytest.raises(ConfigErrors) as caught:
        check_names(config)
    assert keys_of(caught.value) == [loss, f"{ROLLOUT}.multi_turn.format"]
