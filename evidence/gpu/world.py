"""Makes the questions, the search server and the model folder for a training run, without a network.

Questions and pages are the lab's; the index has its encoder after two training steps. Without ``--model`` the policy has
the recipe's shape and random weights. It calls no tool, so there are no gains (credit=grpo), its rows are cut at their
length, and its reward is random (`coin_reward`), so that groups do not tie and an update changes the weights. So it is in
`math_sepa` with any weights: a small model writes none of the phrases that SEPA looks for, and the run would be stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu.models import TINY, random_model
from verl_credit.recipe.plan.model_shape import PUBLISHED, shape_of
from verl_credit.turns.reward.qa import BOXED, TAG
from verl_credit.worlds.data.output import PROMPTS, SCHEMA

# The lab's template omits the tools; here the schema is added before it, as other templates have it.
TOOLS = "{%- if tools -%}{{ '<|im_start|>system\\n' }}{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}\n"  # noqa: E501
QUESTIONS = 64


@dataclass(frozen=True)
class World:
    """The paths and the server, and the overrides that set them in a recipe."""

    root: Path
    url: str
    trained: bool

    def overrides(self, recipe: str, model: str) -> list[str]:
        questions = self.root / ("problems.parquet" if recipe == "math_sepa" else "questions.parquet")
        given = [
            f"data.train_files={questions}", f"data.val_files={questions}", f"actor_rollout_ref.model.path={model}",
            "data.val_max_samples=8", "trainer.val_before_train=false", "trainer.test_freq=-1",
        ]  # fmt: skip
        given += [] if recipe == "math_sepa" else [f"search.url={self.url}"]
        if self.tossed(recipe):
            coin = Path(__file__).with_name("coin_reward.py")
            given += ["credit=grpo", f"reward.custom_reward_function.path={coin}"]
        return given

    def tossed(self, recipe: str) -> bool:
        """Whether a coin is the reward."""
        return not self.trained or recipe == "math_sepa"


@contextmanager
def world(setting) -> Iterator[World]:
    """The world in ``--work``, made once; the search server runs inside the block."""
    from verl_credit_retriever.launch import start_server

    root = Path(setting.work).resolve() / "world"
    if not (root / "done").exists():
        _make(root)
    with start_server(root / "index", root / "encoder", log_path=root / "retriever.log") as server:
        yield World(root, server.url, bool(setting.model))


def model_folder(setting, path: str) -> str:
    """``--model``, or a folder with random weights in the shape of a recipe's model, and the lab's tokenizer."""
    if setting.model:
        return setting.model
    shape = TINY if setting.tiny else PUBLISHED[shape_of(path).name]
    folder = Path(setting.work).resolve() / f"random-{shape.name}"
    if not (folder / "tokenizer.json").exists():
        dtype = torch.float32 if setting.tiny else torch.bfloat16
        model = random_model(shape, "cpu", dtype, "sdpa")  # the GPU is the run's
        tokenizer = _tokenizer(shape.vocabulary)
        model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)  # last, because it marks the folder as complete
    return str(folder)


def _lab():
    from verl_credit.worlds.lab.config import SIZES
    from verl_credit.worlds.lab.world import make_world

    return make_world(0, SIZES["tiny"].world), SIZES["tiny"]


def _tokenizer(vocabulary: int = 0):
    """The lab's tokenizer with a template that shows tools, padded to ``vocabulary`` words, so that all can be sampled."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from verl_credit.worlds.lab.protocol import PAD, TURN_END, make_tokenizer

    small = make_tokenizer(_lab()[0].names())
    content = json.loads(small.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    words |= {added["content"]: added["id"] for added in content["added_tokens"]}
    words |= {f"word{number} ": number for number in range(len(words), vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), pad_token=PAD, eos_token=TURN_END,
        chat_template=TOOLS + small.chat_template, model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _make(root: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    from verl_credit.worlds.lab.build import _write_corpus
    from verl_credit.worlds.lab.encoder import train_encoder
    from verl_credit.worlds.lab.world import make_splits
    from verl_credit_retriever.index.search import build_index

    root.mkdir(parents=True, exist_ok=True)
    lab, size = _lab()
    tokenizer = _tokenizer()
    _write_corpus(lab, root / "corpus.jsonl")
    for part in (train_encoder(lab, tokenizer, seed=0, steps=2), tokenizer):
        part.save_pretrained(root / "encoder")
    build_index(root / "corpus.jsonl", root / "encoder", root / "index", kind="exact")  # no FAISS needed
    hops = [(q.text, q.gold) for q in make_splits(lab, size.world, 0)["train"]][:QUESTIONS]
    sums = [(f"What is {n} + {7 * n + 5}?", str(8 * n + 5)) for n in range(QUESTIONS)]
    for name, form, pairs in (("questions", TAG, hops), ("problems", BOXED, sums)):
        rows = [_row(number, form, *pair) for number, pair in enumerate(pairs)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), root / f"{name}.parquet")
    (root / "done").touch()


def _row(number: int, form: str, question: str, answer: str) -> dict:
    return {
        "data_source": "gpu_evidence",
        "agent_name": "search_agent",
        "prompt": [{"role": "user", "content": PROMPTS[form].format(question=question)}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": {"target": [answer], "form": form}},
        "extra_info": {"index": number, "split": "train", "question": question, "id": str(number)},
    }
