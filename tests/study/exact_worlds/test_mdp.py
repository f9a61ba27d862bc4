"""Tables of environments against the environments themselves; their exact success against all paths and many rollouts."""

import random

import pytest
import torch
from minigrid.envs import DoorKeyEnv

from verl_credit.credit import MODES
from verl_credit.credit.loss import turn_policy_loss
from verl_credit.study.exact_worlds.chain_learning import ChainLearning
from verl_credit.study.exact_worlds.coin_collector import STEPS, TAKE, coin_collector, plan
from verl_credit.study.exact_worlds.door_key import door_key
from verl_credit.study.exact_worlds.fed_credit import FedCredit
from verl_credit.study.exact_worlds.learning import curve
from verl_credit.study.exact_worlds.mdp import drawn_tasks, tables_of
from verl_credit.study.exact_worlds.mdp_learning import (
    CLIP,
    START,
    MdpLearning,
    Network,
    clipped_loss,
    imitated,
)
from verl_credit.study.exact_worlds.taxi import taxi
from verl_credit.worlds.doorkey.moves import ACTIONS, CLOSED, LOCKED, OPEN, DoorKey, State, walk

NUMBERS = [*ACTIONS.values()]


def corridor(limit=4, unseen=2):
    """Rooms in a row: one action goes back, and one goes on, from the last room out. Map 1 has a room less."""
    maps = [
        walk([0], lambda s, last=last: [(max(s - 1, 0), False), (min(s + 1, last), s == last)])
        for last in (2, 1)
    ]
    starts = [(0, 0), (1, 0), (0, 1), (1, 1)]
    return tables_of(
        maps,
        lambda m, s: torch.tensor([float(m), float(s)]),
        lambda m, s: s / 2,
        starts,
        limit=limit,
        unseen=unseen,
    )


def probabilities(mdp, runs=2):
    drawn = torch.rand(runs, len(mdp.x_U_F), mdp.actions, generator=torch.Generator().manual_seed(3))
    return drawn / drawn.sum(-1, keepdim=True)


def solved_within(mdp, prob_U_A, m, state, left):
    """The chance to solve, by the tree of all paths."""
    if not left:
        return 0.0
    total = 0.0
    for action in range(mdp.actions):
        chance = float(prob_U_A[mdp.seen_M_S[m, state], action])
        if mdp.solved_M_S_A[m, state, action]:
            total += chance
        else:
            total += chance * solved_within(mdp, prob_U_A, m, int(mdp.next_M_S_A[m, state, action]), left - 1)
    return total


def test_success_is_the_sum_over_all_paths():
    mdp = corridor()
    prob_R_U_A = probabilities(mdp)
    wanted = [
        sum(solved_within(mdp, prob_U_A, m, 0, mdp.limit) for m in (0, 1)) / 2 for prob_U_A in prob_R_U_A
    ]
    assert mdp.success(prob_R_U_A).tolist() == pytest.approx(wanted, abs=1e-6)
    assert min(wanted) > 0.05 and max(wanted) < 0.95 and wanted[0] != wanted[1]


@pytest.mark.slow
def test_values_of_a_rollouts_turns_are_the_chances_that_rollouts_had():
    """The mean outcome of many rollouts is the exact success of their tasks, and the true value of their first turns."""
    mdp = corridor(unseen=0)
    start = Network.drawn(2, 2, 2, torch.Generator().manual_seed(0))
    learning = MdpLearning(mdp, start, seed=1, group=2)
    rolled = []
    for _ in range(40):
        learning.step(lambda one: rolled.append(one) or torch.zeros(one.state_B_K1.shape))
    outcome_N = torch.cat([one.outcome_B for one in rolled])
    value_N = torch.cat([one.true_B_K1()[:, 0] for one in rolled])
    assert len(outcome_N) == 2 * 40 * 128
    assert float(outcome_N.mean()) == pytest.approx(float(value_N.mean()), abs=0.02)
    one = rolled[0]
    known = solved_within(mdp, learning._network.prob(mdp)[0], *_first(mdp, one), mdp.limit)
    assert float(one.true_B_K1()[0, 0]) == pytest.approx(known, abs=1e-6)


def _first(mdp, rolled):
    return int(mdp.map_Q[rolled.task_B[0]]), int(rolled.state_B_K1[0, 0])


def test_rollouts_end_where_they_are_solved_and_earn_progress_once():
    mdp = corridor(limit=6, unseen=0)
    start = Network.drawn(2, 2, 2, torch.Generator().manual_seed(0))
    kept = []
    MdpLearning(mdp, start, seed=1).step(lambda one: kept.append(one) or torch.zeros(one.state_B_K1.shape))
    (rolled,) = kept
    solved_B = rolled.outcome_B == 1
    assert solved_B.any() and (rolled.n_tool_turns_B[~solved_B] == mdp.limit - 1).all()
    assert (rolled.n_tool_turns_B[solved_B] < mdp.limit).all()
    earned_B = (rolled.signal_B_K * rolled.tool_turn_B_K).sum(1)
    seen_B_K1 = torch.where(rolled.turn_B_K1, rolled.seen_B_K1_D[:, :, 0], 0.0)
    assert torch.allclose(earned_B, seen_B_K1.amax(1) - rolled.seen_B_K1_D[:, 0, 0])
    assert (rolled.group_B.bincount() == 8).all() and len(rolled.group_B) == 2 * 128


@pytest.fixture(scope="module")
def keys():
    return door_key(6, 25, 8, 24, seed=5)


def shortest(mdp, task):
    """The states and actions of the shortest way that takes the first of its best actions."""
    m, state, way = int(mdp.map_Q[task]), int(mdp.start_Q[task]), []
    best_M_S_A = mdp.best_actions()
    while True:
        action = int(best_M_S_A[m, state].argmax())
        way.append((state, action))
        if mdp.solved_M_S_A[m, state, action]:
            return way
        state = int(mdp.next_M_S_A[m, state, action])


def minigrid(seed):
    """minigrid's own environment after the reset, and its state as the table names it."""
    env = DoorKeyEnv(size=6)
    env.reset(seed=seed)
    door = next(thing for thing in env.grid.grid if thing is not None and thing.type == "door")

    def state():
        x, y = map(int, env.agent_pos)
        return State(x, y, int(env.agent_dir), env.carrying is not None, door.encode()[2])

    return env, state


@pytest.mark.slow
def test_the_tables_shortest_way_opens_the_door_in_minigrid(keys):
    """Task 0 is the first reset."""
    env, state = minigrid(5)
    progress = []
    for place, action in (way := shortest(keys, 0)):
        progress.append(float(keys.progress_M_S[keys.map_Q[0], place]))
        assert progress[-1] == (state().carries + (state().door != LOCKED)) / 2
        _, reward, ended, _, _ = env.step(NUMBERS[action])
    assert ended and reward > 0 and state().door == OPEN
    assert progress == sorted(progress) and {*progress} == {0.0, 0.5, 1.0} and len(way) <= keys.limit


def test_random_steps_in_minigrid_are_those_of_the_table():
    """The environment goes on by itself. Half of the steps are the shortest way's, so that key and door are used."""
    game = DoorKey(6, 5)
    table = walk([game.state], game.moves)
    one = tables_of(
        [table], lambda m, s: torch.zeros(1), lambda m, s: 0.0, [(0, game.state)], limit=1, unseen=0
    )
    best_S = one.best_actions()[0].argmax(-1).tolist()
    best = {state: best_S[place] for place, state in enumerate(table)}
    drawn, doors_seen, ends = random.Random(0), set(), 0
    (env, state), here = minigrid(5), game.state
    for _ in range(300):
        assert state() == here
        doors_seen.add(here.door)
        action = drawn.choice([best[here], drawn.randrange(len(NUMBERS))])
        _, reward, ended, _, _ = env.step(NUMBERS[action])
        here, solved = table[here][action]
        assert solved == bool(ended and reward > 0)
        if solved:
            ends, (env, state), here = ends + 1, minigrid(5), game.state
    assert doors_seen == {OPEN, CLOSED, LOCKED} and ends > 2


def test_taxis_table_is_gymnasiums():
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    env, mdp = TaxiEnv(), taxi(27, 8, 24, seed=5)
    for state, ways in env.P.items():
        for action, ((chance, after, earned, ends),) in ways.items():
            assert chance == 1.0 and int(mdp.next_M_S_A[0, state, action]) == after
            assert bool(mdp.solved_M_S_A[0, state, action]) == (ends and earned == 20)
    starts = {state for state in env.P if env.initial_state_distrib[state] > 0}
    assert set(mdp.start_Q.tolist()) <= starts and len({*mdp.start_Q[:8].tolist()}) == 8
    assert not {*mdp.start_Q[:8].tolist()} & {*mdp.start_Q[8:].tolist()}


def test_a_coin_is_taken_in_the_last_of_its_rooms_alone():
    mdp = coin_collector(5, 8, 2, 6, seed=3)
    for task in range(8):
        way, place = plan(5, 3 + task), (0, 0)
        assert [action for _, action in shortest(mdp, task)] == [*way, TAKE]
        places = {place}
        for d in way:
            place = place[0] + STEPS[d][0], place[1] + STEPS[d][1]
            places.add(place)
        assert len(places) == 5
    last_M_S = mdp.progress_M_S == 4 / 5
    assert torch.equal(mdp.solved_M_S_A[:, :, TAKE], last_M_S) and not mdp.solved_M_S_A[:, :, :TAKE].any()


def test_unseen_tasks_are_drawn_first_and_come_once():
    tasks = drawn_tasks(lambda number: number % 7 // 2, unseen=2, count=6)
    assert tasks == [0, 1, 2, 2, 3, 2, 2, 3]


def test_each_runs_loss_is_the_projects_clipped_loss():
    drawn = torch.Generator().manual_seed(0)
    log_prob, before, credit = (torch.randn(2, 40, generator=drawn) / 3 for _ in range(3))
    turn = torch.rand(2, 40, generator=drawn) < 0.7
    found_R = clipped_loss(log_prob, before, credit, turn)
    for run in range(2):
        of_run = (one[run : run + 1] for one in (log_prob, before, credit, turn))
        clip = {"clip_ratio_low": CLIP, "clip_ratio_high": CLIP, "ratio_level": "token"}
        loss, metrics = turn_policy_loss(*of_run, torch.zeros(1, 40, dtype=torch.long), **clip)
        assert float(found_R[run]) == pytest.approx(float(loss), rel=1e-5)
        assert 0.1 < metrics["pg_clipfrac"] < 0.9


@pytest.mark.parametrize("group, asked", [(8, 16), (2, 64)])
def test_a_step_goes_on_in_each_runs_own_order_of_tasks(group, asked):
    """64 questions: all of them in four steps of 16, and in one of 64."""
    steps = []

    def give(rolled):
        steps.append(rolled)
        return torch.zeros(rolled.state_B_K1.shape)

    mdp = coin_collector(3, 5, 2, 64, seed=3)
    start = Network.drawn(2, mdp.x_U_F.shape[1], mdp.actions, torch.Generator().manual_seed(0))
    for learning in (ChainLearning(2, 2, 0, group=group, pool=64), MdpLearning(mdp, start, 0, group=group)):
        steps.clear()
        for _ in range(64 // asked):
            learning.step(give)
        tasks_R = [
            [task for step in steps for task in step.task_B[step.run_B == run].unique().tolist()]
            for run in range(2)
        ]
        first = steps[0]
        assert [len(of_run) for of_run in tasks_R] == [len({*of_run}) for of_run in tasks_R] == [64, 64]
        assert (first.group_B.bincount() == group).all() and len(first.group_B) == 2 * 128


@pytest.mark.slow
def test_imitation_stops_at_the_start_and_learning_repeats_from_there():
    mdp = coin_collector(4, 7, 6, 64, seed=3)
    start = imitated(mdp, 2, seed=0)
    first_R = mdp.success(Network(start).prob(mdp))
    assert (first_R >= START).all() and (first_R < START + 0.15).all()
    curves = [
        curve(MdpLearning(mdp, Network(start), 1, group=group), FedCredit(MODES["none"]).advantages, 6)
        for group in (8, 8, 2)
    ]
    assert torch.equal(curves[0], curves[1]) and not torch.equal(curves[0], curves[2])
    assert (curves[0][-1] > first_R + 0.1).all()
