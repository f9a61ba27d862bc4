"""Tokens for SEPA's diagnostic: drawn at temperature 1, each with the moments of the distribution that it was drawn from.

`generate` writes shards of arrays, rows x tokens: ids, surprisal, entropy and varentropy in nats; and per row its length and
its question. A shard that exists is not made again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.generation import generator
from verl_credit.generation.sampling import RowSampler, SamplingParams
from verl_credit.real.arithmetic import EXAMPLES, make_records

SETS = ("questions", "questions, planning aloud", "sums, planning aloud", "sums in a box")
TOKENS = {name: 79_600 for name in SETS} | {"sums in a box": 70_000}
"""At least so many of each set. Shards are whole, so that there are more than the 318,225 of the founding paper."""
ROWS = {"questions": 96, "questions, planning aloud": 96, "sums, planning aloud": 128, "sums in a box": 384}
"""Trajectories of a shard."""
GROUP = {"questions": 1}
"""Samples of a question; 8 in the other sets."""
LONGEST = 256
STEPS = "{question}\n\nThink step by step. Check each step before you answer."
# This model plans aloud in the words of strategic grams only after an example that does.
ALOUD = {
    "questions, planning aloud": (
        "In which country was the author of Don Quixote born?",
        "Let me think. Who wrote Don Quixote? It was Miguel de Cervantes. Notice that the question asks for a country. He "
        "was born in a town near Madrid, which is in Spain. Let me check: Madrid is the capital of Spain. The answer is "
        "Spain.",
    ),
    "sums, planning aloud": (
        "What is 6 * 3?",
        "Let me think. 6 + 6 = 12, and 12 + 6 = 18. Let me check: 18 - 6 = 12, and 12 - 6 = 6. Another way to see it is "
        "3 * 6 = 18. The answer is 18.",
    ),
}


class WatchedSampler(RowSampler):
    """Keeps the entropy and the varentropy of every distribution that a token is drawn from."""

    last: WatchedSampler

    def __init__(self, params, device, sampled_vocab_size=None):
        super().__init__(params, device, sampled_vocab_size)
        self.row_B = torch.arange(len(params))
        self.moments_R_N_2 = torch.zeros(*self.uniform_B_N.shape, 2)
        WatchedSampler.last = self

    def select(self, keep):
        super().select(keep)
        self.row_B = self.row_B[keep]

    def sample(self, logits_B_V, step):
        log_p_B_V = logits_B_V.float().log_softmax(dim=-1)
        weighted_B_V = log_p_B_V.exp().mul_(log_p_B_V)
        entropy_B = -weighted_B_V.sum(dim=-1)
        square_B = weighted_B_V.mul_(log_p_B_V).sum(dim=-1)
        self.moments_R_N_2[self.row_B, step] = torch.stack([entropy_B, square_B - entropy_B**2], dim=1)
        return super().sample(logits_B_V, step)


def boxed(text: str) -> list[dict]:
    """The recipe's worked examples without its "Let me think"."""
    chat = []
    for sum_, answer in EXAMPLES:
        chat.append({"role": "user", "content": f"What is {sum_}?"})
        chat.append({"role": "assistant", "content": f"{sum_} = {answer}. \\boxed{{{answer}}}"})
    return [*chat, {"role": "user", "content": text}]


def chats_of(questions: Path) -> dict[str, list[list[dict]]]:
    """The chat of every question, by set."""

    def user(text):
        return {"role": "user", "content": text}

    def aloud(name, text):
        asked, answered = ALOUD[name]
        return [user(asked), {"role": "assistant", "content": answered}, user(text)]

    sums = [record.question for record in make_records(0, 896)]
    asked = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    steps, asked_aloud, sums_aloud, box = SETS
    return {
        steps: [[user(STEPS.format(question=text))] for text in asked],
        asked_aloud: [aloud(asked_aloud, text) for text in asked],
        sums_aloud: [aloud(sums_aloud, text) for text in sums],
        box: [boxed(text) for text in sums],
    }


def generate(policy: Path, questions: Path, work: Path) -> None:
    """Shards in turn of the sets, so that a run that is stopped early still has some of each."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16, attn_implementation="sdpa")
    generator.RowSampler = WatchedSampler
    engine = generator.BatchGenerator(
        model, pad_token_id=tokenizer.pad_token_id, sampled_vocab_size=len(tokenizer)
    )
    chats, done, number = chats_of(questions), dict.fromkeys(SETS, 0), 0
    while any(done[name] < TOKENS[name] for name in SETS):
        for kind, name in enumerate(SETS):
            if done[name] >= TOKENS[name]:
                continue
            path = work / f"{stem(name)}-{number:03d}.npz"
            if not path.exists():
                begun = time.time()
                at = [number * ROWS[name] + row for row in range(ROWS[name])]
                question = [i // GROUP.get(name, 8) % len(chats[name]) for i in at]
                shard = _shard(engine, tokenizer, [chats[name][q] for q in question], kind * 10**6 + at[0])
                _save(path, shard | {"question": np.array(question)})
                print(
                    f"{path.name}: {shard['length'].sum()} tokens in {time.time() - begun:.0f} s", flush=True
                )
            with np.load(path) as shard:
                done[name] += int(shard["length"].sum())
        number += 1


def _shard(engine, tokenizer, chats, seed) -> dict[str, np.ndarray]:
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    stop = (tokenizer.eos_token_id,)
    params = [SamplingParams(LONGEST, seed=seed + row, stop_token_ids=stop) for row in range(len(chats))]
    made = engine.generate(prompts, params)
    length = np.array([len(one.token_ids) for one in made])
    shape = (len(made), int(length.max()))
    ids, surprisal = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, one in enumerate(made):
        ids[row, : length[row]], surprisal[row, : length[row]] = one.token_ids, -np.array(one.log_probs)
    entropy, varentropy = WatchedSampler.last.moments_R_N_2[:, : shape[1]].unbind(dim=2)
    return {
        "ids": ids,
        "length": length,
        "surprisal": surprisal,
        "entropy": entropy.numpy(),
        "varentropy": varentropy.numpy(),
    }


@torch.inference_mode()
def in_fp32(policy: Path, questions: Path, work: Path, rows: int = 24) -> dict[str, dict[str, float]]:
    """The first trajectories of every set, read again with weights in fp32: what does bf16 change?"""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="sdpa")
    found = {}
    for name, chats in chats_of(questions).items():
        with np.load(work / f"{stem(name)}-000.npz") as file:
            shard = {key: file[key][:rows] for key in file}
        read = []
        for row, length in enumerate(shard["length"]):
            chat = chats[shard["question"][row]]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            ids = torch.tensor([prompt + shard["ids"][row, :length].tolist()])
            logits = model(input_ids=ids, logits_to_keep=int(length) + 1).logits[0, :-1]
            log_p_T_V = logits.log_softmax(dim=-1)
            surprisal_T = -log_p_T_V.gather(1, ids[0, -int(length) :, None])[:, 0]
            entropy_T = -(log_p_T_V.exp() * log_p_T_V).sum(dim=-1)
            was = (torch.from_numpy(shard[key][row, :length]) for key in ("surprisal", "entropy"))
            read.append(torch.stack([surprisal_T, entropy_T, *was]).double())
        s, h, s16, h16 = torch.cat(read, dim=1)
        found[name] = {
            "tokens": len(s),
            "mean surprisal, fp32 - bf16": float((s - s16).mean()),
            "mean absolute difference of surprisal": float((s - s16).abs().mean()),
            "mean entropy, fp32 - bf16": float((h - h16).mean()),
            "share of noise in fp32": float((s - h).var() / s.var()),
            "share of noise in bf16": float((s16 - h16).var() / s16.var()),
        }
    return found


def stem(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.rename(path)
