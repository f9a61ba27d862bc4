"""The policy's hidden states before turns, from the step's old_log_probs forward (`policy/hidden.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from verl_credit.config.fit import ULYSSES, turns_at_most
from verl_credit.config.keys import reads
from verl_credit.config.resolved import Config, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.lazy import torch
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.scorers import Forward
from verl_credit.turns.scorers.scorer import BYPASS

Span = tuple[int, int]
"""(first token of prompt and response, number of tokens), at least one token."""
ACTOR = "actor_rollout_ref.actor"
PACKED = "actor_rollout_ref.model.use_remove_padding"


def needs(config: Config, key: str) -> None:
    """Raises ConfigError where no forward can read them; ``key``: the key that asks for them."""
    if select(config, BYPASS):
        use = "hidden states are read in the old_log_probs forward, which is then not made; set it to false"
        raise ConfigError.of(config, BYPASS, key, accepted=use)
    if not select(config, PACKED):
        raise ConfigError.of(
            config, PACKED, key, accepted="hidden states are read from packed rows; set it to true"
        )
    for name in (f"{ACTOR}.{ULYSSES}", f"{ACTOR}.fsdp_config.{ULYSSES}"):
        if (select(config, name) or 1) > 1:
            use = "hidden states of a row that several ranks share are not read; set it to 1"
            raise ConfigError.of(config, name, key, accepted=use)


def says(config: Config, width: int | None) -> str:
    """The most that a step's states take. ``width``: the policy's hidden size; None: not known yet."""
    rows, contexts = (
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        turns_at_most(config)[1],
    )
    size = (
        "2 bytes for each number of a turn's hidden state" if width is None else f"{2 * width:,} bytes a turn"
    )
    if None not in (width, contexts):
        states = rows * contexts
        size = f"up to {max(states * width * 2 / 1e6, 0.1):,.1f} MB a step ({states:,} states of {width:,})"
    steps = 1 + config.algorithm.turn_values_replay
    return f"no forward of its own; {size} in bf16, {steps} steps of them with the replay"


def spans_of(settings: CreditSettings, turns: TurnBatch) -> list[list[Span]] | None:
    """The spans whose states the step reads; None: it reads none."""
    if reads.valued(settings) and settings.algorithm.observed_values == reads.HIDDEN:
        return before_turns(turns)
    return since_last_turns(turns) if reads.near(settings) else None


def layer_of(settings: CreditSettings) -> int:
    """The layer of these states; values read the last one."""
    return settings.algorithm.turn_anchor_layer if reads.near(settings) else -1


def since_last_turns(turns: TurnBatch) -> list[list[Span]]:
    """What the policy has read since its last turn, row by row: the prompt, then what tools returned."""
    spans = []
    for (row, prompt), n_turns in zip(enumerate(turns.prompt_ids), turns.n_turns_B.tolist(), strict=True):
        ids, before, of_row = turns.turn_ids_B_T[row].tolist(), 0, []
        for turn in range(n_turns):
            start = len(prompt) + ids.index(turn)
            of_row.append((min(before, start - 1), max(start - before, 1)))
            before = len(prompt) + max(place for place, one in enumerate(ids) if one == turn) + 1
        spans.append(of_row)
    return spans


def before_turns(turns: TurnBatch) -> list[list[Span]]:
    """The last token before each turn's response, row by row: the policy has read all of the state there, and has not begun
    to write."""
    return [
        [(len(prompt) + ids.index(turn) - 1, 1) for turn in range(n_turns)]
        for ids, prompt, n_turns in zip(
            turns.turn_ids_B_T.tolist(), turns.prompt_ids, turns.n_turns_B.tolist(), strict=True
        )
    ]


def encode_spans(spans: Sequence[Sequence[Span]]) -> torch.Tensor:
    """A nested tensor. A row without spans (a padding row of verl's) gets the first token, as no row may be empty."""
    rows = [torch.tensor(of_row or [(0, 1)], dtype=torch.int32).flatten() for of_row in spans]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def hidden_table(forward: Forward, spans: Sequence[Sequence[Span]]) -> torch.Tensor:
    """hidden_B_K1_D after the forward, in its dtype; NaN where a row has no such span."""
    states = [
        flat.view(max(1, len(of_row)), -1)[: len(of_row)]
        for flat, of_row in zip(forward.hidden(), spans, strict=True)
    ]
    columns = max(1, *map(len, spans))  # as wide as the step's other tables
    table = states[0].new_full((len(spans), columns, states[0].shape[1]), torch.nan)
    for row, state_K_D in enumerate(states):
        table[row, : len(state_K_D)] = state_K_D
    return table
