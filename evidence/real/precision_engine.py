"""The project's engine in bf16 with trained weights: its gains, and what the start-up proof says.

    python evidence/real/precision_engine.py --real DIR --questions hotpotqa_dev_distractor_70.json

verl's FSDP2 engine on one gloo rank, as the trainer builds it on a CPU. Gains of the first questions are compared with
precision.json (the same by transformers) and gains.json (fp32). The proof (`host/engine/attention_proof.py`) is made in fp32
and bf16 with every attention that runs on a CPU. Writes precision_engine.json.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from common import HERE, arguments, machine, write
from forward import planned, score_table_of
from questions70 import read_questions
from rollouts import SETTINGS, rollouts
from transformers import AutoTokenizer

from verl_credit.turns.branches import decode_branches

QUESTIONS = 10


def engine_of(folder: str, dtype: str, attention: str):
    """verl's FSDP2 engine on the CPU, its parameters cast to ``dtype`` for the forward."""
    from verl_credit.host.process.register import register_all
    from verl_credit.host.registry import register_engines

    register_all()
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    import verl_credit.host.cpu.engine  # noqa: F401  (the import registers it)

    register_engines()
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model", backend="fsdp2",
        model_config=HFModelConfig(
            path=folder, load_tokenizer=False, override_config={"attn_implementation": attention}
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", forward_only=True, use_torch_compile=False, model_dtype="fp32", mixed_precision=precision,
        ),
        optimizer_config=None, checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    return engine


class EngineForward:
    """The scorer's answers through `infer_batch`, as the actor's worker calls it."""

    budget = None

    def __init__(self, engine, turns):
        self._engine, self._turns = engine, turns

    def carry(self, branches: torch.Tensor) -> None:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES

        rows = [
            torch.tensor(p + r) for p, r in zip(self._turns.prompt_ids, self._turns.response_ids, strict=True)
        ]
        more = sum(len(decode_branches(row)[1]) for row in branches.unbind())
        fields = {
            "input_ids": rows,
            "position_ids": [torch.arange(len(row)) for row in rows],
            "loss_mask": [torch.ones_like(row) for row in rows],
        }
        nested = {
            name: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for name, parts in fields.items()
        }
        data = TensorDict(nested | {BRANCHES: branches}, batch_size=len(rows))
        tu.assign_non_tensor(
            data, calculate_entropy=False, compute_loss=False, temperature=1.0, use_remove_padding=True,
            use_fused_kernels=False, use_dynamic_bsz=True, max_token_len_per_gpu=sum(map(len, rows)) + more,
            **{SCORE_BRANCHES: True},
        )  # fmt: skip
        with self._engine.eval_mode():
            output = self._engine.infer_batch(data)["model_output"]
        self._found = [row.float() for row in output[BRANCH_LOG_PROBS].unbind()]

    def carried(self) -> list[torch.Tensor]:
        return self._found


def gains_of_engine(engine, real: Path, file: Path) -> list[list[list[float]]]:
    tokenizer, found = AutoTokenizer.from_pretrained(real / "policy"), []
    for question in read_questions(file)[:QUESTIONS]:
        turns = rollouts(question, tokenizer).turns
        forward = EngineForward(engine, turns)
        plan = planned(turns, SETTINGS, tokenizer, "branch")
        found.append(score_table_of(plan.scorer.before_forward(plan, forward), forward).tolist())
    return found


def largest(a: list, b: list) -> float:
    return max(float((torch.tensor(x) - torch.tensor(y)).abs().max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = arguments(__doc__, "precision_engine")
    parser.add_argument("--gains", type=Path, default=HERE / "gains.json")
    parser.add_argument("--precision", type=Path, default=HERE / "precision.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none", "RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    begin = time.perf_counter()
    report = {
        "command": "python evidence/real/precision_engine.py --real DIR --questions hotpotqa_dev_distractor_70.json",
        "machine": machine("torch", "transformers", "verl"),
        "proof_says": {},
    }
    with tempfile.TemporaryDirectory() as store:
        torch.distributed.init_process_group(
            "cpu:gloo", init_method=f"file://{store}/store", rank=0, world_size=1
        )
        for dtype, attention in (("fp32", "auto"), ("bf16", "auto"), ("fp32", "credit_flex")):
            engine = engine_of(str(options.real / "policy"), dtype, attention)
            from verl_credit.host.engine.attention_proof import prove

            try:
                said = prove(engine, engine.model_config.hf_config.vocab_size)
            except (RuntimeError, NotImplementedError) as error:
                said = f"{type(error).__name__}: {error}"
            report["proof_says"][f"{dtype}, {attention}"] = said
            print(dtype, attention, said, flush=True)
            if attention == "auto":
                report[f"scores_{dtype}"] = gains_of_engine(engine, options.real, options.questions)
            del engine
        torch.distributed.destroy_process_group()
    exact = [
        [row["scores"] for row in question["rows"]]
        for question in json.loads(options.gains.read_text())["scores"][:QUESTIONS]
    ]
    variants = json.loads(options.precision.read_text())["scores"][:QUESTIONS]
    report["largest_difference_of_a_score"] = {
        "engine fp32 to gains.json": largest(report["scores_fp32"], exact),
        "engine bf16 to gains.json": largest(report["scores_bf16"], exact),
        **{
            f"engine bf16 to {name}": largest(report["scores_bf16"], [q[name]["branch"] for q in variants])
            for name in variants[0]
            if name != "question"
        },
    }
    print(json.dumps(report["largest_difference_of_a_score"], indent=1))
    report["seconds"] = round(time.perf_counter() - begin)
    write(options.json, report)


if __name__ == "__main__":
    main()
