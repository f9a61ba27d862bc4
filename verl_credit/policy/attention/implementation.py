"""Registers our kernels as values of transformers' ``attn_implementation``, chooses one, and checks sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from verl_credit.errors import IntegrityError
from verl_credit.policy.attention.kernels import KERNELS, TOLERANCE, Heads, trial
from verl_credit.policy.attention.pack import PACK, Pack, pushed
from verl_credit.policy.families import AUTO
from verl_credit.policy.families import OURS as NAMES

PREFIX = "credit_"
PREFERENCE = {"cuda": ("varlen", "sdpa", "flex")}  # others: sdpa

# Keywords that models pass on and that do not change which tokens a token sees.
HARMLESS = ("position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "is_causal")  # fmt: skip

_forced: list[str] = []


@dataclass(frozen=True)
class Choice:
    """A kernel that passed the trial on this device, and why the preferred ones did not."""

    kernel: str
    error: float
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        over = f"; {'; '.join(self.passed_over)}" if self.passed_over else ""
        return f"{self.kernel} (within {self.error:.1g} of the definition{over})"


def install() -> None:
    """Registers the names in transformers, without a mask function: only the pack decides which tokens a token sees."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in NAMES:
        if name not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(name, partial(attention, name))


def attention(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    credit_pack: Pack | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer. Raises for calls that it would compute wrongly."""
    name = f"attn_implementation={implementation}"
    if credit_pack is None:
        where = "in verl_credit's engine with use_remove_padding=True, and in models whose layers hand it on"
        raise IntegrityError(f"{name} got no {PACK}: it works only {where}")
    if attention_mask is not None:
        raise IntegrityError(f"{name} got a mask, but takes only a {PACK}")
    credit_pack.require(name, query.shape[0], query.shape[2])
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise IntegrityError(f"{name}: {type(module).__name__} is not causal")
    if unknown := sorted({key for key, given in others.items() if given is not None} - {*HARMLESS}):
        passes = f"{type(module).__name__} passes {', '.join(unknown)}"
        raise IntegrityError(f"{name}: {passes}, which would be ignored")
    if _open:
        _open[-1][id(module)] = sliding_window
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel = KERNELS[choice(implementation, query, key).kernel]
    options = {"scaling": scaling, "window": sliding_window, "softcap": softcap, "dropout": dropout}
    return kernel(query, key, value, credit_pack, **options), None


def named(kernel: str) -> str:
    """The ``attn_implementation`` of this kernel of `KERNELS`."""
    return PREFIX + kernel


def choice(implementation: str, query: torch.Tensor, key: torch.Tensor) -> Choice:
    """The kernel for this kind of tensors."""
    wanted = _forced[-1] if _forced else implementation
    heads = Heads(query.shape[1], key.shape[1], query.shape[3])
    return _chosen(wanted, query.device, query.dtype, heads, torch.is_grad_enabled())


_choices: dict[tuple, Choice] = {}


def _chosen(*kind) -> Choice:
    """`choose` for (name, device, dtype, heads, need of gradients), which is called once for each."""
    if kind not in _choices:
        _choices[kind] = choose(*kind[:4], gradients=kind[4])
    return _choices[kind]


def choose(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    kernels: dict = KERNELS,
    gradients=True,
) -> Choice:
    """The first kernel that imports, runs here, and agrees with the definition (`trial`). Raises RuntimeError with every
    kernel's reason when none does; ValueError for a name that is not in `NAMES`."""
    if wanted not in NAMES:
        raise ValueError(f"attn_implementation={wanted!r}; expected one of {', '.join(NAMES)}")
    names = PREFERENCE.get(device.type, ("sdpa",)) if wanted == AUTO else (wanted.removeprefix(PREFIX),)
    passed_over: list[str] = []
    for name in names:
        try:
            error = trial(kernels[name], device, dtype, heads, gradients)
            if error <= TOLERANCE[dtype]:
                return Choice(name, error, tuple(passed_over))
            passed_over.append(f"{name}: off by {error:.2g} on {device} in {dtype}")
        except Exception as failure:
            passed_over.append(
                f"{name}: {type(failure).__name__}: {str(failure).partition(chr(10))[0][:160]}"
            )
    raise RuntimeError(f"no attention kernel works for {wanted!r}: {'; '.join(passed_over)}")


def chosen(implementation: str) -> list[Choice]:
    """The kernels, for forward and training, that this process uses under a name for each kind of tensor so far. Raises
    RuntimeError when no kernel can train."""
    kinds = {key[:4] for key in _choices if key[0] == implementation}
    return [_chosen(*key, gradients) for key in sorted(kinds, key=str) for gradients in (False, True)]


def forced(kernel: str):
    """Each of our names selects this kernel inside the block, for tests and benchmarks."""
    return pushed(_forced, named(kernel))


_open: list[dict[int, int | None]] = []


def recorded():
    """{id of an attention layer: the window it passed}, for every layer that attends inside the block."""
    return pushed(_open, {})


def sliding_layers(text_config) -> tuple[int, str]:
    """How many layers have a sliding window (without ``layer_types``: all), and the key of the config that sets it."""
    if not getattr(text_config, "sliding_window", None):
        return 0, "sliding_window"
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        return list(kinds).count("sliding_attention"), "layer_types"
    return text_config.num_hidden_layers, "sliding_window"


def require_windows(text_config, windows: dict[int, int | None]) -> None:
    """Raises IntegrityError when fewer layers passed a window than the config sets.

    Some models of transformers put the window only into the mask, which is never built for our kernels. They would attend
    without a window, and the proof's short rows would not reveal it.
    """
    wanted, key = sliding_layers(text_config)
    passed = sum(window is not None for window in windows.values())
    if passed < wanted:
        off = (
            "use_sliding_window=false"
            if hasattr(text_config, "use_sliding_window")
            else "sliding_window=null"
        )
        raise IntegrityError(
            f"{text_config.model_type}: {key} of the model's config.json gives {wanted} layers a sliding window of "
            f"{text_config.sliding_window}, but only {passed} pass it to the attention; the others have it in their mask, "
            f"which this attention never gets. Set {off} there if the model may read without a window"
        )
