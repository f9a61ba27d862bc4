"""How much the newline after a turn's end matters to the policy of `real_cpu`: the same conversations with and without it.

    python evidence/real/newline.py --real DIR [--conversations 20]

DIR is the folder of `verl-credit real --dir DIR --questions FILE`; its `policy/`, `encoder/` and `multihop/` are read. The
conversations are those that the supervised start would have, of the held-out half first, with real pages. Until our token
builder wrote it, a rollout had `<|im_end|><|im_start|>user` where the chat template has `<|im_end|>\\n<|im_start|>user`. One
forward a row, in float32, one thread; of every turn after the first, the mean log-prob of the tokens that the policy writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pyarrow.parquet as parquet
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.turns.search.protocol import Page
from verl_credit.worlds.real.multihop import Supported, demonstrations, encode
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex

RECIPE = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "real_cpu.yaml").read_text())


def conversations(folder: Path):
    index = SearchIndex.load(folder / "multihop" / "index")
    encoder = SentenceEncoder(folder / "encoder", query_prefix="", passage_prefix="")

    def search(query: str) -> list[Page]:
        (hits,) = index.search(encoder.encode_queries([query]), RECIPE["search"]["topk"])
        texts = [
            (document["id"], *document["contents"].partition("\n")[::2], score) for document, score in hits
        ]
        return [Page(*text) for text in texts]

    for half in ("val", "train"):
        for row in parquet.read_table(folder / "multihop" / "data" / f"{half}.parquet").to_pylist():
            yield from demonstrations(Supported.of(row), search, RECIPE["search"]["max_page_chars"])


def without_newlines(ids: list[int], mask: list[int], newline: int) -> tuple[list[int], list[int]]:
    """The stream without the newline that follows each turn of the policy."""
    lost = {n for n, (before, here) in enumerate(pairwise(mask), start=1) if before > here}
    assert lost and all(ids[n] == newline for n in lost)
    kept = [n for n in range(len(ids)) if n not in lost]
    return [ids[n] for n in kept], [mask[n] for n in kept]


@torch.inference_mode()
def turns(model, ids: list[int], mask: list[int]) -> list[float]:
    """The mean log-prob of the tokens of every turn of the policy."""
    log_prob_TV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    found, turn = [], []
    for n, written in enumerate([*mask, 0]):
        if written:
            turn.append(float(log_prob_TV[n - 1, ids[n]]))
        elif turn:
            found.append(statistics.fmean(turn))
            turn = []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.real / "policy")
    model = AutoModelForCausalLM.from_pretrained(arguments.real / "policy", dtype=torch.float32).eval()
    template = RECIPE["actor_rollout_ref"]["model"]["custom_chat_template"]
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    kinds = {"search": [], "answer": []}
    for messages in islice(conversations(arguments.real), arguments.conversations):
        ids, mask = encode(messages, tokenizer, template)
        pairs = zip(turns(model, ids, mask), turns(model, *without_newlines(ids, mask, newline)), strict=True)
        _, *later = pairs  # nothing differs before the first turn
        for kind, pair in zip([*["search"] * (len(later) - 1), "answer"], later, strict=True):
            kinds[kind].append(pair)
    for kind, pairs in kinds.items():
        changes = [without - with_newline for with_newline, without in pairs]
        means = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
        print(json.dumps({
            "turn": kind, "turns": len(pairs), "with": round(means[0], 3), "without": round(means[1], 3),
            "change": round(statistics.fmean(changes), 3), "standard deviation": round(statistics.stdev(changes), 3),
            "lowest": round(min(changes), 3), "highest": round(max(changes), 3),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
