"""At start-up: does a packed forward of the real model, branches included, read as its rows do on their own?

And do these read as under transformers' own `eager` attention, which shares no code with our kernels? And does every
layer that slides tell our kernels its window?

In float32 no log-prob may be off by more than ``EXACT`` nats. In half precision a deep model makes much of a rounding, so
that the limit is wider there, on the largest difference and on the mean over a row or the branch:

    HALF · clamp(σ, 0.1, 1),    σ = standard deviation of the log-probs under `eager`, in nats

σ because a model that says much the same of every token does so with a wrong mask, too. Measured in bfloat16 on random
weights of standard deviations up to 0.25 and 2 to 48 layers, divided by clamp(σ, 0.1, 1): right dense models at most 0.81
(largest) and 0.33 (mean), most of them below a third of that. Wrong ones: without a causal mask, with keys moved by one, or
with rows that see each other, means of 0.95 and more; without a window, or with one off by one, largest
differences of 1.37 and more at 0.25, but hardly any at transformers' own 0.02. Finer faults are found in float32
only. Weights that make nats of a rounding (experts at 0.25, 48 dense layers at 0.5) can be refused although right.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_credit.host.attention import chosen
from verl_credit.host.attention.windows import recorded, refuse_unsaid
from verl_credit.host.fields import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.host.gain_branches import encode_branches

ROWS = (11, 7, 16)  # tokens
BRANCH_OF_0, BRANCH_BASE = (5, 6, 7, 8), 6
EXACT = {torch.float32: 1e-3, torch.float64: 1e-6}
HALF = (1.25, 0.5)


def prove(engine, vocabulary: int) -> str:
    """One line that says which kernel runs and how close it is. Raises RuntimeError when it is not.

    Every rank calls it with the same rows, so that collectives match. NotImplementedError: see `refuse_unsaid`.
    """
    packed = _log_probs(engine, vocabulary, together=True)
    with recorded() as windows:
        alone = _log_probs(engine, vocabulary, together=False)
    refuse_unsaid(engine.model_config.hf_config.get_text_config(), windows)
    kernels = "; ".join(dict.fromkeys(map(str, chosen(engine.module_attention))))
    with _stock_attention(engine):
        stock = _log_probs(engine, vocabulary, together=False)
    dtype = getattr(engine, "_autocast_dtype", torch.float32)
    apart, off = differences(packed, alone), differences(alone, stock)
    said = (
        f"attention: {kernels}; packed rows and branches read as alone within {apart[0]:.1g}, alone as with eager attention "
        f"within {off[0]:.1g}"
    )
    largest, mean = allowed(stock, dtype)
    if not all(found[0] <= largest and found[1] <= mean for found in (apart, off)):
        raise RuntimeError(
            f"{said}, in the mean of a row {apart[1]:.1g} and {off[1]:.1g}: more than {largest:.3g}, or in the mean "
            f"{mean:.3g}, in {dtype} is wrong"
        )
    return said


def differences(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, float]:
    """Nats: the largest of all tokens, and the largest mean of a row or branch. NaN where one is NaN."""
    apart = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.cat(apart).max()), float(torch.stack([row.mean() for row in apart]).max())


def allowed(stock: list[torch.Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """What `differences` may be at most."""
    if dtype in EXACT:
        return EXACT[dtype], EXACT[dtype]
    spread = float(torch.cat(stock).std().clamp(0.1, 1.0))
    return HALF[0] * spread, HALF[1] * spread


@contextmanager
def _stock_attention(engine):
    """Every module of the model reads its own config at each forward, and the engine packs only for our names."""
    configs = [
        m.config
        for m in engine.module.modules()
        if hasattr(getattr(m, "config", None), "_attn_implementation")
    ]
    configs = list({id(config): config for config in (engine.model_config.hf_config, *configs)}.values())
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _log_probs(engine, vocabulary: int, *, together: bool) -> list[torch.Tensor]:
    """Of every row, its last position aside, and of the branch of row 0; in one pack, or each in a forward."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (n,), generator=random) for n in ROWS]
    branch = torch.tensor(BRANCH_OF_0) % vocabulary
    if not together:
        rows = [*rows, torch.cat([rows[0][:BRANCH_BASE], branch])]
    data = TensorDict(
        {
            "input_ids": _nested(rows),
            "position_ids": _nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": _nested([torch.ones(len(row), dtype=torch.long) for row in rows]),
        },
        batch_size=len(rows),
    )
    if together:
        grown = [[(BRANCH_BASE, branch.tolist())], [], []]
        data[BRANCHES] = _nested([encode_branches(row) for row in grown])
        tu.assign_non_tensor(
            data, **{SCORE_BRANCHES: True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 256}
        )
    else:
        tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    tu.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=1.0, use_remove_padding=True,
        use_fused_kernels=False,
    )  # fmt: skip
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]
    own = [row[:-1].float().cpu() for row in found["log_probs"].unbind()]
    if together:
        return [*own, found[BRANCH_LOG_PROBS].unbind()[0][:-1].float().cpu()]
    return [*own[:-1], own[-1][BRANCH_BASE:]]


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
