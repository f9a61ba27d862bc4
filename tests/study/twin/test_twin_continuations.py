"""Values by continuations in a step of the twin: those of `fidelity`, and rollouts that do not change."""

import pytest
import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.compose import load_config
from verl_credit.study.fidelity.values import value_part
from verl_credit.study.twin import Twin
from verl_credit.turns.assign import CreditRun, assign

pytestmark = pytest.mark.slow

COUNT = 4
SETTINGS = (
    "data.train_batch_size=3", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "trainer.total_training_steps=4", "algorithm.info_gain_norm_mode=turn_gae", "algorithm.transform_mode=none",
    "algorithm.lam=0.5", f"algorithm.turn_continuations.count={COUNT}",
)  # fmt: skip
MONTE_CARLO = "algorithm.turn_values=monte_carlo"
METRICS = "credit/continuations/"


@pytest.fixture(scope="module")
def twin(tiny_lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    given = [f"lab.dir={tiny_lab.policy.parent}", f"run_dir={folder}", *SETTINGS]
    return Twin(load_config("lab", [*given, "algorithm.turn_values=group"]), folder, print)


@pytest.fixture
def step_of(twin, monkeypatch):
    """(its rollouts, its credit, its metrics) of a step with these overrides, from the same weights each time."""
    roll, rolled, credits = twin._roll, [], []
    monkeypatch.setattr(twin, "_roll", lambda *given: rolled.append(roll(*given)) or rolled[-1])
    monkeypatch.setattr("verl_credit.study.twin.update", lambda *given: [{"loss": 0.0}])
    monkeypatch.setattr(
        "verl_credit.study.twin_step.assign", lambda *given: credits.append(assign(*given)) or credits[-1]
    )

    def step_of(*overrides, step=1):
        places = f"lab.dir={twin.config.lab.dir}", f"run_dir={twin.run_dir}"
        settings = CreditSettings.from_config(load_config("lab", [*places, *SETTINGS, *overrides]))
        monkeypatch.setattr(twin, "credit", CreditRun.of(settings, twin.tokenizer))
        metrics = twin.step(step, [0, 1, 2])
        return [path for group in rolled[-1] for path in group], credits[-1], metrics

    return step_of


def measured_states(rows, credit):
    found = credit.inputs.measured_B_K1
    for row, turn in found.isfinite().nonzero().tolist():
        yield rows[row].steps[turn].state, float(found[row, turn])


def test_the_values_are_those_of_fidelity(twin, step_of):
    """The same states, seed and policy have the same continuations, whatever else a step does."""
    rows, credit, metrics = step_of(MONTE_CARLO, "algorithm.turn_continuations.states=5")
    found = {state: value for state, value in measured_states(rows, credit)}
    assert len({state.ids for state in found}) == metrics[METRICS + "states"] == 5
    assert all(state.turn > 0 for state in found)
    seed = twin.config.seed
    wanted = value_part(list(found), twin.train_set.roll, continuations=COUNT, seed=seed, name="value 1")
    assert list(found.values()) == [value.value for value in wanted]
    assert metrics[METRICS + "count"] == 5 * COUNT and metrics[METRICS + "left_out"] == 0
    assert metrics[METRICS + "tokens"] >= 5 * COUNT and metrics[METRICS + "seconds"] > 0


def test_rollouts_and_their_metrics_are_those_of_a_step_without(step_of):
    usual, _, without = step_of("algorithm.turn_values=group")
    rows, credit, metrics = step_of(MONTE_CARLO)
    assert rows == usual and len(credit.inputs.turns.prompt_ids) == len(rows) == 12
    timed = ("credit/values/", "credit/advantage/", METRICS, "timing_s/")
    same = {name: value for name, value in metrics.items() if not name.startswith(timed)}
    assert same == {name: without[name] for name in same} and "credit/outcome/em" in same


def test_credit_follows_the_measured_values(step_of):
    """lam=0: a turn earns V after it less V before it, and a state that was not tried again has the value before it."""
    rows, credit, _ = step_of(MONTE_CARLO, "algorithm.turn_continuations.states=4", "algorithm.lam=0")
    measured, value = credit.inputs.measured_B_K1, credit.tables.optional["value_B_K1"]
    for row, path in enumerate(rows):
        others = [one.reward for place, one in enumerate(rows) if place // 4 == row // 4 and place != row]
        last = sum(others) / 3
        for turn in range(len(path.steps)):
            last = float(measured[row, turn]) if measured[row, turn].isfinite() else last
            assert float(value[row, turn]) == pytest.approx(last)
        v = [*value[row, : len(path.steps)].tolist(), path.reward]
        wanted = torch.tensor(v).diff()
        torch.testing.assert_close(credit.credit.advantage_B_K1[row, : len(path.steps)].float(), wanted)


@pytest.mark.parametrize("otherwise", ["group", "features"])
def test_the_other_states_have_the_value_that_is_declared(step_of, otherwise):
    given = "algorithm.turn_continuations.states=2", f"algorithm.turn_continuations.otherwise={otherwise}"
    _, credit, metrics = step_of(MONTE_CARLO, *given)
    _, plain, _ = step_of(f"algorithm.turn_values={otherwise}")
    measured, value = credit.inputs.measured_B_K1, credit.tables.optional["value_B_K1"]
    wanted = torch.where(measured.isfinite(), measured, plain.tables.optional["value_B_K1"])
    assert (
        torch.equal(value, wanted)
        and int(measured.isfinite().sum()) >= 2
        and metrics["credit/values/states"] > 0
    )


def test_every_n_steps(step_of):
    every = "algorithm.turn_continuations.every=3"
    _, credit, metrics = step_of(MONTE_CARLO, every, step=2)
    assert credit.inputs.measured_B_K1 is None and not any(name.startswith(METRICS) for name in metrics)
    _, credit, metrics = step_of(MONTE_CARLO, every, step=4)
    assert credit.inputs.measured_B_K1.isfinite().any() and metrics[METRICS + "states"] > 0


def test_uncertainty_is_that_of_the_turn_before_the_state(twin, step_of):
    given = "algorithm.turn_continuations.states=3", "algorithm.turn_continuations.choose=uncertainty"
    rows, credit, _ = step_of(MONTE_CARLO, *given)
    turns = credit.inputs.turns
    with torch.no_grad(), twin.policy.packing():
        prompts, responses = (
            [torch.tensor(ids) for ids in of] for of in (turns.prompt_ids, turns.response_ids)
        )
        log_prob_B_T, _ = twin.policy.responses(prompts, responses, turns.response_mask_B_T.bool())
    mean_of = {}
    for row, path in enumerate(rows):
        for turn, step in enumerate(path.steps[1:]):
            mean_of[step.state] = float(log_prob_B_T[row][turns.turn_ids_B_T[row] == turn].double().mean())
    chosen = {state for state, _ in measured_states(rows, credit)}
    assert len(chosen) == 3
    assert max(mean_of[state] for state in chosen) < min(mean_of[state] for state in mean_of.keys() - chosen)
