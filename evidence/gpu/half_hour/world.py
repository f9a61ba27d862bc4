"""The world of all runs: questions with prepared trajectories, their pages and search server, and the policy's folder.

Everything but the weights is made on a CPU, in less than 3 MiB, from the lab's tiny world. The policy has the real shape and
random weights; `replayed` gives its rollouts real turns, and `coin_reward` a reward that does not tie.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.half_hour.text import (
    REAL,
    TINY,
    Lengths,
    make_tokenizer,
    padded,
    page,
    token_ids,
    trajectories,
)
from gpu.half_hour.weights import SHAPES, write_weights
from verl_credit.built_folder import read_manifest, reuse_or_build
from verl_credit.names import AGENT_NAME
from verl_credit.precision import one_thread
from verl_credit.turns.rollout.reward.qa import BOXED, TAG
from verl_credit.worlds.data.output import PROMPTS, SCHEMA
from verl_credit.worlds.lab.config import GENERATOR_VERSION, SIZES

HERE = Path(__file__).parent
NAME = "the world of the GPU runs"
PARTS = ("corpus.jsonl", "encoder", "index", "tokenizer", "questions.parquet", "sums.parquet")
QUESTIONS = 64
REPLAYED = "replayed_search"  # as agents.yaml names the loop
SINGLE_TURN = "math_sepa"
"""The recipe that searches nothing."""
# Where the tiny world's rows fit: three searches of three short pages.
TINY_ROWS = ("data.max_prompt_length=384", "data.max_response_length=576", "search.max_new_tokens=64")


def prepare(root: Path, *, tiny: bool) -> None:
    """Make the world in ``root``/world, or reuse a valid one; equal calls write equal files. No GPU, no network."""

    def fill(folder: Path) -> dict:
        shutil.rmtree(root / "models", ignore_errors=True)  # their tokenizer is that of the world before
        with one_thread():
            _fill(folder, TINY if tiny else REAL)
        return {}

    code = b"".join((HERE / file).read_bytes() for file in ("text.py", "world.py"))
    settings = {"tiny": tiny, "lab": GENERATOR_VERSION, "code": hashlib.sha256(code).hexdigest()[:12]}
    reuse_or_build(root / "world", settings, fill, parts=PARTS, name=NAME)


def weights(root: Path, model: str, device: str) -> Path:
    """The folder of ``model`` (a name in `SHAPES`), whose random weights are made on ``device`` unless they are there.

    Raises ValueError for another name, RuntimeError where the disk is full.
    """
    if model not in SHAPES:
        raise ValueError(f"model={model!r}: expected one of {', '.join(SHAPES)}")
    folder, shape = root / "models" / model, SHAPES[model]
    if not folder.exists():
        write_weights(shape, folder, device, padded(_tokenizer(root), shape.vocabulary))
    return folder


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The URL of the search server, which runs inside the block, on the CPU."""
    from verl_credit_retriever.launch import start_server

    world = root / "world"
    with start_server(world / "index", world / "encoder", log_path=root / "retriever.log") as server:
        yield server.url


def overrides(root: Path, url: str, model_folder: Path, recipe: str) -> list[str]:
    """What a recipe needs to train in this world. Its lengths stay as they are, but for the tiny world's.

    The process that trains, and Ray's, import `gpu.half_hour.replayed` (`gpu.machine.environment`).
    """
    single, tiny = recipe == SINGLE_TURN, read_manifest(root / "world", NAME)["tiny"]
    questions = root.resolve() / "world" / ("sums.parquet" if single else "questions.parquet")
    given = [
        f"data.train_files={questions}", f"data.val_files={questions}", "data.val_max_samples=8",
        f"actor_rollout_ref.model.path={model_folder.resolve()}",
        f"reward.custom_reward_function.path={HERE.parent / 'coin_reward.py'}",
        "trainer.val_before_train=false", "trainer.test_freq=-1",
    ]  # fmt: skip
    given += TINY_ROWS if tiny else ()
    if single:
        # A random policy writes none of the phrases that SEPA looks for, and the run would be stopped.
        return [*given, "credit=maxrl_gtpo"]
    # An answer has a probability of about 1/151,936 for such a policy: its differences are far below the variance floor of a
    # group (1e-8), those of its logarithm are not.
    given += [f"search.url={url}", "algorithm.info_gain_type=log_prob_diff"]
    given += ["search.max_searches=3"] if tiny else []
    return [*given, f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'agents.yaml'}"]


def _tokenizer(root: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root / "world" / "tokenizer")


def _fill(folder: Path, lengths: Lengths) -> None:
    from verl_credit.turns.rollout.search.wire import SCHEMA as TOOL
    from verl_credit.worlds.lab.encoder import train_encoder
    from verl_credit.worlds.lab.encyclopedia import make_splits, make_world
    from verl_credit.worlds.lab.protocol import make_tokenizer as lab_tokenizer
    from verl_credit_retriever.index.search import build_index

    size, rng = SIZES["tiny"].world, random.Random("gpu half hour")
    lab = make_world(0, size)
    pages = {article.id: page(article, lab, rng, lengths) for article in lab.articles.values()}
    lines = (json.dumps({"id": name, "contents": text}) + "\n" for name, text in pages.items())
    (folder / "corpus.jsonl").write_text("".join(lines))
    encoding = lab_tokenizer(lab.names())
    for part in (train_encoder(lab, encoding, seed=0, steps=2), encoding):
        part.save_pretrained(folder / "encoder")
    build_index(
        folder / "corpus.jsonl", folder / "encoder", folder / "index", kind="exact"
    )  # no FAISS needed
    questions = make_splits(lab, size, 0)["train"][:QUESTIONS]
    turns = [trajectories(question, lab, rng, lengths) for question in questions]
    prompts = [*PROMPTS.values(), json.dumps(TOOL)] * len(questions)
    written = [turn for own in turns for trajectory in own for turn in trajectory]
    tokenizer = make_tokenizer(
        [*pages.values(), *prompts, *(question.text for question in questions), *written]
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = [
        _row(number, TAG, question.text, question.gold)
        | {"replays": json.dumps([token_ids(tokenizer, one) for one in own], separators=(",", ":"))}
        for number, (question, own) in enumerate(zip(questions, turns, strict=True))
    ]
    _write(rows, folder / "questions.parquet", "replays")
    sums = [(f"What is {n} + {7 * n + 5}?", str(8 * n + 5)) for n in range(QUESTIONS)]
    _write([_row(n, BOXED, *pair) for n, pair in enumerate(sums)], folder / "sums.parquet")


def _row(number: int, form: str, question: str, answer: str) -> dict:
    return {
        "data_source": "gpu_half_hour",
        "agent_name": AGENT_NAME if form == BOXED else REPLAYED,
        "prompt": [{"role": "user", "content": PROMPTS[form].format(question=question)}],
        "ability": "math" if form == BOXED else "search",
        "reward_model": {"style": "rule", "ground_truth": {"target": [answer], "form": form}},
        "extra_info": {"index": number, "split": "train", "question": question, "id": str(number)},
    }


def _write(rows: list[dict], path: Path, *more: str) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = SCHEMA
    for name in more:
        schema = schema.append(pyarrow.field(name, pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, compression="zstd")
