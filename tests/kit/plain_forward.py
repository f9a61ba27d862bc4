"""Rows of texts, a tiny model in place of the trainer's forward, and one plain forward pass over a text."""

import torch
from tensordict import TensorDict

from kit.tiny_models import in_float64, log_probs, tiny_model
from verl_credit.host.step.store import score_rows
from verl_credit.policy.attention.pack import pack_rows
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, prompt_text, search_turn


def observed(*pages):
    found = "".join(f"\n<tool_response>\n{page}\n</tool_response>" for page in pages)
    return f"\n<|im_start|>user{found}{TURN_END}\n<|im_start|>assistant\n"


WHO = prompt_text("Who?")
TWO = (search_turn("a"), observed("A page"), search_turn("b"), observed("B"), answer_turn("x"))
ONE = (search_turn("c"), observed("C"), answer_turn("yes"))


def made(tokenizer, attention):
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    return in_float64(tiny_model("qwen3", attention, **shape))


class ModelForward:
    """Stands in for the trainer's forward: a tiny model that reads rows with their branches."""

    def __init__(self, model, turns):
        self.model, self.turns, self.branches_B = model, turns, None
        self.rows_B = [p + r for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]

    def carried(self):
        found = []
        for row, branches in zip(self.rows_B, self.branches_B, strict=True):
            pack = pack_rows([len(row)], [[(b.base, len(b.token_ids)) for b in branches]])
            ids = [*row, *(token for b in branches for token in b.token_ids)]
            values = log_probs(self.model, ids, pack.position_ids(), pack)
            found.append(torch.cat([values, values.new_zeros(1)])[len(row) :])
        return found

    def _row(self, ids):
        return log_probs(self.model, ids, pack=pack_rows([len(ids)]))

    def score_rows(self, rows):
        return score_rows(self._compute, rows, dp_size=1)

    def _compute(self, batch):
        values = [self._row(ids) for ids in batch["input_ids"].unbind()]
        padded = [torch.cat([value, value.new_zeros(1)]) for value in values]
        nested = torch.nested.as_nested_tensor(padded, layout=torch.jagged)
        return TensorDict({"log_probs": nested}, batch_size=len(padded))


def by_hand(tokenizer, model, before, response):
    """Mean log p of the response's tokens behind a text, by one plain forward pass."""
    n = len(tokenizer(response, add_special_tokens=False)["input_ids"])
    ids = tokenizer(before + response, add_special_tokens=False)["input_ids"]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    probability = logits.detach().log_softmax(-1)
    return sum(float(probability[at - 1, ids[at]]) for at in range(len(ids) - n, len(ids))) / n
