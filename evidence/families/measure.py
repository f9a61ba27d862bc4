"""The measurements of one family (`table.py` says which)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from kit.families import VOCABULARY, family_config
from kit.tiny_engine import batch, build_engine, infer
from kit.tiny_models import log_probs
from verl_credit.policy.families import dropouts, family_of
from verl_credit.turns.branches import plan_branches
from verl_credit.turns.requests import PseudoAnswer, Request

ROWS = [
    (37, 20),
    (37, 91),
    (37, 168),
    (52, 64),
    (21, 100),
]  # tokens of prompt and response; three have one prompt
ANSWERS = [PseudoAnswer(tuple(range(7, 7 + n)), 0, n) for n in (4, 8, 12)]
PROMPTS, GENERATED = (40, 40, 23, 31), 30
STD = 0.15


@dataclass
class Keys:
    """What a run of the family would have for ``auto``, and the changes of its config."""

    attention: str
    packed: bool
    scorer: str
    override: dict
    refused: str = ""


@dataclass
class Result:
    """A row of the table. Numbers that were not computed are None."""

    keys: str = ""
    rows: float | None = None
    gradients: float | None = None
    branch: float | None = None
    by_rows: float | None = None
    drawn: float | None = None
    prompt: float | None = None
    refused: str = ""


def choice(config) -> Keys:
    """The keys of the family's row of `verl_credit/policy/families.py`."""
    family = family_of(config)
    attention, packed, scorer = family.chosen()
    off = dict.fromkeys(dropouts(config), 0.0)
    return Keys(attention, packed, scorer, off, family.why if family.refused else "")


class Turns:
    """As much of a `TurnBatch` as the scorers read."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=random).tolist()  # noqa: E731
        shared = draw(ROWS[0][0])
        self.prompt_ids = [shared if p == ROWS[0][0] else draw(p) for p, _ in ROWS]
        self.response_ids = [draw(r) for _, r in ROWS]

    def requests(self) -> list[Request]:
        """Nine answers: after the prompt and twice within the response of three rows."""
        found = []
        for row in (0, 2, 4):
            prompt, response = ROWS[row]
            for column, end in enumerate((0, response // 2, response)):
                found.append(Request(row, column, 0, prompt + end, ANSWERS[(row + column) % 3]))
        return found

    def rows(self) -> list[list[int]]:
        return [p + r for p, r in zip(self.prompt_ids, self.response_ids, strict=True)]


def save_model(config, folder: Path) -> None:
    """Random weights whose log-probs have a spread of about a nat."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=STD)
    model.save_pretrained(folder)


def loss_of(model_output, data, dp_group=None):
    """-Σ log p of the responses; the last log-prob of a row is of the next row's first token."""
    rows = zip(model_output["log_probs"].unbind(), ROWS, strict=True)
    return -sum(row[p - 1 : p + r - 1].sum() for row, (p, r) in rows), {}


class Family:
    """The measurements of one family; ``eager`` is the reference."""

    def __init__(self, name: str, folder: Path):
        self.folder, self.turns = folder, Turns()
        config = family_config(name)
        self.keys = choice(config)
        for key, value in self.keys.override.items():
            setattr(config, key, value)
        save_model(config, folder)
        self.eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.result = Result()
        if not self.keys.refused:
            packed = "packed" if self.keys.packed else "padded"
            self.result.keys = f"{self.keys.attention}, {packed}, {self.keys.scorer}"

    def measure(self) -> Result:
        if self.keys.refused:
            self.result.refused = f"before Ray: {self.keys.refused}"
        else:
            self._try("engine", self._engine)
        self._try("hf", self._rollouts)
        return self.result

    def _try(self, part: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # any fault of a family is a row of the table
            text = " ".join(str(error).split())
            said = f"{part}: {type(error).__name__}: {text}"
            self.result.refused = "; ".join(filter(None, [self.result.refused, said]))

    def _engine(self) -> None:
        from verl_credit.host.engine.attention_proof import prove
        from verl_credit.host.step.store import score_rows
        from verl_credit.names import BRANCH_LOG_PROBS
        from verl_credit.turns.scorers.scorer import RowScorer

        keys, turns, result = self.keys, self.turns, self.result
        engine = build_engine(
            str(self.folder), keys.attention, training=True, enable_gradient_checkpointing=False,
            use_remove_padding=keys.packed,
        )  # fmt: skip
        prove(engine, VOCABULARY)
        settings = {"temperature": 1.0, "calculate_entropy": False, "max_token_len_per_gpu": 1024}
        settings["use_remove_padding"] = keys.packed

        found = infer(engine, batch(turns, **settings))["log_probs"].unbind()
        alone = [log_probs(self.eager, row) for row in turns.rows()]
        result.rows = max(_apart(a[:-1], b) for a, b in zip(found, alone, strict=True))

        requests = turns.requests()
        expected = torch.stack([self._score(request) for request in requests])
        if keys.scorer == "branch":
            plan = plan_branches(requests, turns)
            output = infer(engine, batch(turns, plan, **settings))
            result.branch = _apart(plan.scores(list(output[BRANCH_LOG_PROBS].unbind())), expected)

        def compute(data):
            from verl.utils import tensordict_utils as tu

            tu.assign_non_tensor(data, use_fused_kernels=False, use_dynamic_bsz=True, **settings)
            return infer(engine, data)

        forward = SimpleNamespace(score_rows=lambda rows: score_rows(compute, rows, dp_size=1))
        scored = RowScorer().score(SimpleNamespace(turns=turns, requests=requests), forward)
        result.by_rows = _apart(scored, expected)

        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(batch(turns, **settings), loss_of)
            grads = {
                n: w.grad.full_tensor() for n, w in engine.module.named_parameters() if w.grad is not None
            }
        result.gradients = self._gradients(grads)

    def _score(self, request: Request) -> torch.Tensor:
        """The mean log-prob of an answer after its context, in a row of its own."""
        answer = request.answer
        row = [*self.turns.rows()[request.row][: request.base], *answer.token_ids]
        first = request.base - 1
        return log_probs(self.eager, row)[first + answer.gold_start : first + answer.gold_end].double().mean()

    def _gradients(self, found: dict[str, torch.Tensor]) -> float:
        """Norm of the difference / norm, where a parameter has at least 1e-4 of the whole gradient."""
        for row, (prompt, response) in zip(self.turns.rows(), ROWS, strict=True):
            values = log_probs.__wrapped__(self.eager, row)
            (-values[prompt - 1 : prompt + response - 1].sum()).backward()
        expected = {n: w.grad for n, w in self.eager.named_parameters() if w.grad is not None}
        whole = sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
        apart = [
            float((found.get(n, torch.zeros_like(g)) - g).norm()) / max(float(g.norm()), 1e-4 * whole)
            for n, g in expected.items()
        ]
        return max(apart)

    def _rollouts(self) -> None:
        """Tokens that the generator draws, at temperature 1, and a prompt's; the reference reads both anew."""
        from verl.workers.config import HFModelConfig, RolloutConfig

        from verl_credit.host.hf_rollout.model import build_model
        from verl_credit.policy.generation import BatchGenerator
        from verl_credit.policy.sampling import SamplingParams

        rollout = RolloutConfig(
            name="hf", tensor_model_parallel_size=1, dtype="float32", load_format="safetensors"
        )
        model_config = HFModelConfig(path=str(self.folder), load_tokenizer=False)
        model = build_model(model_config, rollout, torch.device("cpu"))
        generator = BatchGenerator(model, pad_token_id=0)
        random = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, VOCABULARY, (n,), generator=random).tolist() for n in PROMPTS]
        prompts[1] = prompts[0]
        params = [SamplingParams(max_new_tokens=GENERATED, seed=row) for row in range(len(prompts))]
        drawn = generator.generate(prompts, params)
        apart = [
            _apart(
                torch.tensor(one.log_probs), log_probs(self.eager, prompt + one.token_ids)[len(prompt) - 1 :]
            )
            for prompt, one in zip(prompts, drawn, strict=True)
        ]
        self.result.drawn = max(apart)
        long = self.turns.rows()[2]
        self.result.prompt = _apart(
            torch.tensor(generator.prompt_log_probs(long)), log_probs(self.eager, long)
        )


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """NaN where one of them is NaN."""
    return float((ours.double() - theirs.double()).abs().max())
