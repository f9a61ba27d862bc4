"""Checks that every layer with a sliding window in the config passes it to our kernels (``sliding_window=``).

Some models of transformers put the window only into the mask, which is never built for our kernels. They would attend
without a window, and the proof's short rows would not show it.
"""

from __future__ import annotations

from contextlib import contextmanager

_open: list[dict[int, int | None]] = []


@contextmanager
def recorded():
    """{id of an attention layer: the window it passed}, for every layer that attends inside the block."""
    _open.append({})
    try:
        yield _open[-1]
    finally:
        _open.pop()


def note(module, window: int | None) -> None:
    if _open:
        _open[-1][id(module)] = window


def sliding_layers(text_config) -> tuple[int, str]:
    """How many layers have a sliding window, and the key of the config that sets it.

    Without ``layer_types`` a ``sliding_window`` applies to every layer.
    """
    if not getattr(text_config, "sliding_window", None):
        return 0, "sliding_window"
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        return list(kinds).count("sliding_attention"), "layer_types"
    return text_config.num_hidden_layers, "sliding_window"


def require_windows(text_config, found: dict[int, int | None]) -> None:
    """Raises NotImplementedError when fewer layers passed a window than the config sets."""
    wanted, key = sliding_layers(text_config)
    passed = sum(window is not None for window in found.values())
    if passed < wanted:
        uses = hasattr(text_config, "use_sliding_window")
        off = "use_sliding_window=false" if uses else "sliding_window=null"
        raise NotImplementedError(
            f"{text_config.model_type}: {key} of the model's config.json gives {wanted} layers a sliding window of "
            f"{text_config.sliding_window}, but only {passed} pass it to the attention; the others have it in their mask, "
            f"which this attention never gets. Set {off} there if the model may read without a window; otherwise "
            "attn_implementation=sdpa, use_remove_padding=false and algorithm.info_gain_scorer=rows"
        )
