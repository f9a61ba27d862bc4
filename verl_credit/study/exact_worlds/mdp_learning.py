"""Learning in an `Mdp`, R runs side by side: 32 units, Adam, PPO's clip. Success is exact, over unseen tasks."""

from __future__ import annotations

import torch

from verl_credit.study.exact_worlds.fed_credit import Rolled
from verl_credit.study.exact_worlds.learning import ROLLOUTS, UPDATES, Credit
from verl_credit.study.exact_worlds.mdp import Mdp

UNITS, RATE, CLIP = 32, 0.003, 0.2
START, ERRS, IMITATED = 0.2, 0.2, 512
"""A run begins once imitation solves this share of the unseen tasks. It imitates shortest ways in the states that a walk
comes to which takes a random action so often; an update takes so many of them."""


class Network:
    """R policies pi(a | x) = softmax(W tanh(V x + v) + w), float32."""

    def __init__(self, weights: list[torch.Tensor]):
        self.weights = [weight.clone().requires_grad_() for weight in weights]
        self.runs = len(weights[0])

    @classmethod
    def drawn(cls, runs: int, inputs: int, actions: int, random: torch.Generator) -> Network:
        shapes = (inputs, UNITS), (1, UNITS), (UNITS, actions), (1, actions)
        fan_in = inputs, inputs, UNITS, UNITS
        drawn = (torch.rand(runs, *shape, generator=random) for shape in shapes)
        return cls([(2 * one - 1) / n**0.5 for one, n in zip(drawn, fan_in, strict=True)])

    def log_prob(self, x_R_N_F: torch.Tensor) -> torch.Tensor:
        """log pi, [R, N, A]."""
        inner, inner_bias, outer, outer_bias = self.weights
        return ((x_R_N_F @ inner + inner_bias).tanh() @ outer + outer_bias).log_softmax(-1)

    def prob(self, mdp: Mdp) -> torch.Tensor:
        """pi of every row of features, [R, U, A]."""
        with torch.no_grad():
            return self.log_prob(mdp.x_U_F).exp()

    def kept(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.weights]


def imitated(mdp: Mdp, runs: int, seed: int) -> list[torch.Tensor]:
    """Weights of R networks, each as it is once its exact success is `START`.

    Where states with equal features differ in their shortest ways, the mean over the walk's visits is imitated.
    """
    random = torch.Generator().manual_seed(seed)
    network = Network.drawn(runs, mdp.x_U_F.shape[1], mdp.actions, random)
    best_M_S_A = mdp.best_actions()
    visits_M_S = mdp.visits((1 - ERRS) * best_M_S_A + ERRS / mdp.actions)
    wanted_N_A = (visits_M_S[..., None] * best_M_S_A).flatten(0, 1).float()
    target_U_A = torch.zeros(len(mdp.x_U_F), mdp.actions).index_add_(0, mdp.seen_M_S.flatten(), wanted_N_A)
    kept, waiting_R = network.kept(), torch.ones(runs, dtype=torch.bool)
    adam = torch.optim.Adam(network.weights, RATE)
    while waiting_R.any():
        rows_n = torch.multinomial(target_U_A.sum(1), IMITATED, replacement=True, generator=random)
        wanted_n_A = target_U_A[rows_n] / target_U_A[rows_n].sum(1, keepdim=True)
        loss = -(wanted_n_A * network.log_prob(mdp.x_U_F[rows_n])).sum(-1).mean(-1).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        there_R = waiting_R & (mdp.success(network.prob(mdp)) >= START)
        for weight, now in zip(kept, network.weights, strict=True):
            weight[there_R] = now.detach()[there_R]
        waiting_R &= ~there_R
    return kept


def clipped_loss(
    log_prob_R_N: torch.Tensor, before_R_N: torch.Tensor, credit_R_N: torch.Tensor, turn_R_N: torch.Tensor
) -> torch.Tensor:
    """[R]: each run's `turn_policy_loss` with a token a turn and the mean over the run's turns, all runs at once."""
    ratio_R_N = (log_prob_R_N - before_R_N).exp()
    clipped_R_N = ratio_R_N.clamp(1 - CLIP, 1 + CLIP)
    gain_R_N = torch.minimum(ratio_R_N * credit_R_N, clipped_R_N * credit_R_N)
    return -((gain_R_N * turn_R_N).sum(1) / turn_R_N.sum(1))


class MdpLearning:
    """R runs of ``network``'s policies, each with an order of tasks of its own; the seed gives every credit the same ones.

    A step rolls 128 / ``group`` tasks out ``group`` times and makes 4 updates, each of a quarter of the tasks. Advantages
    are divided by the root of their mean square over the run's step.
    """

    def __init__(self, mdp: Mdp, network: Network, seed: int, *, group: int = 8, rate: float = RATE):
        self._mdp, self._group, self._tasks = mdp, group, ROLLOUTS // group
        self._runs = network.runs
        self._network = network
        self._adam = torch.optim.Adam(network.weights, rate)
        self._random, self._steps = torch.Generator().manual_seed(seed), 0
        asked = len(mdp.map_Q) - mdp.unseen
        orders = [torch.randperm(asked, generator=self._random) for _ in range(self._runs)]
        self._order = mdp.unseen + torch.stack(orders)

    def success(self) -> torch.Tensor:
        """The exact success over the unseen tasks, [R]."""
        return self._mdp.success(self._network.prob(self._mdp))

    def step(self, credit: Credit) -> None:
        mdp, first = self._mdp, self._steps * self._tasks
        asked = torch.arange(first, first + self._tasks) % self._order.shape[1]
        self._steps += 1
        prob_R_U_A = self._network.prob(mdp)
        rolled, action_B_K1, row_B_K1 = self._roll(prob_R_U_A, self._order[:, asked])
        credit_B_K1 = credit(rolled)
        shape = self._runs, UPDATES, -1
        turn_R_4_N = rolled.turn_B_K1.view(shape)
        credit_R_4_N = credit_B_K1.view(shape).float()
        square_R = credit_R_4_N.square().sum((1, 2)) / turn_R_4_N.sum((1, 2))
        credit_R_4_N = credit_R_4_N / torch.where(square_R > 0, square_R.sqrt(), 1.0)[:, None, None]
        row_R_4_N, action_R_4_N = row_B_K1.view(shape), action_B_K1.view(shape)
        run_R_1_1 = torch.arange(self._runs)[:, None, None]
        before_R_4_N = prob_R_U_A[run_R_1_1, row_R_4_N, action_R_4_N].log()
        for part in range(UPDATES):
            log_prob_R_N_A = self._network.log_prob(mdp.x_U_F[row_R_4_N[:, part]])
            log_prob_R_N = log_prob_R_N_A.gather(2, action_R_4_N[:, part, :, None]).squeeze(2)
            of_part = (one[:, part] for one in (before_R_4_N, credit_R_4_N, turn_R_4_N))
            self._adam.zero_grad()
            clipped_loss(log_prob_R_N, *of_part).sum().backward()
            self._adam.step()

    def _roll(
        self, prob_R_U_A: torch.Tensor, task_R_q: torch.Tensor
    ) -> tuple[Rolled, torch.Tensor, torch.Tensor]:
        """(trajectories, actions [B, K1], rows of features [B, K1])."""
        mdp, random = self._mdp, self._random
        task_B = task_R_q.flatten().repeat_interleave(self._group)
        run_B = torch.arange(self._runs).repeat_interleave(self._tasks * self._group)
        map_B, state_B = mdp.map_Q[task_B], mdp.start_Q[task_B]
        alive_B, solved_B = (
            torch.ones_like(task_B, dtype=torch.bool),
            torch.zeros_like(task_B, dtype=torch.bool),
        )
        turns_B, columns = torch.zeros_like(task_B), []
        for _ in range(mdp.limit):
            row_B = mdp.seen_M_S[map_B, state_B]
            drawn_B_1 = torch.rand(len(task_B), 1, generator=random)
            sum_B_A = prob_R_U_A[run_B, row_B].cumsum(1)
            action_B = (drawn_B_1 > sum_B_A).sum(1).clamp(max=mdp.actions - 1)
            columns.append((state_B, action_B, row_B, mdp.progress_M_S[map_B, state_B]))
            turns_B = turns_B + alive_B
            solved_B = solved_B | (alive_B & mdp.solved_M_S_A[map_B, state_B, action_B])
            alive_B = alive_B & ~solved_B
            state_B = torch.where(alive_B, mdp.next_M_S_A[map_B, state_B, action_B], state_B)
        state_B_K1, action_B_K1, row_B_K1, progress_B_K1 = (
            torch.stack(c, 1) for c in zip(*columns, strict=True)
        )
        rolled = Rolled(
            run_B=run_B,
            group_B=torch.arange(task_R_q.numel()).repeat_interleave(self._group),
            task_B=task_B,
            outcome_B=solved_B.double(),
            n_tool_turns_B=turns_B - 1,
            signal_B_K=progress_B_K1.cummax(1).values.diff(dim=1),
            state_B_K1=state_B_K1,
            seen_B_K1_D=progress_B_K1[:, :, None],
            true_B_K1=lambda: self._true(prob_R_U_A, run_B, map_B, state_B_K1, turns_B),
        )
        return rolled, action_B_K1, row_B_K1

    def _true(self, prob_R_U_A, run_B, map_B, state_B_K1, turns_B) -> torch.Tensor:
        """V of the states before each turn with the decisions that are left there, [B, K1]; 0 after a row's last turn."""
        map_m, place_B = map_B.unique(return_inverse=True)
        value_B_K1 = torch.zeros(state_B_K1.shape, dtype=torch.float64)
        for left, value_R_m_S in enumerate(self._mdp.values(prob_R_U_A, map_m), start=1):
            turn = self._mdp.limit - left
            value_B_K1[:, turn] = value_R_m_S[run_B, place_B, state_B_K1[:, turn]]
        return torch.where(torch.arange(self._mdp.limit) < turns_B[:, None], value_B_K1, 0.0)
