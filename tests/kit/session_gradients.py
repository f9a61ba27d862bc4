"""The exact expected gradient of credit in the worlds of `kit.session_world`, whose rollouts have several outputs.

    PYTHONPATH=tests python -m kit.session_gradients        # prints the table of docs/agent-loops.md in a minute

It is a sum over all groups of rollouts. Their advantages are those of a trainer's step: `sessions.joined` makes a row of
each rollout, `assign` spreads the advantages back, and they are read at the tokens of each output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from kit.byte_world import make_tokenizer
from kit.session_world import (
    CHOICES,
    CONTEXT_D,
    LOGIT_D,
    POLICY,
    Rollout,
    delegating,
    every_rollout,
    forgetful,
)
from kit.settings import settings
from kit.turn_rows import turn_batch
from verl_credit.credit.operator import SUB_AGENTS
from verl_credit.credit.turn.modes import MODES
from verl_credit.study.fidelity.exact.bias import compare, group_probability, list_groups
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.step.assign import CreditRun, StepInputs, assign

CREDITS = {
    "`none` (GRPO)": {"info_gain_norm_mode": "none"},
    "`none`, `advantage_mode=rloo`": {"info_gain_norm_mode": "none", "advantage_mode": "rloo"},
    **{f"`{mode}`": {"info_gain_norm_mode": mode} for mode in MODES if mode not in ("none", "turn_gae")},
    "`turn_gae`, lam 1": {"info_gain_norm_mode": "turn_gae", "lam": 1.0},
    "`turn_gae`, lam 0": {"info_gain_norm_mode": "turn_gae", "lam": 0.0},
    "`turn_gae`, lam 0, V of the whole history": {
        "info_gain_norm_mode": "turn_gae",
        "lam": 0.0,
        "whole": True,
    },
}
"""Arguments of `World.expected` by the name in the table."""
AGENTS = {"resets": forgetful, "sub-agent": delegating}
Before = tuple[int, ...]
"""The choices of a rollout before a turn."""


def takes(agent, info_gain_norm_mode: str, **_) -> bool:
    """A step does not refuse the mode for this agent's rollouts."""
    return agent is forgetful or MODES[info_gain_norm_mode].outputs == SUB_AGENTS


class World:
    """An agent's rollouts, and every group of ``size`` of them.

    ``rewards``: turns earn rewards, and a return is the outcome with what the turns earned.
    """

    def __init__(self, agent=forgetful, size: int = 2, *, rewards: bool = False):
        self.rollouts, self.rewards = every_rollout(agent), rewards
        self.group_M_G = list_groups(len(self.rollouts), size)
        self.probability_N = self._probability_N(LOGIT_D)

    def _probability_N(self, logit_D: torch.Tensor) -> torch.Tensor:
        of_D = torch.cat([logit_D[c == CONTEXT_D].log_softmax(0) for c in range(len(POLICY))])
        return torch.stack([of_D[rollout.choices].sum() for rollout in self.rollouts]).exp()

    def returns(self, rollout: Rollout) -> list[float]:
        """The return from each turn on."""
        earned = [*(reward * self.rewards for reward in rollout.rewards), rollout.outcome]
        return [sum(earned[turn:]) for turn in range(len(earned))]

    @cached_property
    def true_D(self) -> torch.Tensor:
        """The gradient of the expected return by the logits, by autograd over all rollouts."""
        leaf_D = LOGIT_D.clone().requires_grad_()
        return_N = torch.tensor([self.returns(rollout)[0] for rollout in self.rollouts]).double()
        return torch.autograd.grad(self._probability_N(leaf_D) @ return_N, leaf_D)[0]

    def values(self, whole: bool) -> dict[Before, float]:
        """The mean return from each turn on, over the rollouts with the context of this turn. ``whole``: over the rollouts
        with all choices before this turn, also those that a reset forgets."""
        sums: dict[object, torch.Tensor] = {}
        key_of: dict[Before, object] = {}
        for p, rollout in zip(self.probability_N, self.rollouts, strict=True):
            for turn, togo in enumerate(self.returns(rollout)):
                before = tuple(rollout.choices[:turn])
                key = key_of[before] = before if whole else CHOICES[rollout.choices[turn]][0]
                sums[key] = sums.get(key, 0) + torch.stack([p * togo, p])
        return {before: float(sums[key][0] / sums[key][1]) for before, key in key_of.items()}

    def expected(
        self, rows_of=Rollout.as_returned, *, siblings=False, whole=False, **changes
    ) -> torch.Tensor:
        """E[g] by the logits, [D]: g = 1/n sum over a group's rollouts of sum over turns of A grad log pi(turn).

        ``siblings``: every output counts as a rollout. ``whole``: which `values` the critic has. ``changes``: of `run`."""
        run, credited_D = self.run(**changes), torch.zeros_like(LOGIT_D)
        weight_M = group_probability(self.group_M_G, self.probability_N) / self.group_M_G.shape[1]
        scope = run.settings.algorithm.turn_mode.scope_with(run.settings.turn_options)
        for batch in self.batches(rows_of, siblings, 1 if scope == "batch" else len(weight_M)):
            advantage_N = batch.advantages(run, self.values(whole))
            credited_D.index_add_(0, batch.choice_N, weight_M[batch.group_N] * advantage_N)
        of_context_C = torch.zeros(len(POLICY)).double().index_add_(0, CONTEXT_D, credited_D)
        return credited_D - LOGIT_D.exp() * of_context_C[CONTEXT_D]

    def run(self, **changes) -> CreditRun:
        """A run with these keys of ``algorithm``, states by their names, and a critic where the mode reads values."""
        signal = "tool_reward" if self.rewards else "none"
        given = {"turn_signal": signal, "turn_anchor": "state", "adv_rescale_alpha": 1.0} | changes
        if given["info_gain_norm_mode"] == "turn_gae":
            given["turn_values"] = "critic"
        return CreditRun.of(settings(**given), make_tokenizer())

    def compared(self, **given) -> tuple[float, float]:
        """(cosine of E[g] with the true gradient, its bias: the smallest |E[g] / c - true| / |true| over all scales c)"""
        found = compare(self.expected(**given), self.true_D)
        return found["cosine"], found["difference"] / float(self.true_D.norm())

    @cache  # noqa: B019 (a world lives as long as its test)
    def batches(self, rows_of, siblings: bool, groups: int) -> list[Batch]:
        """All groups, so many in a batch."""
        places = torch.arange(len(self.group_M_G)).split(groups)
        return [self._batch(part.tolist(), rows_of, siblings) for part in places]

    def _batch(self, places: list[int], rows_of, siblings: bool) -> Batch:
        rows, keys, links, outcomes, turns = [], [], [], [], []
        for m in places:
            for session, n in enumerate(self.group_M_G[m].tolist()):
                rollout = self.rollouts[n]
                for number, (row, choices, link) in enumerate(rows_of(rollout)):
                    for turn, choice in enumerate(choices):
                        before = tuple(rollout.choices[: rollout.choices.index(choice)])
                        turns.append((len(rows), turn, m, choice, before))
                    earned = row.turn_rewards[: len(choices) - 1] if siblings else row.turn_rewards
                    rows.append(replace(row, turn_rewards=earned))
                    keys.append(f"{m}_{session}_{number}")
                    links.append(link)
                    outcomes.append(rollout.outcome)
        *numbers, before_N = zip(*turns, strict=True)
        batch = turn_batch(rows, make_tokenizer())
        batch = batch if siblings else replace(batch, keys=keys, links=links)
        return Batch(
            batch, joined(batch), torch.tensor(outcomes).double(), *map(torch.tensor, numbers), before_N
        )


@dataclass(frozen=True)
class Batch:
    """Outputs of groups of rollouts, with N turns in all."""

    turns: TurnBatch
    together: TurnBatch
    """With a row for each rollout."""
    outcome_B: torch.Tensor
    row_N: torch.Tensor
    turn_N: torch.Tensor
    group_N: torch.Tensor
    choice_N: torch.Tensor
    before_N: tuple[Before, ...]

    @property
    def group_B(self) -> torch.Tensor:
        return torch.zeros(len(self.outcome_B), dtype=torch.long).index_copy(0, self.row_N, self.group_N)

    def advantages(self, run: CreditRun, value_of: dict[Before, float]) -> torch.Tensor:
        """Each turn's advantage, read at its tokens in its own row, [N]."""
        own_N_T = self.turns.turn_ids_B_T[self.row_N] == self.turn_N[:, None]
        value_B_T = torch.zeros(self.turns.turn_ids_B_T.shape).double()
        for row, own_T, before in zip(self.row_N, own_N_T, self.before_N, strict=True):
            value_B_T[row, own_T] = value_of[before]
        nothing_B_K = torch.zeros(len(self.together.records), int(self.together.n_turns_B.max()) - 1).double()
        inputs = StepInputs(run, self.together, nothing_B_K, nothing_B_K.bool(), value_B_T=value_B_T)
        step = assign(inputs, self.outcome_B, self.group_B, self.turns.response_mask_B_T)
        advantage_N_T = step.advantage_B_T[self.row_N].double()
        least_N = torch.where(own_N_T, advantage_N_T, torch.inf).amin(1)
        assert torch.equal(least_N, torch.where(own_N_T, advantage_N_T, -torch.inf).amax(1))
        return least_N


def table() -> str:
    """A line per credit: cosine and bias, and in brackets what they are where every output counts as a rollout."""
    worlds = [
        (agent, World(agent, rewards=rewards)) for agent in AGENTS.values() for rewards in (False, True)
    ]
    heads = [f"{name}, {of}" for name in AGENTS for of in ("outcome alone", "turn rewards")]
    lines = [f"| credit | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for name, given in CREDITS.items():
        cells = []
        for agent, world in worlds:
            if takes(agent, **given):
                ours, siblings = (world.compared(siblings=apart, **given) for apart in (False, True))
                cells.append("{:.3f}, {:.3f} ({:.3f}, {:.3f})".format(*ours, *siblings))
            else:
                cells.append("refused")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
