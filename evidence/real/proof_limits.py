"""The start-up proof's differences in bf16 with trained weights, for right kernels and for wrong ones.

    python evidence/real/proof_limits.py --real DIR --questions hotpotqa_dev_distractor_70.json [--again]

The rows and branches of `host/engine/attention_proof.py`, filled with tokens drawn evenly from the vocabulary, as there, and
with pieces of text; the forward is transformers' with bf16 weights, which precision_engine.py finds equal to the engine's.
Beside them small models with random weights, without and with experts.
Writes proof_limits.json; `--again` reads its differences.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import chain, product
from math import inf
from pathlib import Path

import torch
from common import arguments, machine, write
from forward import load
from questions70 import read_questions
from rollouts import rollouts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from wrong_kernels import WRONG

from verl_credit.attention import AUTO, PACK, install, kernels, pack_rows
from verl_credit.log_probs.chunks import log_probs_from_logits

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
DRAWS = 10


@torch.no_grad()
def log_probs(model, rows: list[torch.Tensor], grown: list[list[tuple[int, int]]] | None, packed: bool):
    """Log-probs of the next token along a stream."""
    ids, extra = torch.cat(rows)[None], {}
    positions = torch.arange(ids.shape[1])[None]
    if packed:
        trunks = [len(row) - sum(n for _, n in of) for row, of in zip(rows, grown, strict=True)]
        extra[PACK] = pack_rows(trunks, grown)
        positions = extra[PACK].position_ids()[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits[0]
    return log_probs_from_logits(logits, ids[0].roll(-1))


def proof_parts(
    model, rows: list[torch.Tensor], answers, *, together: bool, packed: bool
) -> list[torch.Tensor]:
    """As the proof reads them: every row and every branch without its last position."""
    branches = [(row, base, ids) for row, of in zip(rows, answers, strict=True) for base, ids in of]
    if not together:
        whole = [*rows, *(torch.cat([row[:base], ids]) for row, base, ids in branches)]
        found = [log_probs(model, [row], [[]], packed) for row in whole]
        ends = [part[base:] for part, (_, base, _) in zip(found[len(rows) :], branches, strict=True)]
        return [part[:-1] for part in (*found[: len(rows)], *ends)]
    stream = [torch.cat([row, *(ids for _, ids in of)]) for row, of in zip(rows, answers, strict=True)]
    grown = [[(base, len(ids)) for base, ids in of] for of in answers]
    found = log_probs(model, stream, grown, True).split([len(row) for row in stream])
    own = [part[: len(row)] for part, row in zip(found, rows, strict=True)]
    ends = []
    for part, row, of in zip(found, rows, grown, strict=True):
        ends += part[len(row) :].split([n for _, n in of]) if of else []
    return [part[:-1] for part in (*own, *ends)]


def proof_tokens(source: str, draw: int, texts: list[list[int]], vocabulary: int):
    """Rows and answers in the proof's shape."""
    from verl_credit.host.engine.attention_proof import GROWN, ROWS

    random = torch.Generator().manual_seed(draw)

    def tokens(n: int) -> torch.Tensor:
        if source == "drawn tokens":
            return torch.randint(0, vocabulary, (n,), generator=random)
        text = texts[int(torch.randint(0, len(texts), (1,), generator=random))]
        start = int(torch.randint(0, len(text) - n, (1,), generator=random))
        return torch.tensor(text[start : start + n])

    return [tokens(n) for n in ROWS], [[(base, tokens(n)) for base, n in of] for of in GROWN]


LIMITS = {
    "three limits": (3.0, 0.3, 0.75, inf),
    "branch .5": (3.0, 0.3, 0.5, inf),
    "all branches .2": (3.0, 0.3, 0.75, 0.2),
    "the proof: all branches .15": (3.0, 0.3, 0.75, 0.15),
    "all branches .12": (3.0, 0.3, 0.75, 0.12),
}
"""On `NUMBERS`, each over the spread: the standard deviation of the log-probs, held between .1 and 1 nats."""
SMALL = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
RANDOM = {"qwen3": {}, "qwen3_moe": EXPERTS | {"mlp_only_layers": []}}
NUMBERS = ("largest", "row", "branch", "all branches, packed to alone")


def numbers(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, ...]:
    """The proof's own four differences."""
    from verl_credit.host.engine.attention_proof import differences

    return differences(ours, theirs)


def trained(real: Path, file: Path) -> Iterator[dict]:
    """Differences of the trained model on drawn tokens and on text."""
    tokenizer = AutoTokenizer.from_pretrained(real / "policy")
    texts = [rollouts(q, tokenizer).turns for q in read_questions(file)[10:30]]
    texts = [t.prompt_ids[0] + t.response_ids[0] for t in texts]
    model = load(real / "policy", torch.bfloat16)
    for source in ("drawn tokens", "text"):
        for draw in range(DRAWS):
            given = proof_tokens(source, draw, texts, model.config.vocab_size)
            yield from of_model(f"trained weights, {source}", f"draw {draw}", model, given, WRONG)


def untrained() -> Iterator[dict]:
    """The same of small models with normal random weights."""
    install()
    for family, layers, std in product(RANDOM, (4, 28, 48), (0.02, 0.1, 0.25)):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, num_hidden_layers=layers, **SMALL | RANDOM[family])
        model = AutoModelForCausalLM.from_config(config, attn_implementation=AUTO)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=std)
        given = proof_tokens("drawn tokens", 0, [], config.vocab_size)
        wrong = {name: WRONG[name] for name in ("base_too_long", "base_too_short")}
        which = f"{family}, {layers} layers, std {std}"
        yield from of_model("random weights", which, model.to(torch.bfloat16).eval(), given, wrong)


def of_model(source: str, which: str, model, given, wrong: dict) -> Iterator[dict]:
    """A row for the right kernel and for each wrong one, with `numbers` twice."""
    model.config._attn_implementation = "eager"
    eager = proof_parts(model, *given, together=False, packed=False)
    model.config._attn_implementation = AUTO
    right = kernels.KERNELS["sdpa"]
    for name, kernel in {"right": right, **wrong}.items():
        kernels.KERNELS["sdpa"] = kernel
        packed = proof_parts(model, *given, together=True, packed=True)
        alone = proof_parts(model, *given, together=False, packed=True)
        kernels.KERNELS["sdpa"] = right
        yield {
            "source": source, "which": which, "kernel": name, "std_of_log_probs": float(torch.cat(eager).std()),
            "packed_to_alone": numbers(packed, alone), "alone_to_eager": numbers(alone, eager),
        }  # fmt: skip


def summary(found: list[dict]) -> list[dict]:
    """Per source and kernel: how many of its rows each of `LIMITS` refuses, and of each number the largest of a right kernel
    or the smallest of a wrong one, over the spread. Numbers are the larger of packed to alone and alone to eager, but the
    last, which is packed to alone."""
    rows = []
    for source, kernel in dict.fromkeys((row["source"], row["kernel"]) for row in found):
        own = [row for row in found if (row["source"], row["kernel"]) == (source, kernel)]
        both = torch.tensor([[row["packed_to_alone"], row["alone_to_eager"]] for row in own])
        worst = torch.cat([both[:, :, :3].amax(dim=1), both[:, 0, 3:]], dim=1)
        worst /= torch.tensor([row["std_of_log_probs"] for row in own]).clamp(0.1, 1.0)[:, None]
        refused = {
            name: int((worst > torch.tensor(limits)).any(dim=1).sum()) for name, limits in LIMITS.items()
        }
        name, ends = ("largest", worst.amax(dim=0)) if kernel == "right" else ("smallest", worst.amin(dim=0))
        rows.append(
            {"source": source, "kernel": kernel, "rows": len(own), "refused": refused}
            | {name: dict(zip(NUMBERS, ends.tolist(), strict=True))}
        )
    return rows


def main() -> None:
    parser = arguments(__doc__, "proof_limits")
    parser.add_argument("--again", action="store_true", help="read the differences from the JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    known = json.loads(options.json.read_text()) if options.again else None
    found = known["differences"] if known else []
    for row in () if known else chain(untrained(), trained(options.real, options.questions)):
        print(json.dumps(row), flush=True)
        found.append(row)
    report = known or {
        "command": "python evidence/real/proof_limits.py --real DIR --questions hotpotqa_dev_distractor_70.json",
        "machine": machine("torch", "transformers"),
        "seconds": round(time.perf_counter() - begin),
        "differences": found,
    }
    report["summary"] = summary(found)
    for row in report["summary"]:
        print(json.dumps(row))
    write(options.json, report)


if __name__ == "__main__":
    main()
