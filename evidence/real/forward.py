"""The model's forward as the project's scorers see it (`turns.scorers.Forward`), with transformers and without Ray.

Attention is the project's, over packed rows with branches. `ModelForward` keeps the hidden states of the answers' tokens,
so that one forward serves several heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_credit.attention import AUTO, PACK, install, pack_rows
from verl_credit.log_probs.chunks import log_probs_from_logits
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.branches import decode_branches
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.requests import score_table
from verl_credit.turns.scorers import SCORERS, GainPlan, ScoreRow

Head = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, hidden states [N, D], next tokens [N]) -> their log-probs [N]."""
PACK_TOKENS = 4096


def load(folder, dtype: torch.dtype) -> PreTrainedModel:
    install()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=AUTO).eval()


def project_head(model, hidden_N_D: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Logits in the model's dtype, log-softmax in float32: the engine's way without flash-attn's loss."""
    return log_probs_from_logits(model.lm_head(hidden_N_D), labels_N)


class ModelForward:
    """One batch. ``carry`` and ``score_rows`` run the model; ``head`` may change afterwards."""

    budget = None

    def __init__(self, model, turns: TurnBatch, *, autocast: bool = False, head: Head = project_head):
        self.model, self.head, self._autocast = model, head, autocast
        self._trunks = [
            torch.tensor(p + r) for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)
        ]
        self._carried, self._rows = [], {}

    def carry(self, branches: torch.Tensor) -> None:
        decoded = [decode_branches(row) for row in branches.unbind()]
        stream = [torch.cat([trunk, ids]) for trunk, (_, ids) in zip(self._trunks, decoded, strict=True)]
        hidden = self._hidden(stream, list(map(len, self._trunks)), [shape for shape, _ in decoded])
        self._carried = [
            (row[len(trunk) :], ids.roll(-1))  # the label of a branch's last token is never read
            for row, trunk, (_, ids) in zip(hidden, self._trunks, decoded, strict=True)
        ]

    def carried(self) -> list[torch.Tensor]:
        return [self._log_probs(*part) for part in self._carried]

    def written(self) -> list[torch.Tensor]:
        raise NotImplementedError("only infopo reads the responses' log-probs")

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        missing = [row for row in dict.fromkeys(rows) if row not in self._rows]
        while missing:
            pack, missing = _first_pack(missing)
            stream = [torch.tensor(row.context_ids + row.answer.token_ids) for row in pack]
            for row, hidden in zip(pack, self._hidden(stream, list(map(len, stream)), None), strict=True):
                start, end = (
                    len(row.context_ids) + at for at in (row.answer.gold_start, row.answer.gold_end)
                )
                gold = torch.tensor(row.answer.token_ids[row.answer.gold_start : row.answer.gold_end])
                self._rows[row] = hidden[start - 1 : end - 1].clone(), gold
        value = {row: self._log_probs(*self._rows[row]).double().mean() for row in dict.fromkeys(rows)}
        return torch.stack([value[row] for row in rows])

    @torch.no_grad()
    def _hidden(self, stream, trunks, branches) -> list[torch.Tensor]:
        pack = pack_rows(trunks, branches)
        with self._context():
            hidden = self.model.model(
                input_ids=torch.cat(stream)[None],
                position_ids=pack.position_ids()[None],
                use_cache=False,
                **{PACK: pack},
            ).last_hidden_state[0]
        return list(hidden.split([len(row) for row in stream]))

    @torch.no_grad()
    def _log_probs(self, hidden_N_D, labels_N) -> torch.Tensor:
        with self._context():
            return self.head(self.model, hidden_N_D, labels_N)

    def _context(self):
        return torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext()


def _first_pack(rows: list[ScoreRow]) -> tuple[list[ScoreRow], list[ScoreRow]]:
    count, tokens = 0, 0
    while count < len(rows):
        tokens += len(rows[count].context_ids) + len(rows[count].answer.token_ids)
        if count and tokens > PACK_TOKENS:
            break
        count += 1
    return rows[:count], rows[count:]


def planned(turns: TurnBatch, settings, tokenizer, scorer: str) -> GainPlan:
    algorithm = settings.algorithm.model_copy(update={"info_gain_scorer": scorer})
    return plan_gains(turns, type(settings)(algorithm=algorithm), tokenizer)


def score_table_of(plan: GainPlan, forward) -> torch.Tensor:
    """Mean log-probs of the gold tokens, float64 [rows, contexts]. The plan went through ``before_forward``."""
    scores = SCORERS[plan.settings.algorithm.info_gain_scorer].score(plan, forward)
    width = int(plan.turns.n_turns_B.max())
    table, asked = score_table(
        plan.requests, scores, len(plan.turns.records), width, plan.settings.algorithm.info_gain_aliases
    )
    assert bool(asked.all())
    return table
