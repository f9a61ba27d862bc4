"""Own cosine and explained variance on real text: a policy of `real_cpu`, its questions, its index, its limits.

    python evidence/horizon/real_cosine.py FILE --real DIR --questions QUESTIONS --policy POLICY [--prompts 16] ...
    python evidence/horizon/real_cosine.py FILE             # the tables of what FILE has

`verl-credit fidelity RUN --engine run --gradient` measures the same through a run's own rollouts. Here turns are sampled in
this process, where the continuations of a context share its forward, which takes a fraction of the time. As in the recipe,
weights are kept in float32, and layers compute in the precision that `verl_credit/precision.py` chooses. The gradient is
over the parameters that `real_start.py` trains.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet
import torch
from cosine import MEASURED, found_by, learned
from cosine_page import page
from real_start import train_upper
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_credit.policy.packed import PackedPolicy
from verl_credit.precision import cpu_precision, one_thread
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.subject import Subject, load_policy
from verl_credit.study.forward import PackedRows
from verl_credit.turns.scorers import Forward
from verl_credit.turns.search.protocol import SCHEMA
from verl_credit.worlds.real.build import RealPaths
from verl_credit.worlds.rollouts.protocol import Limits, Protocol, State
from verl_credit.worlds.rollouts.sampler import ModelDecoder, TurnSampler
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex


@dataclass(frozen=True)
class RealSubject(Subject):
    drawn_from: PreTrainedModel | None = None
    """The same weights in the precision of rollouts and gains."""

    @contextmanager
    def forward(self) -> Iterator[Forward]:
        policy = PackedPolicy(self.drawn_from)
        with policy.packing():
            yield PackedRows(policy)

    def sampler(self, **options) -> TurnSampler:
        decoder = ModelDecoder(self.drawn_from, self.tokenizer.pad_token_id)
        stop = [self.tokenizer.eos_token_id]
        return TurnSampler(decoder, stop, drawable=len(self.tokenizer), contexts_at_once=32, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    for name in ("--real", "--policy"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--questions")
    for name, size in (("--prompts", 16), ("--rollouts", 6), ("--continuations", 4)):
        parser.add_argument(name, type=int, default=size)
    parser.add_argument("--minutes", type=float, help="then the questions are used whose values are complete")
    given = parser.parse_args()
    if given.policy is not None:
        with one_thread():
            measure_policy(given)
    print(page(read_json_lines(given.file)))


def measure_policy(given: argparse.Namespace) -> None:
    begun, used = time.monotonic(), time.process_time()
    subject, explained = subject_of(given.real.resolve(), given.questions, given.policy, given.prompts), {}
    size = {name: getattr(given, name) for name in ("prompts", "rollouts", "continuations")}
    out = given.file.with_suffix("") / given.policy.name
    request = Request(str(out), **size, modes=MEASURED, gradient=True, minutes=given.minutes)
    say = Throttled(say_at_once, "real", every_s=20)
    further = partial(learned, subject, explained)
    result = measure(subject, request, say=say, enough=request.timer(), further=further)
    is_of = {"policy": given.policy.name, "hops": "real_cpu", "run": given.policy.name, **size}
    counts = {"measured": result.prompts, "contexts": len(result.values)}
    counts["mixed"] = sum(len({path.reward for path in group}) > 1 for group in result.groups)
    spent = {"seconds": round(time.monotonic() - begun), "cpu_seconds": round(time.process_time() - used)}
    append_json(given.file, is_of | counts | found_by(result, explained) | spent)


def subject_of(real: Path, questions: str, policy: Path, prompts: int) -> RealSubject:
    config = load_config("real_cpu", [f"real.dir={real}", f"real.questions={questions}"])
    paths, search, data = RealPaths(real), config.search, config.data
    model, tokenizer = load_policy(policy)
    tokenizer.chat_template = config.actor_rollout_ref.model.custom_chat_template
    train_upper(model)
    precision = torch.bfloat16 if cpu_precision() == "bf16" else torch.float32
    drawn_from = AutoModelForCausalLM.from_pretrained(policy, dtype=precision).eval()
    if precision == torch.bfloat16:
        model.model.forward = torch.autocast("cpu", precision)(model.model.forward)
    rows = pyarrow.parquet.read_table(paths.multihop / "data" / "train.parquet").to_pylist()[:prompts]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    index, encoder = (
        SearchIndex.load(paths.index),
        SentenceEncoder(paths.encoder, query_prefix="", passage_prefix=""),
    )

    def find(queries):
        found = index.search(encoder.encode_queries(list(queries)), search.topk)
        return [[document for document, _ in hits] for hits in found]

    limits = Limits(
        max_searches=search.max_searches,
        max_parallel_calls=4,
        max_new_tokens=search.max_new_tokens,
        max_page_chars=search.max_page_chars,
        max_response_length=data.max_response_length,
    )
    states = []
    for question, row in enumerate(rows):
        text = tokenizer.apply_chat_template(
            row["prompt"], tools=[SCHEMA], tokenize=False, add_generation_prompt=True
        )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        states.append(State(question, len(ids), ids))
    protocol = Protocol(tokenizer, find, limits, truths)
    return RealSubject(
        str(policy), config, model, tokenizer, protocol, states, truths, rows, drawn_from=drawn_from
    )


if __name__ == "__main__":
    main()
