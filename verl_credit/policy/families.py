"""Which model families give exact numbers, with which attention, padding and scorer, and which ``rollout.name=hf`` decodes.

A family is read from a config.json, as a mapping or as a config of transformers. The facts of the config decide: the kinds
of its layers, its rotary embedding, a cap on the attention's logits. A name decides only where no fact does; the names come
from tiny models (`tests/policy/test_families_forward.py`, transformers 5.10). A family that is in no row runs with our
attention and ``branch``, and the proof at the start decides. This file imports no torch: composing a recipe reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
PACKED = "actor_rollout_ref.model.use_remove_padding"
SCORER = "algorithm.info_gain_scorer"

AUTO = "auto"
OURS = (AUTO, "credit_varlen", "credit_sdpa", "credit_flex")
"""The names of our attention."""
STOCK = ("sdpa", "eager")
"""transformers' attention that runs everywhere; flash_attention_2 and others need a GPU and were not measured."""

ALONE = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}
"""Kinds of layers in which a token reads the tokens that it attends to, and nothing else."""
KINDS = ("layer_types", "layers_block_type", "block_types")
MIXING = (
    "mamba_", "ssm_", "state_size", "linear_attn", "linear_num_", "conv_L_cache", "attention_chunk_size",
)  # fmt: skip
"""How the keys of other kinds of layers begin, for configs that do not list their layers."""
LENGTHS = {
    "dynamic": "max_position_embeddings",
    **dict.fromkeys(("longrope", "su"), "original_max_position_embeddings"),
}
"""The rotary embeddings that change with the longest row, and the key of the length up to which they do not."""
MODALITIES = ("vision_config", "audio_config", "vision_tower", "vq_config")

DELTA_NET = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Their linear layers are Gated DeltaNets, which our engine computes row by row; other linear layers it does not."""
TEXT_OF = ("qwen3_5", "qwen3_5_moe")
"""These read images too, and verl trains them on text alone: the three axes of their positions are equal there."""
SINKS = ("gpt_oss",)
"""Our attention has no sinks, and transformers computes them with eager alone."""
UNMASKED = ("gpt_oss", "granitemoehybrid")
"""transformers' modules of these do not read from the positions where a packed row begins."""
MASKED_WINDOW = ("qwen2_moe",)
"""Other families pass their sliding window to the attention."""
REFUSED = {
    **dict.fromkeys(("nemotron_h", "zamba2"), "its recurrent layers depend on padding too"),
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v4"), "its sparse attention depends on padding too"),
    "doge": "its mask drops tokens of long rows, which no proof on short rows sees",
    "phimoe": "its router draws experts at random in training mode, so that ratios differ from 1 before the first update",
}
"""Families that no keys make exact."""
NOT_DECODED = (
    "deepseek_v4", "doge", "falcon_h1", "glm_moe_dsa", "minimax", "nemotron_h", "olmo_hybrid", "zamba2",
)  # fmt: skip
"""`rollout.name=hf` decodes every other family by its own masks and layers, and proves it at the start."""

DROPOUTS = {"seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1}}
"""transformers' defaults, for a config.json without these keys."""
NOT_OF_THE_LAYERS = ("classifier", "summary")


class Keys(NamedTuple):
    attention: str
    packed: bool
    scorer: str

    def __str__(self) -> str:
        return f"{ATTENTION}={self.attention}, {PACKED}={str(self.packed).lower()} and {SCORER}={self.scorer}"


WITHOUT_OURS = (
    f"exact without it are {Keys('sdpa', False, 'rows')} (eager where transformers has no sdpa for the model)"
)
"""The way out for a family that is in no row."""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    why: str = "nothing in its config.json lets rows read each other, and the proof at the start decides"
    ours: bool = True
    """Our attention is exact, which serves packed rows."""
    branch: bool = True
    """With our attention, answers can be scored behind their row."""
    stock: tuple[str, ...] = STOCK
    """The attention of transformers that is exact. Where ours is not, ``auto`` takes the first."""
    mixes: bool = False
    """With every attention but ours, packed rows read each other."""
    unmasked: bool = False
    """With `STOCK`, packed rows read each other."""
    longest: int | None = None
    """A longer row changes the positions of all rows beside it."""
    refused: bool = False
    """No keys are exact."""

    def packs(self, attention: str | None) -> bool:
        """Do packed rows read nothing of each other?"""
        return attention in OURS or not (self.mixes or (self.unmasked and attention in STOCK))

    def chosen(self, attention=AUTO, packed=AUTO, scorer=AUTO, *, appends: bool = True) -> Keys:
        """Decides every ``auto``. ``appends``: a run has the forward to which answers could be appended."""
        if attention == AUTO and not self.ours:
            attention = self.stock[0]
        if packed == AUTO:
            packed = self.packs(attention)
        if scorer == AUTO:
            scorer = "branch" if attention in OURS and self.branch and appends else "rows"
        return Keys(attention, packed, scorer)

    def fault(self, attention: str | None, packed: bool, scorer: str | None = None) -> tuple[str, str] | None:
        """The key that makes numbers wrong, and a sentence with the reason and the three keys that are exact; or None.
        ``scorer``: None where a run scores nothing."""
        of = f"{self.name}: " if self.name else ""
        if self.refused:
            return "", f"{of}{self.why}; no keys change that, so take another model"
        key, why = self._fault(attention, packed, scorer)
        return (key, f"{of}{why}; exact are {self.chosen()}") if key else None

    def _fault(self, attention: str | None, packed: bool, scorer: str | None) -> tuple[str, str]:
        ours = attention in OURS
        if (ours and not self.ours) or (attention in STOCK and attention not in self.stock):
            return ATTENTION, self.why
        if ours and not packed:
            return PACKED, f"that attention serves packed rows: set {PACKED}=true"
        if packed and not self.packs(attention):
            unread = "transformers does not read where a packed row of it begins, so rows read each other"
            return PACKED, self.why if self.mixes else unread
        if scorer == "branch" and not (ours and self.branch):
            if not self.branch or not self.ours:
                return SCORER, f"{self.why}: an answer cannot be scored behind its row"
            use = f"only {', '.join(OURS)} let an answer see its own context alone; set {ATTENTION}=auto, or {SCORER}=rows"
            return ATTENTION, use
        return "", ""


def family_of(config: Mapping[str, Any] | Any) -> Family:
    """The row of a config. An empty mapping is a model of which nothing is known."""
    root, text = _texts(config)
    names = (root.get("model_type"), text.get("model_type"))
    name = names[0] or names[1] or ""

    def listed(table) -> str | None:
        return next((one for one in names if one in table), None)

    if (found := listed(REFUSED)) is not None:
        return Family(name, REFUSED[found], refused=True)
    if not listed(TEXT_OF) and any(root.get(key) for key in MODALITIES):
        return Family(name, "it reads images or sound, and this project trains text alone", refused=True)
    unmasked = listed(UNMASKED) is not None
    if kinds := _mixing(text):
        why = f"its layers of the kind {', '.join(kinds)} carry a state from row to row of a packed stream"
        delta = (listed(DELTA_NET) or listed(TEXT_OF)) is not None
        why = f"{why} (but for our attention's, which has them start anew)" if delta else why
        return Family(name, why, ours=delta, branch=False, mixes=True)
    if listed(MASKED_WINDOW) and text.get("use_sliding_window") and text.get("sliding_window"):
        return Family(
            name, "its sliding window is in its mask alone, which our attention does not read", ours=False
        )
    if listed(SINKS):
        why = "its attention has sinks, which only eager computes here"
        return Family(name, why, ours=False, stock=("eager",), unmasked=unmasked)
    if text.get("attn_logit_softcapping"):
        why = "transformers' sdpa drops the cap on its attention's logits"
        return Family(name, why, stock=("eager",), unmasked=unmasked)
    kind, longest = _longest(text)
    if kind:
        why = f"its {kind} rotary embedding changes with a row of more than {longest} tokens beside it"
        return Family(name, why, longest=longest, unmasked=unmasked)
    if any("mrope_section" in entry for _, entry in _ropes(text)):
        return Family(name, "its positions have three axes (mrope)", ours=False)
    return Family(name, unmasked=unmasked)


def why_not_decoded(config: Mapping[str, Any]) -> str | None:
    """One sentence for a config.json whose model `rollout.name=hf` cannot decode; None for every other."""
    names = (one.get("model_type") for one in _texts(config))
    if (name := next((name for name in names if name in NOT_DECODED), None)) is None:
        return None
    why = "in transformers its steps with a cache are not its forward of a whole row, or its cache cannot choose rows"
    return f"hf cannot decode model_type={name}: {why}; use actor_rollout_ref.rollout.name=vllm"


def positions(config: Mapping[str, Any] | Any) -> int | None:
    """Tokens that a row decoded by `rollout.name=hf` may have; None where the config names no number.

    Beyond the length at which positions change, keys that a cache already holds would keep the old ones.
    """
    _, text = _texts(config)
    return _longest(text)[1] or text.get("max_position_embeddings")


def _longest(text: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The rotary embedding that changes with the longest row, and the length up to which it does not."""
    for kind, entry in _ropes(text):
        if kind in LENGTHS:
            places = text.get(LENGTHS[kind]), entry.get(LENGTHS[kind]), text.get("max_position_embeddings")
            return kind, next(filter(None, places), None)  # the order of transformers
    return None, None


def dropouts(config: Mapping[str, Any] | Any) -> dict[str, float]:
    """The keys, with the section of the text, that make the model random in training mode."""
    root, text = _texts(config)
    values = {**DROPOUTS.get(text.get("model_type"), {}), **text}
    below = "" if text is root else "text_config."
    return {below + key: value for key, value in values.items() if is_random(key, value)}


def is_random(key: str, value: Any) -> bool:
    """Does this value of the key make a model random in training mode?"""
    leaf = key.rpartition(".")[2]
    named = ("drop" in leaf or leaf.endswith("jitter_noise")) and not leaf.startswith(NOT_OF_THE_LAYERS)
    return named and isinstance(value, int | float) and value > 0


def _texts(config: Mapping[str, Any] | Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The values of a config, and those of its text model, which are a section of their own where it reads images too."""
    root = config if isinstance(config, Mapping) else config.to_dict()
    text = root.get("text_config")
    return root, text if isinstance(text, Mapping) and text else root


def _mixing(text: Mapping[str, Any]) -> list[str]:
    """The kinds of layers in which a token reads more than the tokens that it attends to."""
    listed = [kinds for key in KINDS if isinstance(kinds := text.get(key), list | tuple) and kinds]
    if listed:
        return sorted({str(kind) for kinds in listed for kind in kinds} - ALONE)
    return sorted({mark.strip("_") for mark in MIXING for key in text if key.startswith(mark)})


def _ropes(text: Mapping[str, Any]) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """The rotary embeddings: one, or one for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        yield entry.get("rope_type") or entry.get("type"), entry
