"""Draws one token per row from next-token logits, with each row's own parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128
"""Indices in a block of a draw. It divides 151,936, the vocabulary of Qwen's models."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. Raises ValueError for a field with its value and what is accepted.

    `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 do not truncate; `seed` None draws a fresh seed; generation ends
    with the first of `stop_token_ids` (kept in the output) or after `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for field, (kind, fits, accepted) in FIELDS.items():
            value = getattr(self, field)
            every = (value,) if field != "stop_token_ids" else value
            if not all(isinstance(one, kind) and not isinstance(one, bool) and fits(one) for one in every):
                raise ValueError(f"sampling parameter {field}={value!r}: expected {accepted}")


NUMBER = (int, float)
FIELDS = {
    "max_new_tokens": ((int,), lambda n: n >= 1, "an integer >= 1"),
    "temperature": (NUMBER, lambda t: 0 <= t < float("inf"), "a number >= 0"),
    "top_p": (NUMBER, lambda p: 0 < p <= 1, "a number in (0, 1]"),
    "top_k": ((int,), lambda k: k == -1 or k >= 1, "-1 (off) or an integer >= 1"),
    "seed": (
        (int, type(None)),
        lambda seed: seed is None or 0 <= seed < 2**63,
        "None or an integer in [0, 2**63)",
    ),
    "stop_token_ids": ((int,), lambda token: token >= 0, "token ids >= 0"),
}


class RowSampler:
    """The sampling state of a batch of rows: parameters as tensors, and every row's uniform numbers.

    Row b's uniforms come from its own seeded generator and are drawn for all steps beforehand, so that a row's samples do
    not depend on the other rows but for rounding of the logits.
    """

    def __init__(
        self, params: Sequence[SamplingParams], device: torch.device, sampled_vocab_size: int | None = None
    ):
        self.sampled_vocab_size, self.device, self._params = sampled_vocab_size, device, list(params)
        self.temperature_B = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self.top_k_B = torch.tensor([p.top_k for p in params], device=device)
        steps = max(p.max_new_tokens for p in params)
        uniform_B_N = torch.zeros(len(params), steps, dtype=torch.float64)
        for row, p in enumerate(params):
            if p.temperature > 0:
                generator = torch.Generator()
                generator.seed() if p.seed is None else generator.manual_seed(p.seed)
                uniform_B_N[row, : p.max_new_tokens].uniform_(generator=generator)
        self.uniform_B_N = uniform_B_N.to(device)
        self._index_groups()

    def select(self, keep: torch.Tensor) -> None:
        """Keep the rows whose positions are in `keep`."""
        for name in ("temperature_B", "top_p_B", "top_k_B", "uniform_B_N"):
            setattr(self, name, getattr(self, name)[keep])
        self._params = [self._params[row] for row in keep.tolist()]
        self._index_groups()

    def _index_groups(self) -> None:
        """Groups come from the host's parameters, because a look at those on a device would wait for it."""
        rows = list(enumerate(self._params))
        greedy = [row for row, p in rows if p.temperature == 0]
        cut = [row for row, p in rows if p.temperature > 0 and (p.top_p < 1 or p.top_k > 0)]
        self.greedy_rows = torch.tensor(greedy, dtype=torch.long, device=self.device)
        self.truncated_rows = torch.tensor(cut, dtype=torch.long, device=self.device)
        # Greedy rows are reported at T=1, because at T=0 every log-probability is 0.
        self.divisor_B_1 = torch.where(self.temperature_B == 0, 1.0, self.temperature_B).unsqueeze(1)

    def sample(self, logits_B_V: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B] and their float32 log-probabilities [B] for the step-th new token.

        log p = log_softmax(logits / T) over the whole vocabulary: top-k and top-p restrict the draw but not the reported
        value, because a trainer recomputes log-probabilities from the untruncated distribution.
        """
        log_prob_B_V = torch.log_softmax(logits_B_V.float() / self.divisor_B_1, dim=-1)
        drawable_B_V = log_prob_B_V[:, : self.sampled_vocab_size]
        uniform_B = self.uniform_B_N[:, step]
        greedy, cut = self.greedy_rows, self.truncated_rows
        if len(greedy) + len(cut) < len(uniform_B):
            token_B = inverse_cdf(drawable_B_V.exp(), uniform_B[:, None])[:, 0]
        else:
            token_B = torch.zeros_like(self.top_k_B)
        if len(cut):
            token_B[cut] = _sample_truncated(
                drawable_B_V[cut], self.top_k_B[cut], self.top_p_B[cut], uniform_B[cut]
            )
        if len(greedy):
            token_B[greedy] = drawable_B_V[greedy].argmax(dim=-1)
        return token_B, log_prob_B_V.gather(1, token_B.unsqueeze(1)).squeeze(1)


def inverse_cdf(weight_B_V: torch.Tensor, uniform_B_S: torch.Tensor) -> torch.Tensor:
    """S draws per row: the first index whose cumulative weight exceeds uniform * total; never an index of weight 0.

    A draw finds the block of indices, then the index in the block: the cumulative weights of a whole vocabulary would be
    8 bytes a logit, and a slow pass over them for every token.
    """
    blocks_B_N_K = F.pad(weight_B_V, (0, -weight_B_V.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    cdf_B_N = blocks_B_N_K.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_B_S = torch.minimum(uniform_B_S * cdf_B_N[:, -1:], _below(cdf_B_N[:, -1:]))
    block_B_S = torch.searchsorted(cdf_B_N, target_B_S, right=True)
    before_B_S = F.pad(cdf_B_N, (1, 0)).gather(1, block_B_S)
    chosen_B_S_K = blocks_B_N_K.gather(1, block_B_S.unsqueeze(2).expand(-1, -1, BLOCK))
    cdf_B_S_K = chosen_B_S_K.cumsum(dim=-1, dtype=torch.float64)
    inside_B_S = torch.minimum(target_B_S - before_B_S, _below(cdf_B_S_K[..., -1]))
    return block_B_S * BLOCK + torch.searchsorted(cdf_B_S_K, inside_B_S[..., None], right=True)[..., 0]


def _below(total: torch.Tensor) -> torch.Tensor:
    """A product with a uniform number may round up to the total, which no cumulative weight exceeds."""
    return torch.nextafter(total, torch.zeros_like(total))


def _sample_truncated(
    log_prob_B_V: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, uniform_B: torch.Tensor
) -> torch.Tensor:
    """Draw from the top_k likeliest tokens, and of these from the fewest whose renormalised mass reaches top_p."""
    sorted_B_V, order_B_V = log_prob_B_V.sort(dim=-1, descending=True, stable=True)
    weight_B_V = sorted_B_V.double().exp()
    rank_V = torch.arange(weight_B_V.shape[1], device=weight_B_V.device)
    beyond_k_B_V = (top_k_B.unsqueeze(1) > 0) & (rank_V >= top_k_B.unsqueeze(1))
    weight_B_V = weight_B_V.masked_fill(beyond_k_B_V, 0.0)
    mass_B_V = weight_B_V / weight_B_V.sum(dim=-1, keepdim=True)
    mass_before_B_V = mass_B_V.cumsum(dim=-1) - mass_B_V
    # The likeliest token always stays; top_p = 1 keeps all tokens, in spite of rounding.
    beyond_p_B_V = (mass_before_B_V >= top_p_B.unsqueeze(1)) & (rank_V > 0) & (top_p_B.unsqueeze(1) < 1)
    picked_B_1 = inverse_cdf(weight_B_V.masked_fill_(beyond_p_B_V, 0.0), uniform_B[:, None])
    return order_B_V.gather(1, picked_B_1)[:, 0]
