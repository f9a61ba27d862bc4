"""Prompts that are longer than their room: the rollout would cut off their beginning, and say so in no log of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.rules.other_tools import tools_given
from verl_credit.doctor.inputs.model import model_values
from verl_credit.errors import PreflightError

MOST = 5000  # prompts of a key that are tokenised
SLACK = 16  # tokens by which a template may differ between two texts


class Row(NamedTuple):
    path: str
    number: int
    prompt: list[dict]


class PromptMeter:
    """Tokens of a prompt as the agent loop writes it: chat template, its arguments, the search tool's schema."""

    def __init__(self, tokenizer, config: DictConfig):
        from verl_credit.search.protocol import SCHEMA

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
        """A bound that costs no tokenising: a token is at least a byte of the text. Infinite for what is no text."""
        if not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) for message in prompt
        ):
            return float("inf")
        roles = tuple(message.get("role") for message in prompt)
        if roles not in self._around:
            self._around[roles] = self.count([{"role": role, "content": "."} for role in roles]) + SLACK
        return self._around[roles] + sum(len(message["content"].encode()) for message in prompt)


def check_prompts(
    config: DictConfig, key: str, tokenizer, *, at_least: int = 1, most: int = MOST
) -> list[str]:
    """What to say of the prompts in ``key``; raises PreflightError for such as would be cut.

    Prompts that cannot be too long by their bytes are not tokenised; of the others, the ``most`` longest are.
    With data.filter_overlong_prompts verl leaves long ones out, but counts without the search tool's schema.
    """
    limit, filters = config.data.max_prompt_length, bool(config.data.get("filter_overlong_prompts"))
    meter, rows, doubtful = PromptMeter(tokenizer, config), 0, []
    for row in _rows(config.data[key.rpartition(".")[2]]):
        rows += 1
        if (bound := _told(row, meter.at_most)) > limit:
            doubtful.append((bound, row))
    doubtful.sort(key=lambda pair: -pair[0])
    long = [(n, row) for _, row in doubtful[:most] if (n := _told(row, meter.count)) > limit]
    unread = max(0, len(doubtful) - most)
    left_out, cut = [], []
    for n, row in long:
        dropped = filters and meter.count(row.prompt, with_tools=False) > limit
        (left_out if dropped else cut).append((n, row))
    if cut:
        raise PreflightError(_refusal(key, cut, rows, unread, limit, filters))
    if rows - len(left_out) < at_least:
        raise PreflightError(
            f"{key}: {_longer(left_out, rows, unread, limit)}; data.filter_overlong_prompts=true leaves "
            f"{rows - len(left_out)} rows, and at least {at_least} are needed"
        )
    said = []
    if left_out:
        longer = _longer(left_out, rows, unread, limit)
        said.append(f"{key}: {longer} and left out (data.filter_overlong_prompts=true)")
    if unread:
        said.append(
            f"{key}: the {most} longest of {rows} prompts were counted, {unread} that may be too long were not"
        )
    return said


class NotHere(RuntimeError):
    """A tokenizer that is in no folder here and could not be fetched; says which and why."""


def load_tokenizer(model: DictConfig):
    """The policy's, with the recipe's chat template.

    Raises PreflightError for a local folder from which none can be loaded, NotHere for a name that gives none here.
    """
    from transformers import AutoTokenizer

    path = str(model.get("tokenizer_path") or model.path)
    folder = Path(path).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.exists() else path, trust_remote_code=bool(model.get("trust_remote_code"))
        )
    except Exception as error:  # libraries of the tokenizer's own raise what they like
        if folder.exists():
            raise PreflightError(
                f"actor_rollout_ref.model.path={path}: no tokenizer can be loaded from there ({_first_line(error)})"
            ) from error
        raise NotHere(f"the tokenizer of {path} cannot be loaded here ({_first_line(error)})") from error
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


TemplateCheck = Callable[[DictConfig, "PromptMeter"], None]


def check_all_prompts(config: DictConfig, check_template: TemplateCheck | None = None) -> list[str]:
    """Training and validation, and the template that writes them; lines for the run's notes."""
    model = config.actor_rollout_ref.model
    try:
        tokenizer = load_tokenizer(model)
    except NotHere as error:
        return [
            f"prompts were not counted: {error}. Whether its chat template writes the search tool was not tried, and longer "
            f"prompts than data.max_prompt_length="
            f"{config.data.max_prompt_length} would lose their beginning"
        ]
    if check_template is not None:
        check_template(config, PromptMeter(tokenizer, config))
    said = []
    if others := tools_given(config):
        said.append(f"prompts were counted without the tools of {', '.join(others)}")
    said += check_prompts(config, "data.train_files", tokenizer, at_least=config.data.train_batch_size)
    return said + check_prompts(config, "data.val_files", tokenizer)


def _rows(files) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    for path in [files] if isinstance(files, str) else files:
        column = parquet.read_table(Path(path).expanduser(), columns=["prompt"]).column("prompt")
        for number, prompt in enumerate(column.to_pylist()):
            yield Row(path, number, prompt)


def _told(row: Row, measure) -> float:
    """A template that cannot write a prompt (no system role, say) raises what it likes."""
    try:
        return measure(row.prompt)
    except Exception as error:
        raise PreflightError(
            f"{row.path} row {row.number}: the chat template cannot write this prompt ({_first_line(error)}); expected "
            "a list of messages with role and content"
        ) from error


def _longer(found: list[tuple[int, Row]], rows: int, unread: int, limit: int) -> str:
    n, row = max(found, key=lambda pair: pair[0])
    count = f"at least {len(found)}" if unread else str(len(found))
    return (
        f"{count} of {rows} prompts are longer than data.max_prompt_length={limit} tokens (the longest, {row.path} row "
        f"{row.number}, has {n})"
    )


def _refusal(key: str, cut: list[tuple[int, Row]], rows: int, unread: int, limit: int, filters: bool) -> str:
    text = (
        f"{key}: {_longer(cut, rows, unread, limit)}, chat template and search tool counted: their beginning would be cut "
        f"off. Raise data.max_prompt_length to {max(n for n, _ in cut)}"
    )
    if filters:
        return f"{text}; data.filter_overlong_prompts does not see them, it counts without the search tool's schema"
    return f"{text}, shorten them, or leave them out with data.filter_overlong_prompts=true"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
