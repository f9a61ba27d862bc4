"""The subject of a measurement: a policy of the lab, its questions, its index, and its limits in training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import pyarrow.parquet
import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from verl_credit.config.keys import AUTO
from verl_credit.errors import PreflightError, one_line
from verl_credit.policy.packed import PackedPolicy
from verl_credit.study.fidelity.turn_rows import turn_batch
from verl_credit.study.forward import PackedRows
from verl_credit.study.probe.checkpoint import build_model, read_checkpoint
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.tool_calls import PARALLEL_CALLS
from verl_credit.turns.score.scorers import Forward
from verl_credit.worlds.lab.evaluate import LocalRetriever
from verl_credit.worlds.rollouts.protocol import Limits, Protocol, State
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory, roll
from verl_credit.worlds.rollouts.sampler import ModelDecoder, TurnSampler


@dataclass(frozen=True)
class Subject:
    """``config``: the run's, or the recipe `lab` for a policy that no run made, whose ``step`` is None. What `measure` reads
    of it, `host.measuring_run.RunSubject` has for a policy that rolls out through a run's own workers."""

    name: str
    config: DictConfig
    model: PreTrainedModel
    tokenizer: object
    protocol: Protocol
    prompts: list[State]
    """The states before the first turn, one for each prompt."""
    data: list[dict]
    """The questions' rows of the data set."""
    step: int | None = None
    engine = "sampler"

    def roll(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        return roll(self.sampler(), self.protocol, starts)

    def batch(self, groups: Groups) -> TurnBatch:
        return turn_batch([*chain(*groups)], self.data)

    @contextmanager
    def forward(self) -> Iterator[Forward]:
        policy = PackedPolicy(self.model)
        with policy.packing():
            yield PackedRows(policy)

    def about(self) -> dict:
        return {
            "policy": fingerprint(self.model),
            "limits": asdict(self.protocol.limits),
            "topk": int(self.config.search.topk),
        }

    def sampler(self, **options) -> TurnSampler:
        """Samples the policy's turns, which stop where the rollout server stops them."""
        ends = self.model.generation_config.eos_token_id
        stop = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        decoder = ModelDecoder(self.model, self.tokenizer.pad_token_id)
        return TurnSampler(decoder, sorted(stop), drawable=len(self.tokenizer), **options)


def make_subject(
    name: str,
    config: DictConfig,
    model: PreTrainedModel,
    tokenizer,
    *,
    questions: Path,
    lab: Path,
    prompts: int | None,
    step: int | None = None,
) -> Subject:
    """The first ``prompts`` rows of the parquet file ``questions`` (None: all), the encoder of ``lab``, and its index or
    ``lab.index``. Raises PreflightError where a file is missing or has fewer rows."""
    for part in (questions, lab / "encoder", lab / "index"):
        if not part.exists():
            raise PreflightError(f"{part} does not exist; expected a lab in {lab}")
    rows = pyarrow.parquet.read_table(questions).to_pylist()
    if prompts is not None and not 1 <= prompts <= len(rows):
        raise PreflightError(f"--prompts {prompts}: {questions} has {len(rows)}; expected 1 to {len(rows)}")
    rows = rows[:prompts]
    index = Path(config.lab.index) if config.lab.index else lab / "index"
    retriever, searched = LocalRetriever(lab / "encoder", index, k=config.search.topk), config.search
    if searched.index_fingerprint not in (None, retriever.fingerprint):
        other = f"and the run searched {searched.index_fingerprint} (search.index_fingerprint); expected its --lab"
        raise PreflightError(f"{index} has the fingerprint {retriever.fingerprint}, {other}")
    at_once = config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls  # auto: no run has decided it
    limits = Limits(
        max_searches=config.search.max_searches,
        max_parallel_calls=PARALLEL_CALLS if at_once == AUTO else at_once,
        max_new_tokens=config.search.max_new_tokens,
        max_page_chars=config.search.max_page_chars,
        max_response_length=config.data.max_response_length,
        include_reasoning=config.search.include_reasoning,
    )
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    protocol = Protocol(tokenizer, retriever.search, limits, truths)
    states = []
    for question, row in enumerate(rows):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        states.append(State(question, len(ids), ids))
    return Subject(name, config, model, tokenizer, protocol, states, rows, step)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the weights."""
    digest = hashlib.blake2b(digest_size=12)
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_policy(folder: Path) -> tuple[PreTrainedModel, object]:
    """A policy in Hugging Face format, float32. Raises PreflightError for a folder without one."""
    transformers_logging.disable_progress_bar()  # a small model loads in less than a second
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True
        )
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        why = one_line(str(error))[:200]
        raise PreflightError(f"{folder}: no policy in Hugging Face format ({why})") from error


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, object]:
    """The policy of ``global_step_N`` of a run, float32: verl's shards, or the twin's weights in Hugging Face format.

    Raises ConfigError as `read_checkpoint`.
    """
    transformers_logging.disable_progress_bar()
    whole = Path(folder) / "actor" / "huggingface"
    if (whole / "model.safetensors").is_file():
        return load_policy(whole)
    saved = read_checkpoint(folder, optimizer=False)
    model = build_model(folder, {**saved.parameters, **saved.buffers}, torch.float32, "cpu")
    model.set_attn_implementation("sdpa")
    return model, AutoTokenizer.from_pretrained(whole, local_files_only=True)
