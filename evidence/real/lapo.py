"""Does LAPO see the first hop, which information gain does not? Pages of HotpotQA, read by the policy of `real_cpu`.

    make evidence-raw
    python evidence/real/lapo.py --real DIR --questions FILE [--most N] [--json FILE]

Two trajectories a question with one answer page: the bridge page, or a distractor, and then the answer page; the query is
always the question. `score_lapo` gives what the gold answer loses without the first of the two turns. The rest is as in
section 2 of the README, whose raw archive has the information gain of the same first pages. One forward a row, float32, one
thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.config.keys import Algorithm, Search
from verl_credit.config.settings import CreditSettings
from verl_credit.study.stats import RESAMPLES, prompt_weights, with_interval
from verl_credit.turns.book import RowRecord, TurnBatch
from verl_credit.turns.gains import plan_gains
from verl_credit.turns.lapo import score_lapo
from verl_credit.turns.reward.qa import stands_in
from verl_credit.turns.search.protocol import Page, format_pages
from verl_credit.worlds.data.catalogue import DATA_SETS
from verl_credit.worlds.data.output import PROMPTS
from verl_credit.worlds.lab.protocol import answer_turn, observation_text, search_turn

SETTINGS = CreditSettings(
    algorithm=Algorithm(turn_signal="lapo", info_gain_scorer="rows", info_gain_aliases="first")
)
GAINS = Path(__file__).parents[2] / "build" / "evidence" / "real" / "gains.json"
FIRST = ("bridge", "distractor 1")


def questions(file: Path) -> Iterator[tuple[str, str, list[list[Page]]]]:
    """(question, answer, pages of the two rows) where one of the supporting pages holds the answer."""
    for raw in json.loads(file.read_text(encoding="utf-8")):
        record, titles = DATA_SETS["hotpotqa"].read(raw), set(raw["supporting_facts"]["title"])
        answer, pages = record.answers[0], {True: [], False: []}
        for title, text in record.paragraphs:
            pages[title in titles].append(Page("", title, text.strip(), 0.0))
        holds = {
            one: [stands_in(f"{p.title} {p.text}", [answer]) for p in some] for one, some in pages.items()
        }
        others = [page for page, held in zip(pages[False], holds[False], strict=True) if not held]
        if answer in ("yes", "no") or sum(holds[True]) != 1 or len(others) < 4:
            continue
        last, bridge = sorted(pages[True], key=lambda page: not holds[True][pages[True].index(page)])
        yield record.question, answer, [[bridge, last], [others[0], last]]


def batch(question: str, answer: str, rows: list[list[Page]], tokenizer) -> TurnBatch:
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    message = {"role": "user", "content": PROMPTS["tag"].format(question=question)}
    prompt = ids(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    call, last = ids(search_turn(json.dumps(question, ensure_ascii=False)[1:-1])), ids(answer_turn(answer))
    responses, turn_ids = [], []
    for pages in rows:
        shown = [ids(observation_text(format_pages([page], Search().max_page_chars))) for page in pages]
        parts = [(0, call), (-1, shown[0]), (1, call), (-1, shown[1]), (2, last)]
        responses.append([token for _, part in parts for token in part])
        turn_ids.append(torch.tensor([turn for turn, part in parts for _ in part]))
    turn_ids_B_T = torch.nn.utils.rnn.pad_sequence(turn_ids, batch_first=True, padding_value=-1)
    each = {"scores": {}, "extra_infos": {}, "columns": {}, "is_padding": False, "turn_rewards": [None, None]}
    each |= {"records": RowRecord("answer").as_dict(), "ground_truths": {"target": [answer], "form": "tag"}}
    return TurnBatch(
        prompt_ids=[prompt] * len(rows), response_ids=responses, turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=(turn_ids_B_T >= 0).long(), row_valid_B=torch.ones(len(rows), dtype=torch.bool),
        n_turns_B=torch.full((len(rows),), 3), **{name: [value] * len(rows) for name, value in each.items()},
    )  # fmt: skip


def lost(turns: TurnBatch, model, tokenizer) -> list[float]:
    """g of each row's first turn. Without it both rows have the same tokens, which are read once."""
    known: dict = {}

    @torch.no_grad()
    def score_rows(rows):
        for row in rows:
            if row not in known:
                answer, n = row.answer, len(row.context_ids)
                ids = torch.tensor([row.context_ids + answer.token_ids[: answer.gold_end]])
                logits = model(ids, logits_to_keep=answer.gold_end - answer.gold_start + 1).logits[0, :-1]
                gold = ids[0, n + answer.gold_start :, None]
                known[row] = logits.log_softmax(-1).gather(1, gold).double().mean()
        return torch.stack([known[row] for row in rows])

    plan = plan_gains(turns, SETTINGS, tokenizer)
    plan = replace(plan, requests=[request for request in plan.requests if request.column != 2])
    return [row[0] for row in score_lapo(plan, SimpleNamespace(score_rows=score_rows))]


def gained(text: str) -> list[float]:
    """The same pages' information gain (prob_diff against the bare prompt), from the archive."""
    (rows,) = (one["rows"] for one in json.loads(GAINS.read_text())["scores"] if one["question"] == text)
    first = {row["pages"][0]: row["scores"] for row in rows}
    return [float(np.exp(first[page][1]) - np.exp(first[page][0])) for page in FIRST]


def aucs(pairs: list[list[float]]) -> np.ndarray:
    """P(bridge > distractor) + P(equal) / 2 over all pairs of questions: of the sample, then with questions drawn again."""
    high_Q, low_Q = np.array(pairs).T
    apart_Q_Q = (high_Q[:, None] > low_Q) + (high_Q[:, None] == low_Q) / 2
    return np.array([w @ apart_Q_Q @ w / w.sum() ** 2 for w in prompt_weights(len(pairs), RESAMPLES)])


def summary(found: list[dict]) -> dict:
    """[value, its interval's ends] of each AUC and of their difference, [mean of bridge pages, of distractors], and in how
    many questions the bridge page is above its own distractor."""
    pairs = {name: [one[name] for one in found] for name in ("lapo", "info_gain")}
    values = {name: aucs(of) for name, of in pairs.items()}
    values["lapo - info_gain"] = values["lapo"] - values["info_gain"]
    ends = {name: with_interval(of, len(found)) for name, of in values.items()}
    result = {f"AUC, {name}": [round(x, 3) for x in (m.value, m.low, m.high)] for name, m in ends.items()}
    for name, of in pairs.items():
        result[f"mean, {name}"] = np.mean(of, axis=0).round(4).tolist()
        result[f"above, {name}"] = sum(high > low for high, low in of)
    return {"questions": len(found), **result}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, required=True, help="folder with policy/")
    parser.add_argument("--questions", type=Path, required=True, help="hotpotqa_dev_distractor_70.json")
    parser.add_argument("--most", type=int, default=70, help="questions (all: 45)")
    parser.add_argument("--json", type=Path, help="the values of every question are written here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given.real / "policy")
    model = AutoModelForCausalLM.from_pretrained(given.real / "policy", dtype=torch.float32).eval()
    found: list[dict] = []
    for text, answer, pages in questions(given.questions):
        if len(found) == given.most:
            break
        losses = lost(batch(text, answer, pages, tokenizer), model, tokenizer)
        found.append({"question": text, "lapo": losses, "info_gain": gained(text)})
        print(len(found), *(f"{loss:+.4f}" for loss in losses), text, flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
