"""At start-up: does a packed forward of the real model, branches included, read as its rows do on their own?

And do these read as under transformers' own `eager` attention, which shares no code with our kernels?
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_credit.host.attention import chosen
from verl_credit.host.fields import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.host.gain_branches import encode_branches

ROWS = (11, 7, 16)  # tokens
BRANCH_OF_0, BRANCH_BASE = (5, 6, 7, 8), 6
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # half precision: 0.2; a wrong mask is off by nats


def prove(engine, vocabulary: int) -> str:
    """One line that says which kernel runs and how close it is. Raises RuntimeError when it is not.

    Every rank calls it with the same rows, so that collectives match.
    """
    packed = _log_probs(engine, vocabulary, together=True)
    alone = _log_probs(engine, vocabulary, together=False)
    kernels = "; ".join(dict.fromkeys(map(str, chosen(engine.module_attention))))
    with _stock_attention(engine):
        stock = _log_probs(engine, vocabulary, together=False)
    dtype = getattr(engine, "_autocast_dtype", torch.float32)
    limit = TOLERANCE.get(dtype, 0.2)
    apart, off = _largest_difference(packed, alone), _largest_difference(alone, stock)
    said = (
        f"attention: {kernels}; packed rows and branches read as alone within {apart:.1g}, alone as with eager attention "
        f"within {off:.1g}"
    )
    if not (apart <= limit and off <= limit):
        raise RuntimeError(f"{said}: more than {limit:g} in {dtype} is wrong")
    return said


def _largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


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
