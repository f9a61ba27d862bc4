"""Does every layer that slides by its config say so when it attends?

Our kernels take a window from the layer's call (``sliding_window=``). Some models of transformers put it into the mask
alone, which is never built for us: they would read without a window, and rows as short as the proof's cannot tell.
"""

from __future__ import annotations

from contextlib import contextmanager

_open: list[dict[int, int | None]] = []


@contextmanager
def recorded():
    """{id of an attention layer: the window it asked for}, of every layer that attends meanwhile."""
    _open.append({})
    try:
        yield _open[-1]
    finally:
        _open.pop()


def note(module, window: int | None) -> None:
    if _open:
        _open[-1][id(module)] = window


def sliding_layers(text_config) -> tuple[int, str]:
    """How many layers slide, and the key of the config that says so.

    Without ``layer_types`` a ``sliding_window`` is every layer's.
    """
    if not getattr(text_config, "sliding_window", None):
        return 0, "sliding_window"
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        return list(kinds).count("sliding_attention"), "layer_types"
    return text_config.num_hidden_layers, "sliding_window"


def refuse_unsaid(text_config, asked: dict[int, int | None]) -> None:
    """Raises NotImplementedError when fewer layers asked for a window than slide."""
    wanted, key = sliding_layers(text_config)
    said = sum(window is not None for window in asked.values())
    if said < wanted:
        off = (
            "use_sliding_window=false"
            if hasattr(text_config, "use_sliding_window")
            else "sliding_window=null"
        )
        raise NotImplementedError(
            f"{text_config.model_type}: {key} of the model's config.json lets {wanted} layers slide (sliding_window="
            f"{text_config.sliding_window}), but only {said} ask for a window when they attend; the others have it in "
            f"their mask, which this attention never gets. Set {off} there if the model may read without a window; "
            "otherwise attn_implementation=sdpa, use_remove_padding=false and algorithm.info_gain_scorer=rows"
        )
