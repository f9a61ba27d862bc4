"""The proof at start-up compares a packed forward of the real model, with branches, with forwards of the single rows.

It also compares the single rows with transformers' own `eager` attention, which shares no code with our kernels, and checks
that every layer with a sliding window passes it to our kernels. The pack has several blocks of 128 tokens, because kernels
can fail at the borders of blocks.

In float32 no log-prob may differ by more than ``EXACT`` nats. In half precision deep models amplify rounding, so the limits
are wider, on the largest difference, on the means over a row and a branch, and, packed against alone, over all branches:

    HALF · clamp(σ, 0.1, 1),    σ = standard deviation of the log-probs under `eager`, in nats

A flat model hides a wrong mask, so the limit scales with the spread σ. Measured in bfloat16 on a CPU, on random weights
(qwen3, mistral with a window of 7, qwen3_moe; standard deviations of 0.02, 0.1 and 0.25; 4, 28 and 48 layers; two seeds),
divided by clamp(σ, 0.1, 1). Correct models: at most 2.03 (largest; dense ones 1.47), 0.15 (row), 0.42 (branch). Wrong ones
at 0.1 and 0.25, 4 and 28 layers: without a causal mask, with keys moved by one or without a window, a row of at least 0.46;
rows that see each other, a branch of at least 0.93; a window off by one, a row of 0.82 at 0.25 and of 0.28 at 0.1. At 0.02
hardly any fault shows. A base off by one shows in the mean over all branches: at least 0.148 with trained weights and
random ones at 0.25, where correct models have 0.089 at most (evidence/real, section 3). The limit finds 51 of 52 such
faults, the other three 34. Extreme weights can fail although they are correct: two of 18 random models do.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_credit.errors import IntegrityError
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.policy.attention.implementation import chosen, recorded, require_windows
from verl_credit.policy.families import WITHOUT_OURS
from verl_credit.turns.branches import encode_branches

# 639 tokens in five blocks of 128. Bases after, on and before the borders at 128 and, with row 2 from 457 on, 512.
ROWS = (301, 140, 170)
BRANCH_SHAPES = (((301, 4), (129, 4), (128, 4), (127, 4)), (), ((56, 4), (55, 4), (54, 4)))  # (base, tokens)
PACK_TOKENS = 1024  # all of them in one micro-batch
EXACT = {torch.float32: 1e-3, torch.float64: 1e-5}  # `eager` has its softmax in float32
HALF = (3.0, 0.3, 0.75, 0.15)


def prove(engine, vocabulary: int) -> str:
    """Return one line with the kernel and its differences. Raises IntegrityError when they are too large.

    Every rank calls it with the same rows, so that collectives match. `require_windows` may refuse first.
    """
    packed = _log_probs(engine, vocabulary, together=True)
    with recorded() as windows:
        alone = _log_probs(engine, vocabulary, together=False)
    require_windows(engine.model_config.hf_config.get_text_config(), windows)
    kernels = "; ".join(dict.fromkeys(map(str, chosen(engine.module_attention))))
    with _stock_attention(engine):
        stock = _log_probs(engine, vocabulary, together=False)
    dtype = getattr(engine, "_autocast_dtype", torch.float32)
    apart, off = differences(packed, alone), differences(alone, stock)
    message = (
        f"attention: {kernels}; packed rows and branches read as alone within {apart[0]:.1g}, alone as with eager attention "
        f"within {off[0]:.1g}"
    )
    limits = allowed(stock, dtype)
    pairs = [*zip(apart, limits, strict=True), *zip(off[:3], limits[:3], strict=True)]
    if not all(value <= limit for value, limit in pairs):
        raise IntegrityError(
            f"{message}, in the mean of a row {apart[1]:.1g} and {off[1]:.1g}, of a branch {apart[2]:.1g} and "
            f"{off[2]:.1g}, of all branches (packed against alone) {apart[3]:.2g}: in {dtype} at most {limits[0]:.3g} is "
            f"accepted, in the mean of a row {limits[1]:.3g}, of a branch {limits[2]:.3g}, of all branches {limits[3]:.3g}; "
            f"{WITHOUT_OURS}"
        )
    return message


def differences(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, float, float, float]:
    """Differences in nats: the largest of all tokens, the largest mean of a row and of a branch, the mean over the tokens of
    all branches; NaN if a log-prob is NaN."""
    apart = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    means = torch.stack([row.mean() for row in apart])
    rows, branches = means[: len(ROWS)], means[len(ROWS) :]
    all_branches = torch.cat(apart[len(ROWS) :]).mean()
    return float(torch.cat(apart).max()), float(rows.max()), float(branches.max()), float(all_branches)


def allowed(stock: list[torch.Tensor], dtype: torch.dtype) -> tuple[float, ...]:
    """The limits of `differences`."""
    if dtype in EXACT:
        return (EXACT[dtype],) * len(HALF)
    spread = float(torch.cat(stock).std().clamp(0.1, 1.0))
    return tuple(limit * spread for limit in HALF)


@contextmanager
def _stock_attention(engine):
    """Sets `eager` in every config of the model: each module reads its own at each forward, and the engine then does not
    pack."""
    of_modules = (getattr(module, "config", None) for module in engine.module.modules())
    every = (engine.model_config.hf_config, *(c for c in of_modules if hasattr(c, "_attn_implementation")))
    configs = list({id(config): config for config in every}.values())
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _log_probs(engine, vocabulary: int, *, together: bool) -> list[torch.Tensor]:
    """Log-probs of every row and every branch without its last position, from one pack or from single forwards."""
    draw = partial(torch.randint, 0, vocabulary, generator=torch.Generator().manual_seed(0))
    whole = [draw((n,)) for n in ROWS]
    branches = [[(base, draw((tokens,))) for base, tokens in shape] for shape in BRANCH_SHAPES]
    flat = [(row, base, ids) for row, its in zip(whole, branches, strict=True) for base, ids in its]
    rows = whole if together else [*whole, *(torch.cat([row[:base], ids]) for row, base, ids in flat)]
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": nested([torch.ones(len(row), dtype=torch.long) for row in rows]),
        },
        batch_size=len(rows),
    )
    if together:
        data[BRANCHES] = nested(
            [encode_branches([(base, ids.tolist()) for base, ids in its]) for its in branches]
        )
        packed = {SCORE_BRANCHES: True, "use_dynamic_bsz": True, "max_token_len_per_gpu": PACK_TOKENS}
        tu.assign_non_tensor(data, **packed)
    else:
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    tu.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=1.0, use_remove_padding=True,
        use_fused_kernels=False,
    )  # fmt: skip
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    own = [row.float().cpu() for row in output["log_probs"].unbind()]
    if together:
        packed_ends = zip(output[BRANCH_LOG_PROBS].unbind(), branches, strict=True)
        ends = [
            end
            for row, its in packed_ends
            if its
            for end in row.float().cpu().split([len(ids) for _, ids in its])
        ]
    else:
        ends = [row[base:] for row, (_, base, _) in zip(own[len(ROWS) :], flat, strict=True)]
    return [part[:-1] for part in (*own[: len(ROWS)], *ends)]
