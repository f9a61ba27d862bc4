"""Checks before the start that prompts, and answers beside the longest row, fit; else a step would cut them or end the run.

verl's rollout truncates a prompt over the limit silently. With dynamic batching verl refuses a row that is longer than the
forward's budget. On ``old_log_probs`` the answers are appended to their row; with the scorer ``rows`` each answer has
its own row:

    tokens = prompt + response + contexts x sum over gold aliases of (header, prefix, template up to the answer's end)

with contexts = search.max_searches + 1. The length limits give the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config.fit import Place, longest_row
from verl_credit.config.keys import AUTO
from verl_credit.config.resolved import data
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.data import Row, rows_needed
from verl_credit.recipe.model_files import ask_hub, model_values, wrong_model
from verl_credit.turns.rollout.header import assistant_header
from verl_credit.turns.rollout.reward.qa import stated_form
from verl_credit.turns.rollout.search.wire import SCHEMA
from verl_credit.turns.score.requests import AnswerWriter, aliases_that_count, auto_template
from verl_credit.turns.score.scorers import SCORERS

MOST = 5000  # at most this many prompts of a key are tokenised
SLACK = 16  # tokens by which a template may differ between two texts


class NotHere(RuntimeError):
    """An input cannot be read before the start; the message names it and the reason."""


def load_tokenizer(model: DictConfig, *, may_fetch: bool = True):
    """Loads the policy's tokenizer with the recipe's chat template; without ``may_fetch`` from a folder or the hub's cache.

    Raises PreflightError for a folder without a loadable tokenizer and for a tokenizer without a chat template, NotHere
    for a name whose tokenizer is not on this machine.
    """
    from transformers import AutoTokenizer

    path = str(model.get("tokenizer_path") or model.path)
    folder = Path(path).expanduser()
    if may_fetch and not folder.exists():
        try:
            ask_hub(path)
        except Exception:  # no network, or no name of the hub; the cache may have it
            may_fetch = False
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.exists() else path,
            trust_remote_code=bool(model.get("trust_remote_code")),
            local_files_only=not may_fetch,
        )
    except Exception as error:  # the tokenizer's libraries raise arbitrary exceptions
        if folder.exists():
            raise wrong_model(
                path, f"no tokenizer can be loaded from there ({_first_line(error)})"
            ) from error
        raise NotHere(f"the tokenizer of {path} cannot be loaded here ({_first_line(error)})") from error
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    if not tokenizer.chat_template:
        raise wrong_model(
            path,
            "its tokenizer has no chat template; take an instruct model, or give a template with "
            "actor_rollout_ref.model.custom_chat_template",
        )
    return tokenizer


class PromptMeter:
    """Counts a prompt's tokens as the agent loop writes it: chat template, its arguments, the search tool's schema."""

    def __init__(self, tokenizer, config: DictConfig):
        self.tokenizer = tokenizer
        self.tools = [SCHEMA] if config.search.max_searches else None
        self.kwargs = data(config.data.get("apply_chat_template_kwargs")) or {}
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
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt):
            return float("inf")
        roles = tuple(message.get("role") for message in prompt)
        if roles not in self._around:
            self._around[roles] = self.count([{"role": role, "content": "."} for role in roles]) + SLACK
        return self._around[roles] + sum(len(message["content"].encode()) for message in prompt)


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
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


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
    left_out: list[tuple[float, str]] = []
    cut: list[tuple[float, str]] = []
    for _, row in doubtful[:most]:
        if (n := measured(row, meter.count)) > limit:
            dropped = filters and meter.count(row.prompt, with_tools=False) > limit
            (left_out if dropped else cut).append((n, row.where))
    (longest, where), least = max(cut or left_out or [(0, "")]), "at least " if unread else ""
    found = (
        f"{key}: {least}{len(cut or left_out)} of {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens "
        f"(the longest, {where}, has {longest})"
    )
    if cut:
        leave = "verl's filter does not see them, for it counts without the search tool's schema"
        leave = leave if filters else "shorten them, or set data.filter_overlong_prompts=true"
        use = f"raise data.max_prompt_length to {longest}; {leave}"
        raise PreflightError(f"{found}, chat template and search tool counted, and would be cut: {use}")
    if (left := len(rows) - len(left_out)) < needed:
        use = f"data.filter_overlong_prompts=true leaves {left} rows, and at least {needed} are needed"
        raise PreflightError(f"{found}; {use}")
    lines = [f"{found} and left out (data.filter_overlong_prompts=true)"] if left_out else []
    if unread:
        lines.append(
            f"{key}: {unread} prompts that may be too long were not counted, only the {most} longest"
        )
    return lines


def answers_fit(
    config: DictConfig, settings: CreditSettings, place: Place, tokenizer, rows: Iterable[Row]
) -> str:
    """Returns a sentence with the most tokens that the answers of these rows need.

    Raises PreflightError with the row that needs most and the budget that it needs, and for a tokenizer that cannot write
    the answers.
    """
    (key, budget, room, contexts), row, model = place, longest_row(config), config.actor_rollout_ref.model
    try:
        where, tokens, n_golds = worst_row(tokenizer, settings, rows, room // contexts)
    except (OSError, ValueError) as error:
        written_with = f"the tokenizer of {model.get('tokenizer_path') or model.path}"
        why = f"the gold answers cannot be written with {written_with}: {error}"
        raise wrong_model(model.path, why) from error
    needed = contexts * tokens
    golds = "gold answer" if n_golds == 1 else f"{n_golds} gold answers"
    product = f"{contexts} x {tokens} tokens (contexts x the {golds} of {where})"
    if needed > room:
        fewer = ", or algorithm.info_gain_aliases=first" if n_golds > 1 else ""
        raise PreflightError(
            f"{key}={budget} cannot hold the longest row and its answers: data.max_prompt_length + "
            f"data.max_response_length = {row}, and {product} = {needed}. Set it to {budget + needed - room} or more{fewer}"
        )
    return f"the longest answers of a row: {product} = {needed}; {key}={budget} has room for {room}"


def worst_row(
    tokenizer, settings: CreditSettings, rows: Iterable[Row], enough: int = 0
) -> tuple[str, int, int]:
    """Returns (where, tokens after one context, number of gold answers) for the row that needs most.

    Rows are tried longest text first, until no remaining row can exceed the maximum so far (a token has a byte at least) or
    ``enough``: where all rows surely fit, the row with the longest text is returned.
    """
    counter, algorithm = _Counter(tokenizer, settings), settings.algorithm
    texts = []
    for where, prompt, truth, *_ in rows:
        golds, template = aliases_that_count(truth, algorithm.info_gain_aliases), algorithm.info_gain_template
        if template == AUTO:
            template = auto_template(stated_form(truth), partial(str, prompt))
        appended = SCORERS[algorithm.info_gain_scorer].rides
        for together in [golds] if appended else [[gold] for gold in golds]:
            texts.append((counter.at_most(together, template), where, together, template))
    worst = ("", -1, 0)
    for most, where, golds, template in sorted(texts, key=lambda entry: -entry[0]):
        if most <= (max(worst[1], enough) if worst[0] else 0):
            break
        tokens = counter.tokens(golds, template)
        if tokens > worst[1]:
            worst = (where, tokens, len(golds))
    return worst


class _Counter:
    """Counts the tokens that the answers of a row add to one of its contexts."""

    def __init__(self, tokenizer, settings: CreditSettings):
        self.writer = AnswerWriter(tokenizer, settings)
        # written after every context that does not end at a call
        self.header = assistant_header(tokenizer, settings.chat_template_kwargs)
        self.places = (False, True) if self.writer.header else (False,)

    def at_most(self, golds: Sequence[str], template: str) -> int:
        """A token has a byte at least; the header is written, the tail written again, and a token stands before."""
        around = 2 * len(self.header) + 1 + len((self.writer.prefix + template).encode())
        return sum(around + len(gold.encode()) for gold in golds)

    def tokens(self, golds: Sequence[str], template: str) -> int:
        return max(sum(self._one(gold, template, after_turn) for gold in golds) for after_turn in self.places)

    def _one(self, gold: str, template: str, after_turn: bool) -> int:
        """The tokens of an answer's branch end with the last gold token; at least one precedes the first gold token."""
        written = self.writer.prefix_at(self.header, after_turn) + template
        _, answer = self.writer.write(self.writer.tail(self.header), gold, written, after_turn)
        return answer.gold_end + (answer.gold_start == 0)
