"""Refuses prompts over the limit, which verl's rollout would truncate silently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.inputs.data import Row, rows_needed
from verl_credit.recipe.doctor.inputs.model import model_values

MOST = 5000  # at most this many prompts of a key are tokenised
SLACK = 16  # tokens by which a template may differ between two texts


class PromptMeter:
    """Counts a prompt's tokens as the agent loop writes it: chat template, its arguments, the search tool's schema."""

    def __init__(self, tokenizer, config: DictConfig):
        from verl_credit.turns.search.protocol import SCHEMA

        self.tokenizer = tokenizer
        self.tools = [SCHEMA] if config.search.max_searches else None
        given = config.data.get("apply_chat_template_kwargs") or {}
        self.kwargs = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
        self.model_type = (model_values(config.actor_rollout_ref.model.path) or {}).get("model_type")
        self._around: dict[tuple, int] = {}

    def count(self, prompt: list[dict], *, with_tools: bool = True) -> int:
        text = self.text(prompt, with_tools=with_tools)
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, prompt: list[dict], *, with_tools: bool = True) -> str:
        tools = self.tools if with_tools else None
        return self.tokenizer.apply_chat_template(
            prompt, tools=tools, **self.kwargs, tokenize=False, add_generation_prompt=True
        )

    def at_most(self, prompt: list[dict]) -> float:
        """An upper bound without tokenising: a token is at least a byte of the text. Infinite for a prompt without text."""
        if not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) for message in prompt
        ):
            return float("inf")
        roles = tuple(message.get("role") for message in prompt)
        if roles not in self._around:
            self._around[roles] = self.count([{"role": role, "content": "."} for role in roles]) + SLACK
        return self._around[roles] + sum(len(message["content"].encode()) for message in prompt)


def count_prompts(
    config: DictConfig, key: str, rows: Sequence[Row], tokenizer, *, most: int = MOST
) -> list[str]:
    """Returns notes about the prompts in ``key``; raises PreflightError for prompts that would be cut.

    Prompts that are short enough by their bytes are not tokenised; the ``most`` longest of the others are.
    With data.filter_overlong_prompts verl leaves long ones out, but counts without the search tool's schema.
    """
    limit, filters = config.data.max_prompt_length, bool(config.data.get("filter_overlong_prompts"))
    meter, needed = PromptMeter(tokenizer, config), rows_needed(config, key)
    doubtful = [(bound, row) for row in rows if (bound := measured(row, meter.at_most)) > limit]
    doubtful.sort(key=lambda pair: -pair[0])
    unread = max(0, len(doubtful) - most)
    left_out, cut = [], []
    for _, row in doubtful[:most]:
        if (n := measured(row, meter.count)) > limit:
            dropped = filters and meter.count(row.prompt, with_tools=False) > limit
            (left_out if dropped else cut).append((n, row.where))

    def longer(found: list[tuple[float, str]]) -> str:
        n, where = max(found)
        return (
            f"{key}: {'at least ' if unread else ''}{len(found)} of {len(rows)} prompts are longer than "
            f"data.max_prompt_length={limit} tokens (the longest, {where}, has {n})"
        )

    if cut:
        text = (
            f"{longer(cut)}, chat template and search tool counted: their beginning would be cut off. "
            f"Raise data.max_prompt_length to {max(cut)[0]}"
        )
        if filters:
            text += (
                "; data.filter_overlong_prompts does not see them, it counts without the search tool's schema"
            )
        else:
            text += ", shorten them, or leave them out with data.filter_overlong_prompts=true"
        raise PreflightError(text)
    if len(rows) - len(left_out) < needed:
        raise PreflightError(
            f"{longer(left_out)}; data.filter_overlong_prompts=true leaves {len(rows) - len(left_out)} rows, and at "
            f"least {needed} are needed"
        )
    lines = [f"{longer(left_out)} and left out (data.filter_overlong_prompts=true)"] if left_out else []
    if unread:
        lines.append(
            f"{key}: the {most} longest of {len(rows)} prompts were counted, {unread} that may be too long were not"
        )
    return lines


class NotHere(RuntimeError):
    """The tokenizer is on no local path and could not be fetched; the message names it and the reason."""


def load_tokenizer(model: DictConfig, *, may_fetch: bool = True):
    """Loads the policy's tokenizer with the recipe's chat template; without ``may_fetch`` from a folder or the hub's cache.

    Raises PreflightError for a folder without a loadable tokenizer and for a tokenizer without a chat template, NotHere
    for a name whose tokenizer is not on this machine.
    """
    from transformers import AutoTokenizer

    path = str(model.get("tokenizer_path") or model.path)
    folder = Path(path).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.exists() else path,
            trust_remote_code=bool(model.get("trust_remote_code")),
            local_files_only=not may_fetch,
        )
    except Exception as error:  # the tokenizer's libraries raise arbitrary exceptions
        if folder.exists():
            raise PreflightError(
                f"actor_rollout_ref.model.path={path}: no tokenizer can be loaded from there ({_first_line(error)})"
            ) from error
        raise NotHere(f"the tokenizer of {path} cannot be loaded here ({_first_line(error)})") from error
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        raise PreflightError(
            f"actor_rollout_ref.model.path={path}: its tokenizer has no chat template; take an instruct model, or give "
            "a template with actor_rollout_ref.model.custom_chat_template"
        )
    return tokenizer


def measured(row: Row, measure) -> float:
    """Measures a row. A chat template's own exception, for example for a missing system role, becomes PreflightError."""
    try:
        return measure(row.prompt)
    except Exception as error:
        raise PreflightError(
            f"{row.where}: the chat template cannot write this prompt ({_first_line(error)}); expected "
            "a list of messages with role and content"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
