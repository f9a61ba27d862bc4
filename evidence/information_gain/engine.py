"""The cost of scored answers through verl's engine, with packs of many rows and FSDP2 around every layer.

    python evidence/information_gain/engine.py [--hidden 256] [--layers 4] [--repeats 5] [--json FILE]

Per shape (R rows of L tokens in one pack, T tool turns, answers of 8 tokens): CPU seconds of one `infer_batch` without
and with the R x (T + 1) branches, interleaved, medians, their ratio, and how many branch masks one forward made. One
gloo rank, one thread, fp32, Qwen3 with random weights; `--window` makes every layer slide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

ANSWER = 8
SHAPES = [(64, 200, 2), (8, 1024, 4), (2, 4096, 8)]


def build(arguments, folder: str):
    """verl's FSDP2 engine on the CPU with our attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_credit.host.process.register import register_all
    from verl_credit.host.registry import register_engines

    register_all()
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    import verl_credit.host.cpu.engine  # noqa: F401  (the import registers it)

    register_engines()
    hidden, layers = arguments.hidden, arguments.layers
    sliding = {"use_sliding_window": True, "sliding_window": arguments.window, "max_window_layers": 0}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=4096, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden,
        num_attention_heads=hidden // 64 * 2, num_key_value_heads=max(1, hidden // 128), head_dim=64,
        max_position_embeddings=40960, **(sliding if arguments.window else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "auto"})
    engine = EngineRegistry.new(
        model_type="language_model", backend="fsdp2", model_config=model,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", forward_only=True, use_torch_compile=False, model_dtype="fp32", mixed_precision=fp32,
        ),
        optimizer_config=None, checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    return engine


def batch(rows: int, length: int, turns: int, branches: bool):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl_credit.names import BRANCHES, SCORE_BRANCHES
    from verl_credit.turns.branches import encode_branches

    def nested(parts):
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    random = torch.Generator().manual_seed(length)
    at = [length * k // (turns + 1) for k in range(turns + 1, 1, -1)] + [length // (turns + 1), length // 10]
    answers = [(base, torch.randint(0, 4096, (ANSWER,), generator=random).tolist()) for base in at]
    data = TensorDict(
        {
            "input_ids": nested([torch.randint(0, 4096, (length,), generator=random) for _ in range(rows)]),
            "position_ids": nested([torch.arange(length)] * rows),
            "loss_mask": nested([torch.ones(length, dtype=torch.long)] * rows),
        },
        batch_size=rows,
    )
    if branches:
        data[BRANCHES] = nested([encode_branches(answers) for _ in range(rows)])
        tu.assign_non_tensor(data, **{SCORE_BRANCHES: True})
    tu.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=1.0, use_remove_padding=True,
        use_fused_kernels=False, use_dynamic_bsz=True, max_token_len_per_gpu=2 * rows * length,
    )  # fmt: skip
    return data


def seconds(engine, data) -> float:
    start = time.process_time()
    with engine.eval_mode():
        engine.infer_batch(data)
    return time.process_time() - start


def masks_made(engine, data) -> int:
    """Branch masks that one forward builds, counted where they are built."""
    from verl_credit.attention import sdpa

    build, made = sdpa._branch_piece, []
    sdpa._branch_piece = lambda *given: (made.append(given), build(*given))[1]
    seconds(engine, data)
    sdpa._branch_piece = build
    return len(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none", "RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "cpu:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        engine = build(arguments, f"{folder}/model")
        shapes = []
        for rows, length, turns in SHAPES:
            given = {name: batch(rows, length, turns, name == "branch") for name in ("plain", "branch")}
            seconds(engine, given["branch"])  # tries its kernel, which makes masks of its own
            masks = masks_made(engine, given["branch"])
            taken = {name: [] for name in given}
            for _ in range(arguments.repeats):
                for name, data in given.items():
                    taken[name].append(seconds(engine, data))
            plain, branch = (statistics.median(taken[name]) for name in given)
            shapes.append({
                "rows": rows, "length": length, "turns": turns, "plain_s": round(plain, 4),
                "branch_s": round(branch, 4), "branch_ratio": round(branch / plain, 3), "branch_masks": masks,
            })  # fmt: skip
            print(json.dumps(shapes[-1]), flush=True)
        torch.distributed.destroy_process_group()
    if arguments.json:
        model = f"qwen3, hidden {arguments.hidden}, {arguments.layers} layers, window {arguments.window}"
        machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
        arguments.json.write_text(
            json.dumps({"machine": machine, "model": model, "shapes": shapes}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
