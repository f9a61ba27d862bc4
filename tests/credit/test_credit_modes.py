"""Every mode against a slow per-row oracle written from the formulas, on random turn tables."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.modes import NO_TABLES
from verl_credit.credit import MODES, turn_credit

EPS = 1e-6


def z_scores(values, norm_by_std, *, ddof=0, floor=1e-8, eps=EPS):
    """{key: z} of {key: value}; `statistics` works with exact fractions."""
    if len(values) < 2:
        return dict.fromkeys(values, 0.0)
    mean = statistics.mean(values.values())
    variance = statistics.variance(values.values()) if ddof else statistics.pvariance(values.values())
    divisor = math.sqrt(variance + floor) + eps if norm_by_std else 1.0
    return {key: (value - mean) / divisor for key, value in values.items()}


def z_scores_within(values, group_of, norm_by_std, **options):
    """z-scores of the values that share `group_of(key)`."""
    result = {}
    for group in {group_of(key) for key in values}:
        result |= z_scores({k: v for k, v in values.items() if group_of(k) == group}, norm_by_std, **options)
    return result


class Oracle:
    """One batch: outcomes {row: r}, gains {(row, turn): g}, prompts [row]; only rows that count."""

    def __init__(self, outcomes, gains, prompts, turns, gamma, alpha, norm_by_std):
        self.outcomes, self.gains, self.prompts, self.turns = outcomes, gains, prompts, turns
        self.gamma, self.alpha, self.norm_by_std = gamma, alpha, norm_by_std

    def prompt_of(self, key):
        return self.prompts[key if isinstance(key, int) else key[0]]

    def prompt_and_turn_of(self, key):
        return self.prompts[key[0]], key[1]

    def outcome_z(self, **options):
        return z_scores_within(self.outcomes, self.prompt_of, self.norm_by_std, **options)

    def segments(self, row):
        """Turns of this row that carry a gain, in order."""
        return [k for k in range(self.turns) if (row, k) in self.gains]

    def shared(self, row, per_gain, answer):
        """Value of each turn: its own gain's, else the next gain's, else the answer's."""
        own = self.segments(row)
        return [next((per_gain[j] for j in own if j >= k), answer) for k in range(self.turns)]

    def none(self):
        answer = self.outcome_z(ddof=1, floor=0.0)
        return {row: ([answer[row]] * self.turns, answer[row], [1.0] * self.turns) for row in self.outcomes}

    def discounted(self, z, answer):
        result = {}
        for row in self.outcomes:
            own = self.segments(row)
            per_gain = {
                k: sum(self.gamma**i * z[row, j] for i, j in enumerate(own[n:]))
                + self.gamma ** (len(own) - n) * answer[row]
                for n, k in enumerate(own)
            }
            result[row] = (self.shared(row, per_gain, answer[row]), answer[row], [1.0] * self.turns)
        return result

    def joint(self):
        z = z_scores_within({**self.outcomes, **self.gains}, self.prompt_of, self.norm_by_std)
        return self.discounted(z, z)

    def separate(self):
        return self.discounted(
            z_scores_within(self.gains, self.prompt_of, self.norm_by_std), self.outcome_z()
        )

    def turn_group(self):
        def sigma(values):
            return max(1e-6, statistics.pstdev(values.values())) if len(values) > 1 else 1.0

        scale = sigma(self.outcomes) / sigma(self.gains)
        acc = {}
        for row, outcome in self.outcomes.items():
            own = self.segments(row)
            for n, k in enumerate(own):
                later = own[n:]
                acc[row, k] = sum(self.gamma**i * scale * self.gains[row, j] for i, j in enumerate(later))
                acc[row, k] += self.gamma ** (len(later) + 1) * outcome
        z = z_scores_within(acc, self.prompt_and_turn_of, self.norm_by_std)
        answer = self.outcome_z()
        result = {}
        for row in self.outcomes:
            per_gain = {k: z[row, k] + 1.5 * answer[row] for k in self.segments(row)}
            result[row] = (self.shared(row, per_gain, answer[row]), answer[row], [1.0] * self.turns)
        return result

    def turn_group_v1d(self):
        z = z_scores_within(self.gains, self.prompt_and_turn_of, self.norm_by_std)
        answer = self.outcome_z()
        result = {}
        for row in self.outcomes:
            own = self.segments(row)
            per_gain, scale = {}, {}
            for n, k in enumerate(own):
                later = own[n:]
                total = sum(self.gamma**i * z[row, j] for i, j in enumerate(later))
                per_gain[k] = self.alpha * total / math.sqrt(len(later)) + answer[row]
                scale[k] = 1 + 0.3 * (2 / (1 + math.exp(-z[row, k])) - 1)
            result[row] = (self.shared(row, per_gain, answer[row]), answer[row], self.shared(row, scale, 1.0))
        return result

    def turn_group_unbiased(self):
        prompts = {p: [r for r in self.outcomes if self.prompts[r] == p] for p in set(self.prompts)}
        total = {
            (row, k): sum(self.gamma ** (j - k) * self.gains.get((row, j), 0.0) for j in range(k, self.turns))
            for row in self.outcomes
            for k in range(self.turns + 1)
        }

        def free(values, row, members):
            others = [values[r] for r in prompts[self.prompts[row]] if r != row and r in members]
            return values[row] - sum(others) / len(others) if others else 0.0

        first = {
            p: min((k for r in rows for k in self.segments(r)), default=0) for p, rows in prompts.items()
        }
        whole = {  # no turn without a gain before the row's last gain, once its prompt has gains
            row
            for row in self.outcomes
            if all(
                (row, k) in self.gains
                for k in range(first[self.prompts[row]], max(self.segments(row), default=-1))
            )
        }
        z = z_scores_within(self.gains, self.prompt_and_turn_of, self.norm_by_std)
        result = {}
        for row in self.outcomes:
            outcome = free(self.outcomes, row, self.outcomes)
            own = self.segments(row)
            advantage = [
                outcome
                + (self.alpha * free({r: total[r, k] for r in whole}, row, whole) if row in whole else 0.0)
                for k in range(self.turns + 1)
            ]
            answer = advantage[own[-1] + 1 if own else 0]
            tool = [advantage[k] if own and k <= own[-1] else answer for k in range(self.turns)]
            scale = [
                1 + 0.3 * (2 / (1 + math.exp(-z[row, k])) - 1) if k in own else 1.0 for k in range(self.turns)
            ]
            result[row] = (tool, answer, scale)
        return result

    def leave_one_out(self):
        found = self.turn_group_unbiased()
        return {row: (tool, answer, [1.0] * self.turns) for row, (tool, answer, _) in found.items()}

    def mt_grpo(self):
        constants = {"ddof": 1, "floor": 0.0, "eps": 1e-4}
        answer = z_scores_within(self.outcomes, self.prompt_of, True, **constants)
        z = z_scores_within(self.gains, self.prompt_and_turn_of, True, **constants)
        result = {}
        for row in self.outcomes:
            tool = [answer[row] + z.get((row, k), 0.0) for k in range(self.turns)]
            result[row] = (tool, answer[row], [1.0] * self.turns)
        return result


@st.composite
def batches(draw):
    rows, turns = draw(st.integers(1, 9)), draw(st.integers(0, 4))
    number = st.sampled_from([0.0, 0.05, -0.3, 0.35, 0.4, 1.0, -1.25]) | st.floats(-2, 2, width=32)
    return {
        "outcome": draw(st.lists(st.sampled_from([0.0, 0.35, 1.0, -0.5]), min_size=rows, max_size=rows)),
        "gain": [draw(st.lists(number, min_size=turns, max_size=turns)) for _ in range(rows)],
        "mask": [draw(st.lists(st.booleans(), min_size=turns, max_size=turns)) for _ in range(rows)],
        "prompt": draw(st.lists(st.sampled_from([-7, 3, 10**12]), min_size=rows, max_size=rows)),
        "valid": draw(st.lists(st.sampled_from([True, True, True, False]), min_size=rows, max_size=rows)),
        "turns": turns,
    }


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    batch=batches(),
    gamma=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
    alpha=st.sampled_from([0.3, 1.0]),
    norm_by_std=st.booleans(),
)
def test_oracle(batch, gamma, alpha, norm_by_std):
    rows, turns = len(batch["outcome"]), batch["turns"]
    tables = (
        torch.tensor(batch["outcome"], dtype=torch.float64),
        torch.tensor(batch["gain"], dtype=torch.float64).view(rows, turns),
        torch.tensor(batch["mask"], dtype=torch.bool).view(rows, turns),
        torch.tensor(batch["prompt"]),
    )
    outcomes = {row: batch["outcome"][row] for row in range(rows) if batch["valid"][row]}
    gains = {
        (row, k): batch["gain"][row][k] for row in outcomes for k in range(turns) if batch["mask"][row][k]
    }
    for mode in NO_TABLES:
        found = MODES[mode]
        by_std = norm_by_std or "norm_by_std" not in found.options
        options = {"gamma": gamma, "alpha": alpha, "norm_by_std": by_std}
        options = {name: value for name, value in options.items() if name in found.options}
        credit = found(*tables, **options, row_valid_B=torch.tensor(batch["valid"]))
        oracle = Oracle(outcomes, gains, batch["prompt"], turns, gamma, alpha, by_std)
        expected = getattr(oracle, mode.replace("-", "_"))()
        for row in range(rows):
            turn_advantages, answer, scales = expected.get(row, ([0.0] * turns, 0.0, [1.0] * turns))
            assert credit.advantage_B_K[row].tolist() == pytest.approx(turn_advantages, abs=1e-6), mode
            assert credit.outcome_advantage_B[row].item() == pytest.approx(answer, abs=1e-6), mode
            assert credit.clip_scale_B_K[row].tolist() == pytest.approx(scales, abs=1e-6), mode


def test_the_released_constants_are_arguments():
    outcome, prompt = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
    gain = torch.tensor([[0.4, 0.2], [-0.1, 0.1], [0.3, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.bool)
    constants = {
        "turn-group-v1d": {"clip_beta": 0.1, "alpha": 1.0, "eps": 0.1, "variance_floor": 0.1, "ddof": 1},
        "turn-group": {"outcome_weight": 1.0, "outcome_gamma_power": 1, "sigma_floor": 1.0, "gamma": 0.5},
    }
    for mode, changes in constants.items():
        common = {"info_gain_norm_mode": mode, "gamma": 0.9}
        released = turn_credit(outcome, gain, mask, prompt, **common)
        for name, value in changes.items():
            changed = turn_credit(outcome, gain, mask, prompt, **(common | {name: value}))
            both = torch.cat([changed.advantage_B_K, changed.clip_scale_B_K])
            assert not torch.equal(both, torch.cat([released.advantage_B_K, released.clip_scale_B_K])), name


def test_outcome_enters_the_last_gain_with_the_stated_power_of_gamma():
    """One prompt, no spread in the gains: only gamma^power r differs between the rows; 0^0 is 1."""
    gain, mask, prompt = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 0])
    for gamma, power in itertools.product((0.5, 0.0, 1.0), (0, 1, 2, 3)):
        credit = turn_credit(
            torch.tensor([1.0, 0.0]), gain, mask, prompt, info_gain_norm_mode="turn-group", norm_by_std=False,
            gamma=gamma, outcome_gamma_power=power, outcome_weight=0.0,
        )  # fmt: skip
        assert credit.advantage_B_K[0].tolist() == pytest.approx([gamma ** (power + 1) / 2, gamma**power / 2])
