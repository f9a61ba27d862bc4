"""verl's FSDP2 engine around tiny models, in this process or on gloo ranks of their own, and batches for it."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from unittest import mock

import torch
import torch.multiprocessing as mp

from kit.tiny_models import VOCABULARY, exact_norms
from verl_credit.turns.score.requests import PseudoAnswer, Request

TRUNKS = [(5, 12), (3, 20), (5, 1), (7, 9), (4, 17)]  # prompt and response tokens
ANSWERS = [
    PseudoAnswer((7, 8, 9, 10, 11), 1, 4),
    PseudoAnswer((12, 13), 0, 2),
    PseudoAnswer((14, 15, 16), 2, 3),
]


class Trajectories:
    """As much of a `TurnBatch` as branches read."""

    def __init__(self, rows, seed=0):
        random = torch.Generator().manual_seed(seed)
        draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=random).tolist()  # noqa: E731
        shared = draw(5)
        self.prompt_ids = [shared if p == 5 else draw(p) for p, _ in rows]
        self.response_ids = [draw(r) for _, r in rows]

    def requests(self):
        """The bare prompt and two contexts of every row but the third, which has its prompt alone."""
        found = []
        for row, (prompt, response) in enumerate(zip(self.prompt_ids, self.response_ids, strict=True)):
            ends = [0] if len(response) == 1 else [0, len(response) // 2, len(response)]
            for column, end in enumerate(ends):
                for alias in range(1 + (row == 0)):
                    answer = ANSWERS[(row + 2 * alias) % 3]
                    found.append(Request(row, column, alias, len(prompt) + end, answer))
        return found


def batch(turns, plan=None, **settings):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl_credit.names import BRANCHES, SCORE_BRANCHES

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    whole = [p + r for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]
    ones = nested([[1] * len(row) for row in turns.response_ids])
    fields = {
        "input_ids": nested(whole),
        "position_ids": nested([list(range(len(row))) for row in whole]),
        "response_mask": ones,
        "loss_mask": ones,
    }
    if plan is not None:
        fields[BRANCHES] = plan.field()
        settings[SCORE_BRANCHES] = True
    data = TensorDict(fields, batch_size=len(whole))
    defaults = {
        "calculate_entropy": True, "compute_loss": False, "temperature": 0.7, "use_remove_padding": True,
        "use_dynamic_bsz": True, "max_token_len_per_gpu": 64, "use_fused_kernels": False,
    }  # fmt: skip
    tu.assign_non_tensor(data, **defaults | settings)
    return data


def build_engine(
    folder, attention="auto", precision="fp32", training=False, engine=None, kind="language_model", **model
):
    """``model``: keys of `HFModelConfig`; ``engine``: of `FSDPEngineConfig`. With ``training`` it has an optimizer, of
    learning rate 0.

    ``precision``: fp32, bf16 (parameters stay fp32), or fp64 with norms that do not cast to float32.
    """
    from verl_credit.host.process.verl_checks import register_all
    from verl_credit.host.registry import register_engines

    register_all()
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    register_engines()
    stored = "fp32" if precision == "bf16" else precision
    mixed = {"param_dtype": precision, "reduce_dtype": stored, "buffer_dtype": stored}
    optimizer = FSDPOptimizerConfig(lr=0.0, total_training_steps=1, lr_warmup_steps=0) if training else None
    built = EngineRegistry.new(
        model_type=kind,
        backend="fsdp2",
        model_config=HFModelConfig(
            path=folder,
            model_type=kind,
            load_tokenizer=False,
            override_config={"attn_implementation": attention},
            **model,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            forward_only=not training,
            model_dtype=stored,
            mixed_precision=mixed,
            **{"use_torch_compile": False} | (engine or {}),
        ),
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    with knows_float64():
        built.initialize()
    if precision == "fp64":
        exact_norms(built.module)
        built.module.config._experts_implementation = "eager"  # the grouped kernels know no float64
    torch.manual_seed(3)  # LoRA's B is 0 at first: an adapter that does something
    for name, weight in built.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return built


@contextmanager
def knows_float64():
    """verl's names of dtypes end at float32."""
    from verl.utils.torch_dtypes import PrecisionType

    known = PrecisionType.to_dtype
    PrecisionType.to_dtype = staticmethod(lambda name: torch.float64 if name == "fp64" else known(name))
    try:
        yield
    finally:
        PrecisionType.to_dtype = staticmethod(known)


def infer(engine, data, mode=None):
    with (mode or engine.eval_mode)():
        return engine.infer_batch(data)["model_output"]


def _environment(rank, ranks) -> dict[str, str]:
    return {
        "VERL_PLATFORM": "cpu", "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }  # fmt: skip


@contextmanager
def single_rank():
    """This process is the only rank, on a CPU, whatever verl chose when it was imported. Afterwards all is as before."""
    with mock.patch.dict(os.environ, _environment(0, 1)):
        from verl.plugin.platform import platform_manager

        from verl_credit.host.cpu.platform import PlatformCPU

        with mock.patch.object(platform_manager, "_current_platform", PlatformCPU()):
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
            try:
                yield
            finally:
                torch.distributed.destroy_process_group()


@contextmanager
def gloo_rank(rank, ranks, store):
    """This process is one of ``ranks`` that meet in the file ``store``."""
    os.environ |= _environment(rank, ranks)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    yield
    torch.distributed.destroy_process_group()


def on_ranks(ranks, main, folder, *given) -> dict:
    """What ``main(rank, ranks, folder, store, results, *given)`` left in ``results``.

    A server imports verl once and forks every rank: an import takes 6 s, more than most ranks compute.
    """
    platform, engine = "verl_credit.host.cpu.platform", "verl.workers.engine"
    multiprocessing.set_forkserver_preload([platform, engine])
    with mock.patch.dict(os.environ, _environment(0, ranks)), mp.Manager() as manager:
        results = manager.dict()
        store = f"{folder}/store_{main.__name__}_{ranks}"
        mp.start_processes(
            main, (ranks, str(folder), store, results, *given), nprocs=ranks, start_method="forkserver"
        )
        return dict(results)
