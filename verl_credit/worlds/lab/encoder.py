"""Contrastive training of the tiny sentence encoder, with e5's prefixes, mean pooling and L2 normalisation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from verl_credit.worlds.lab.encyclopedia import RELATIONS, World, make_questions
from verl_credit.worlds.lab.protocol import name_groups

QUERY, PASSAGE = "query: ", "passage: "
TEMPERATURE = 0.05


def train_encoder(
    world: World,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int,
    noise: float = 0.3,
    batch: int = 96,
    hidden: int = 64,
    lr: float = 3e-3,
    on_step: Callable[[int], None] = lambda step: None,
) -> BertModel:
    """A two-layer BERT trained with InfoNCE to put a query near its article.

    Queries are tool calls ("N founder") and whole questions (paired with their first article), of training entities
    only. Names are permuted within their kind in every batch, so that the encoder learns to compare names, not to know
    them. A share ``noise`` of the pairs has another article of the same entity, like weakly labelled data where the
    title decides. So all articles of an entity rank high, often not the wanted one first, and the policy has to read.
    """
    rng = random.Random(f"encoder {seed}")
    with torch.random.fork_rng():
        torch.manual_seed(rng.randrange(2**31))
        model = BertModel(_config(len(tokenizer), hidden, tokenizer.pad_token_id))
    texts = [(QUERY + query, PASSAGE + article) for query, article in _pairs(world, noise, rng)]
    encoded = ((tokenizer.encode(text, add_special_tokens=False) for text in pair) for pair in texts)
    pairs = [tuple(map(torch.tensor, pair)) for pair in encoded]
    permute = NamePermuter(name_groups(tokenizer, world), len(tokenizer), rng.randrange(2**31))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    for step in range(steps):
        chosen = rng.sample(pairs, batch)
        table = permute.draw()
        query_B_D = embed(model, [table[q] for q, _ in chosen], tokenizer.pad_token_id)
        passage_B_D = embed(model, [table[p] for _, p in chosen], tokenizer.pad_token_id)
        logits_B_B = query_B_D @ passage_B_D.T / TEMPERATURE
        loss = nn.functional.cross_entropy(logits_B_B, torch.arange(batch))
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step + 1)
    return model.eval()


def embed(model: BertModel, rows: list[torch.Tensor], pad: int) -> torch.Tensor:
    """Mean over the real tokens of the last hidden states, L2-normalised: [B, D]."""
    ids_B_T = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    mask_B_T = ids_B_T != pad
    hidden_B_T_D = model(input_ids=ids_B_T, attention_mask=mask_B_T.long()).last_hidden_state
    mean_B_D = (hidden_B_T_D * mask_B_T[..., None]).sum(1) / mask_B_T.sum(1, keepdim=True)
    return nn.functional.normalize(mean_B_D, dim=-1)


class NamePermuter:
    """Random permutations of the name tokens as lookup tables: ``table[ids]`` renames a token sequence. Names are exchanged
    only with names of their own kind, so that a town's name remains a town's name."""

    def __init__(self, groups: Iterable[list[int]], vocab_size: int, seed: int):
        self._groups, self._vocab_size = [torch.tensor(group) for group in groups], vocab_size
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> torch.Tensor:
        table_V = torch.arange(self._vocab_size)
        for names in self._groups:
            table_V[names] = names[torch.randperm(len(names), generator=self._generator)]
        return table_V


def _pairs(world: World, noise: float, rng: random.Random) -> list[tuple[str, str]]:
    """(query, article) texts: every training article by tool call, and the first articles of questions."""
    wanted = [
        (f"{rng.choice(('', ' '))}{name} {relation}", name, relation)
        for name, relation in world.articles
        if world.entities[name].split == "train"
    ]
    for question in make_questions(world, "train", len(wanted), rng, repeat=True):
        wanted.append((question.text, question.path[0], question.relations[0]))
    pairs = []
    for query, name, relation in wanted:
        if rng.random() < noise:
            relation = rng.choice([r for r in RELATIONS[world.entities[name].kind] if r != relation])
        pairs.append((query, world.articles[name, relation].contents))
    return pairs


def _config(vocab_size: int, hidden: int, pad: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * hidden, max_position_embeddings=256, pad_token_id=pad,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
