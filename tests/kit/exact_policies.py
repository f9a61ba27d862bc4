"""Policies small enough to list every sequence: the entropy, its gradient and its change are sums, not estimates.

The vocabulary is 0, 1 and END. A sequence stops after END or after ``longest`` tokens. Probabilities, entropies and the
nucleus are written here a second time, in plain terms, so that they can judge ``verl_credit.study.probe``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import product

import torch

from verl_credit.credit.entropy_gradient import EntropyGradient, Tokens, entropy_gradient
from verl_credit.study.probe.policy import Parameters, Sampling, gradient, log_prob_and_entropy

END, VOCABULARY = 2, 3
FULL = Sampling()


class ExactPolicy:
    """A policy whose row i is the reachable sequence ``drawn_B[i]`` (default: every sequence once).

    Axes: S sequences, Q states (a prompt and a prefix), V tokens, T places, D parameters in one vector.
    """

    def __init__(
        self, logits: Callable, parameters: Parameters, sampling: Sampling, prompts: int, longest: int
    ):
        self._logits, self.parameters, self.sampling = logits, parameters, sampling
        self.prompts, self.longest = prompts, longest
        self.states = [
            (p, prefix)
            for p in range(prompts)
            for k in range(longest)
            for prefix in product((0, 1), repeat=k)
        ]
        number = {state: i for i, state in enumerate(self.states)}
        whole = [
            (p, (*prefix, last))
            for p, prefix in self.states
            for last in ((0, 1, END) if len(prefix) == longest - 1 else (END,))
        ]
        self._kept_Q_V = self._nucleus(parameters)
        self.sequences = [
            (p, y) for p, y in whole if all(self._kept_Q_V[number[p, y[:j]], y[j]] for j in range(len(y)))
        ]
        self.prompt_S = torch.tensor([p for p, _ in self.sequences])
        self.length_S = torch.tensor([len(y) for _, y in self.sequences])
        self.written_S_T = torch.arange(longest) < self.length_S[:, None]
        self.state_S_T, self.token_S_T = (
            torch.zeros(len(self.sequences), longest, dtype=torch.long) for _ in range(2)
        )
        for i, (p, y) in enumerate(self.sequences):
            self.state_S_T[i, : len(y)] = torch.tensor([number[p, y[:j]] for j in range(len(y))])
            self.token_S_T[i, : len(y)] = torch.tensor(y)
        self.drawn_B = torch.arange(len(self.sequences))

    def of(self, drawn_B: torch.Tensor) -> ExactPolicy:
        """The same policy on these sequences."""
        other = object.__new__(ExactPolicy)
        other.__dict__.update(self.__dict__, drawn_B=drawn_B)
        return other

    def tokens(self, parameters: Parameters, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits_N_V, token_N, written_b_T = self._read(parameters, rows)
        sampled_N_V = self._read(self.parameters, rows)[0]
        found = log_prob_and_entropy(logits_N_V, token_N, self.sampling, sampled_N_V)
        where = written_b_T.nonzero(as_tuple=True)
        return tuple(v.new_zeros(written_b_T.shape).index_put(where, v) for v in found)

    def _read(self, parameters, rows):
        drawn_b = self.drawn_B[rows]
        written_b_T = self.written_S_T[drawn_b]
        logits_Q_V = self._logits(parameters, self.states)
        return (
            logits_Q_V[self.state_S_T[drawn_b][written_b_T]],
            self.token_S_T[drawn_b][written_b_T],
            written_b_T,
        )

    @property
    def written_B_T(self) -> torch.Tensor:
        return self.written_S_T[self.drawn_B]

    # --- the oracle ---

    def _nucleus(self, parameters: Parameters) -> torch.Tensor:
        """[Q, V]: tokens from the most probable on, while the mass before them is below top_p."""
        rows = (
            (self._logits(parameters, self.states).detach() / self.sampling.temperature).softmax(-1).tolist()
        )
        kept = torch.zeros(len(rows), VOCABULARY, dtype=torch.bool)
        for i, p in enumerate(rows):
            mass = 0.0
            for v in sorted(range(VOCABULARY), key=lambda v: -p[v]):
                kept[i, v] = mass < self.sampling.top_p
                mass += p[v]
        return kept

    def _log_q_and_entropy(self, parameters: Parameters, kept_Q_V: torch.Tensor):
        p_Q_V = (self._logits(parameters, self.states) / self.sampling.temperature).softmax(-1) * kept_Q_V
        q_Q_V = p_Q_V / p_Q_V.sum(-1, keepdim=True)
        log_q_Q_V = torch.where(kept_Q_V, q_Q_V, 1.0).log()
        return log_q_Q_V, -(q_Q_V * log_q_Q_V).sum(-1)

    def values(self, parameters: Parameters | None = None) -> Tokens:
        """log q and H of every token of every sequence, [S, T]."""
        at = self.parameters if parameters is None else parameters
        log_q_Q_V, entropy_Q = self._log_q_and_entropy(at, self._kept_Q_V)
        return Tokens(
            torch.where(self.written_S_T, log_q_Q_V[self.state_S_T, self.token_S_T], 0.0),
            torch.where(self.written_S_T, entropy_Q[self.state_S_T], 0.0),
        )

    def probability_S(self, parameters: Parameters | None = None) -> torch.Tensor:
        """Of each sequence, given its prompt; sums to the number of prompts."""
        return self.values(parameters).log_prob_B_T.sum(1).exp()

    def entropy(self, parameters: Parameters | None = None) -> torch.Tensor:
        """The exact entropy per token, a differentiable function of the parameters (the nucleus is that of the rollouts)."""
        q_S, total_S = self.probability_S(parameters), self.values(parameters).entropy_B_T.sum(1)
        return (q_S * total_S).sum() / self.expected_length(parameters) / self.prompts

    def expected_length(self, parameters: Parameters | None = None) -> torch.Tensor:
        return (self.probability_S(parameters) * self.length_S).sum() / self.prompts

    def gradient(self, function: Callable[[Parameters], torch.Tensor]) -> Parameters:
        leaves = {name: p.clone().requires_grad_() for name, p in self.parameters.items()}
        return dict(zip(leaves, torch.autograd.grad(function(leaves), list(leaves.values())), strict=True))

    def derivatives(self) -> Tokens:
        """∇log q and ∇H of every token of every sequence, [S, T, D]."""
        shapes = {name: p.shape for name, p in self.parameters.items()}

        def at(vector_D):
            pieces = vector_D.split([shape.numel() for shape in shapes.values()])
            named = {name: v.view(shape) for (name, shape), v in zip(shapes.items(), pieces, strict=True)}
            return self._log_q_and_entropy(named, self._kept_Q_V)

        log_q_Q_V_D, entropy_Q_D = torch.func.jacfwd(at)(flat(self.parameters))
        mask = self.written_S_T[..., None]
        return Tokens(
            torch.where(mask, log_q_Q_V_D[self.state_S_T, self.token_S_T], 0.0),
            torch.where(mask, entropy_Q_D[self.state_S_T], 0.0),
        )

    def draw(self, generator: torch.Generator, prompts: int, rollouts: int, replicates: int = 1):
        """[replicates, prompts x rollouts] sequence numbers; each group has one prompt, drawn evenly."""
        p_P_S = torch.zeros(self.prompts, len(self.sequences), dtype=torch.float64)
        p_P_S[self.prompt_S, torch.arange(len(self.sequences))] = self.probability_S()
        prompt_N = torch.randint(self.prompts, (replicates * prompts,), generator=generator)
        drawn_N_G = p_P_S[prompt_N].multinomial(rollouts, replacement=True, generator=generator)
        return drawn_N_G.view(replicates, prompts * rollouts)


def tabular(sampling: Sampling = FULL, *, seed: int = 0, prompts: int = 2, longest: int = 4) -> ExactPolicy:
    """Own logits for every state."""
    states = prompts * (2**longest - 1)
    table = torch.randn(
        states, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return ExactPolicy(lambda p, _: p["logits"], {"logits": table}, sampling, prompts, longest)


def two_layers(
    sampling: Sampling = FULL, *, seed: int = 0, prompts: int = 2, longest: int = 4, hidden: int = 4
) -> ExactPolicy:
    """Embeddings of the last two tokens, the place and the prompt, summed -> tanh -> logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "last": (3, hidden),
        "second": (3, hidden),
        "place": (longest, hidden),
        "prompt": (prompts, hidden),
    }
    shapes |= {"out": (hidden, VOCABULARY), "bias": (VOCABULARY,)}
    parameters = {
        n: 0.6 * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()
    }

    def logits(p: Parameters, states):
        prompt, prefix = [s for s, _ in states], [y for _, y in states]
        hidden_Q_H = (
            p["last"][[y[-1] if y else END for y in prefix]]
            + p["second"][[y[-2] if len(y) > 1 else END for y in prefix]]
            + p["place"][[len(y) for y in prefix]]
            + p["prompt"][prompt]
        )
        return hidden_Q_H.tanh() @ p["out"] + p["bias"]

    return ExactPolicy(logits, parameters, sampling, prompts, longest)


ARCHITECTURES = {"tabular": tabular, "two_layers": two_layers}


def flat(parameters: Parameters) -> torch.Tensor:
    return torch.cat([p.flatten() for p in parameters.values()])


class Bench:
    """Many batches of one policy's sequences through an estimator, from tables made once."""

    def __init__(self, policy: ExactPolicy):
        self.policy, self.values = policy, policy.values()

    @cached_property
    def derivatives(self) -> Tokens:
        return self.policy.derivatives()

    def weights(self, drawn_B, group_B, make=entropy_gradient) -> EntropyGradient:
        seen = Tokens(self.values.log_prob_B_T[drawn_B], self.values.entropy_B_T[drawn_B])
        return make(seen, self.policy.written_S_T[drawn_B], group_B)

    def along(self, drawn_B, direction_D) -> Tokens:
        d = self.derivatives
        return Tokens(d.log_prob_B_T[drawn_B] @ direction_D, d.entropy_B_T[drawn_B] @ direction_D)

    def placed(self, drawn_R_B, group_B, make=entropy_gradient):
        """The weights of X̄ on ∇log q and ∇H of every sequence, [R, S, T] each.

        Per token X̄ is (N' - H D') / T with the exact H and T: that is linear, and its expectation is the gradient.
        """
        score_R_S_T = torch.zeros(len(drawn_R_B), *self.policy.written_S_T.shape, dtype=torch.float64)
        path_R_S_T = torch.zeros_like(score_R_S_T)
        with torch.no_grad():
            entropy, length = self.policy.entropy(), self.policy.expected_length()
        for r, drawn_B in enumerate(drawn_R_B):
            found = self.weights(drawn_B, group_B, make)
            score_B_T, weight_B_1 = found.numerator.score_B_T, found.row_weight_B[:, None]
            score_B_T = score_B_T - entropy * found.length.score_B_T
            weight_B_1 = weight_B_1 / length
            score_R_S_T[r].index_add_(0, drawn_B, weight_B_1 * score_B_T)
            path_R_S_T[r].index_add_(0, drawn_B, weight_B_1 * found.numerator.path_B_T)
        return score_R_S_T, path_R_S_T

    def gradients(self, drawn_R_B, group_B, make=entropy_gradient) -> torch.Tensor:
        """X̄ of each replicate, [R, D], by the derivatives of the oracle."""
        placed = self.placed(drawn_R_B, group_B, make)
        d = (self.derivatives.log_prob_B_T, self.derivatives.entropy_B_T)
        return sum(w.flatten(1) @ d_S_T_D.flatten(0, 1) for w, d_S_T_D in zip(placed, d, strict=True))

    def exact(self) -> torch.Tensor:
        return flat(self.policy.gradient(self.policy.entropy))

    def expectation(self, group_B, make=entropy_gradient) -> torch.Tensor:
        """E[X̄] over every possible batch of ``len(group_B)`` rows of the one prompt, [D], by the project's backward pass."""
        assert self.policy.prompts == 1
        every = torch.arange(len(self.policy.sequences))
        drawn_R_B = torch.cartesian_prod(*[every] * len(group_B))
        q_R_1_1 = self.policy.probability_S()[drawn_R_B].prod(1)[:, None, None]
        score, path = ((q_R_1_1 * w).sum(0) for w in self.placed(drawn_R_B, group_B, make))
        return flat(gradient(self.policy, score, path, micro_batch=4))
