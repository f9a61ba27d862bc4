"""The proof at start-up compares a forward of the real model over several rows with forwards of the single rows.

Rows are packed or padded as the run has them; with our attention they have branches. It also compares the single rows with
transformers' own `eager` attention, which shares no code with our kernels, and checks that every layer with a sliding window
passes it to our kernels. The pack has several blocks of 128 tokens, because kernels can fail at the borders of blocks. A
refusal names the first other setting that this model computes right, which is measured in the same way.

In float32 no log-prob may differ by more than ``EXACT`` nats. In half precision deep models amplify rounding, so the limits
are wider, on the largest difference, on the means over a row and a branch, and, packed against alone, over all branches:

    HALF · clamp(σ, 0.1, 1),    σ = standard deviation of the log-probs under `eager`, in nats: flat models hide wrong masks

Measured in bfloat16 on random weights (three families, up to 48 layers), divided by clamp(σ, 0.1, 1): correct models have
at most 2.03 (largest), 0.15 (row), 0.42 (branch) and 0.089 (all branches). Wrong masks have a row of at least 0.46 or a
branch of at least 0.93; a base off by one has 0.148 over all branches; a window off by one a row of 0.28 at σ = 0.1. At
σ = 0.02 hardly any fault shows. Two of 18 models with extreme weights fail although they are correct (evidence/real).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_credit.errors import IntegrityError
from verl_credit.host.engine.log_prob_engine import nested, refuse_model
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.policy.attention.implementation import AUTO, chosen, recorded, require_windows
from verl_credit.turns.score.branches import encode_branches

# 639 tokens in five blocks of 128. Bases after, on and before the borders at 128 and, with row 2 from 457 on, 512.
ROWS = (301, 140, 170)
BRANCH_SHAPES = (((301, 4), (129, 4), (128, 4), (127, 4)), (), ((56, 4), (55, 4), (54, 4)))  # (base, tokens)
NO_BRANCHES = ((),) * len(ROWS)
PACK_TOKENS = 1024  # all of them in one micro-batch
EXACT = {torch.float32: 1e-3, torch.float64: 1e-5}  # `eager` has its softmax in float32
HALF = (3.0, 0.3, 0.75, 0.15)
BESIDE = 1e-3
"""Half precision hides what runs from row to row under rounding. Where another row of the micro-batch changes and all shapes
stay, a right model's log-probs stay to the bit. Not so with experts: their kernels depend on how many tokens each has."""
WAYS = ((AUTO, True), ("sdpa", False), ("eager", False))
"""(attn_implementation, use_remove_padding) that a refusal tries, the fastest first."""


def prove(engine, vocabulary: int) -> str:
    """Return one line with the attention and its differences. Raises IntegrityError with the keys that would be exact when
    the differences are too large.

    Every rank calls it with the same rows, so that collectives match. `require_windows` may refuse first.
    """
    shapes = BRANCH_SHAPES if engine.branches else NO_BRANCHES
    with _attention(engine, "eager"):
        stock = _log_probs(engine, vocabulary, shapes)
    try:
        message, right = _compared(engine, vocabulary, shapes, stock)
    except IntegrityError as error:  # a call that our attention would compute wrongly
        raise IntegrityError(f"{error}. {_other_way(engine, vocabulary, stock)}") from error
    if not _on_all_ranks(right):
        raise IntegrityError(f"{message}. {_other_way(engine, vocabulary, stock)}")
    return message


def _compared(engine, vocabulary: int, shapes, stock) -> tuple[str, bool]:
    """(the line, whether every difference is within its limit)."""
    packed = engine.model_config.use_remove_padding
    read = partial(_log_probs, engine, vocabulary, shapes, packed=packed)
    together = read(together=True)
    with recorded() as windows:
        alone = read()
    kernels = engine.module_attention
    if engine.packs:
        require_windows(engine.model_config.hf_config.get_text_config(), windows)
        kernels = "; ".join(dict.fromkeys(map(str, chosen(engine.module_attention))))
    apart, off = differences(together, alone), differences(alone, stock)
    rows = f"{'packed' if packed else 'padded'} rows{' and branches' if any(shapes) else ''}"
    message = (
        f"attention: {kernels}; {rows} read as alone within {apart[0]:.1g}, alone as with eager attention within "
        f"{off[0]:.1g}"
    )
    dtype = _dtype(engine)
    limits = allowed(stock, dtype)
    if _within(apart, limits) and _within(off[:3], limits):
        if dtype in EXACT or any(name.endswith("experts") for name, _ in engine.module.named_modules()):
            return message, True
        beside = read(together=True, other_first=True)
        pairs = zip(together[1 : len(ROWS)], beside[1 : len(ROWS)], strict=True)
        moved = max(float((a - b).abs().max()) for a, b in pairs)
        if moved <= BESIDE:
            return message, True
        return f"{message}; another first row changes the others by {moved:.1g}", False
    means = zip(("a row", "a branch", "all branches"), apart[1:], off[1:], limits[1:], strict=False)
    found = [f"in the mean of {what} {a:.2g} and {b:.2g}, at most {most:.3g}" for what, a, b, most in means]
    return f"{message}, in {dtype} at most {limits[0]:.3g} is accepted; {'; '.join(found)}", False


def _other_way(engine, vocabulary: int, stock) -> str:
    """A sentence with the keys of the first of `WAYS` whose rows, together and alone, read as `stock`'s."""
    limits, tried = allowed(stock, _dtype(engine)), []
    for name, packed in WAYS:
        with _attention(engine, name):
            scorer = "" if engine.branches else " and algorithm.info_gain_scorer=rows"
            try:
                if name == AUTO:
                    refuse_model(engine.model_config.hf_config, name, packed)
                read = partial(_log_probs, engine, vocabulary, NO_BRANCHES, packed=packed)
                off = [differences(read(together=both), stock[: len(ROWS)]) for both in (True, False)]
                right, why = all(_within(one, limits) for one in off), f"off by {max(off)[0]:.1g}"
            except RuntimeError as error:  # a family's own code, or a device without room for it
                right, why = False, f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        if _on_all_ranks(right):
            return (
                f"With actor_rollout_ref.model.override_config.attn_implementation={name}, "
                f"actor_rollout_ref.model.use_remove_padding={str(packed).lower()}{scorer} this model's rows read as alone "
                f"within {max(off)[0]:.1g}"
            )
        tried.append(f"{name} with use_remove_padding={str(packed).lower()}: {why}")
    return f"No other setting that was tried reads rows as alone (attn_implementation={'; '.join(tried)})"


def _dtype(engine) -> torch.dtype:
    return getattr(engine, "_autocast_dtype", torch.float32)


def _within(values, limits) -> bool:
    return all(value <= limit for value, limit in zip(values, limits, strict=False))  # NaN is not


def _on_all_ranks(right: bool) -> bool:
    """Ranks that go different ways would wait for each other's collectives."""
    wrong = torch.tensor(int(not right))
    torch.distributed.all_reduce(wrong, torch.distributed.ReduceOp.MAX)
    return not wrong.item()


def differences(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, ...]:
    """Differences in nats: the largest of all tokens, the largest mean of a row and, if there are branches, of a branch, and
    the mean over the tokens of all branches; NaN if a log-prob is NaN."""
    apart = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    rows, branches = apart[: len(ROWS)], apart[len(ROWS) :]
    means = [torch.stack([part.mean() for part in parts]).max() for parts in (rows, branches) if parts]
    every = [torch.cat(branches).mean()] if branches else []
    return tuple(map(float, (torch.cat(apart).max(), *means, *every)))


def allowed(stock: list[torch.Tensor], dtype: torch.dtype) -> tuple[float, ...]:
    """The limits of `differences`."""
    if dtype in EXACT:
        return (EXACT[dtype],) * len(HALF)
    spread = float(torch.cat(stock).std().clamp(0.1, 1.0))
    return tuple(limit * spread for limit in HALF)


@contextmanager
def _attention(engine, name: str):
    """Sets the attention in every config of the text model: each module reads its own at each forward. Vision models get no
    packs."""
    root = engine.model_config.hf_config
    of_modules = (getattr(module, "config", None) for module in engine.module.modules())
    every = (root, *(config for config in of_modules if hasattr(config, "_attn_implementation")))
    configs = list(
        {id(config): config for config in every}.values()
    )  # a root before its parts, which it sets too
    before = [config._attn_implementation for config in configs]
    vision = getattr(getattr(root, "vision_config", None), "model_type", None)
    try:
        for config in configs:
            config._attn_implementation = "sdpa" if config.model_type == vision else name
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


def _log_probs(
    engine, vocabulary: int, shapes, *, together: bool = False, packed: bool = True, other_first: bool = False
) -> list[torch.Tensor]:
    """Log-probs of every row and every branch without its last position, from one micro-batch or from single forwards."""
    draw = partial(torch.randint, 0, vocabulary, generator=torch.Generator().manual_seed(0))
    whole = [draw((n,)) for n in ROWS]
    branches = [[(base, draw((tokens,))) for base, tokens in shape] for shape in shapes]
    if other_first:
        whole[0] = whole[0].flip(0)
    flat = [(row, base, ids) for row, its in zip(whole, branches, strict=True) for base, ids in its]
    rows = whole if together else [*whole, *(torch.cat([row[:base], ids]) for row, base, ids in flat)]
    fields = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "loss_mask": nested([torch.ones(len(row), dtype=torch.long) for row in rows]),
    }
    carried = together and bool(flat)
    if carried:
        fields[BRANCHES] = nested(
            [encode_branches([(base, ids.tolist()) for base, ids in its]) for its in branches]
        )
    data = TensorDict(fields, batch_size=len(rows))
    tu.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=1.0, use_remove_padding=packed,
        use_fused_kernels=False, use_dynamic_bsz=together, max_token_len_per_gpu=PACK_TOKENS,
        micro_batch_size_per_gpu=1, **{SCORE_BRANCHES: carried},
    )  # fmt: skip
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    own = [row.float().cpu() for row in output["log_probs"].unbind()]
    ends = [row[base:] for row, (_, base, _) in zip(own[len(ROWS) :], flat, strict=False)]
    if carried:
        of_rows = zip(output[BRANCH_LOG_PROBS].unbind(), branches, strict=True)
        ends = [
            e for row, its in of_rows if its for e in row.float().cpu().split([len(ids) for _, ids in its])
        ]
    return [part[:-1] for part in (*own[: len(ROWS)], *ends)]
