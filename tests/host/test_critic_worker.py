"""verl's critic worker with our engine, in this process: it learns with verl's loss, and goes on from its checkpoint."""

from functools import partial

import pytest
import torch

from kit.tiny_engine import Trajectories, batch, single_rank
from kit.tiny_models import tiny_model

ROWS = [(5, 12), (5, 7), (5, 9), (3, 8)]


@pytest.fixture
def worker_of(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "policy")
    with single_rank():
        from verl_credit.host.process.verl_checks import register_all

        register_all()
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPCriticConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine_workers import TrainingWorkerConfig
        from verl.workers.utils.losses import value_loss

        from verl_credit.host.actor.worker import CriticWorker

        full = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        tokens = dict.fromkeys(("max_token_len_per_gpu", "infer_max_token_len_per_gpu"), 64)

        def worker_of():
            model = {
                "load_tokenizer": False,
                "use_remove_padding": True,
                "enable_gradient_checkpointing": False,
            }
            worker = CriticWorker(
                TrainingWorkerConfig(
                    model_type="value_model",
                    model_config=HFModelConfig(
                        path=str(tmp_path / "policy"),
                        override_config={"attn_implementation": "auto"},
                        **model,
                    ),
                    engine_config=FSDPEngineConfig(
                        strategy="fsdp2",
                        model_dtype="fp32",
                        mixed_precision=full,
                        use_torch_compile=False,
                        **tokens,
                    ),
                    optimizer_config=FSDPOptimizerConfig(lr=0.01, total_training_steps=9, lr_warmup_steps=0),
                    checkpoint_config=CheckpointConfig(),
                )
            )
            worker.reset()
            worker.set_loss_fn(
                partial(value_loss, config=FSDPCriticConfig(strategy="fsdp2", use_dynamic_bsz=True))
            )
            return worker

        yield worker_of


def nested(rows):
    return torch.nested.as_nested_tensor([*map(torch.as_tensor, rows)], layout=torch.jagged)


def step_of(worker, turns, returns) -> tuple[torch.Tensor, float]:
    """(the values before the update, verl's loss of it), by the calls of verl's trainer."""
    from verl.workers.utils.padding import response_from_nested

    settings = {"temperature": 1.0, "max_token_len_per_gpu": 64}
    data = batch(turns, **settings)
    for name, rows in (("prompts", turns.prompt_ids), ("responses", turns.response_ids)):
        data[name] = nested(rows)
    values = response_from_nested(worker.infer_batch(data.clone())["values"], data["response_mask"])
    data = batch(turns, **settings, mini_batch_size=4, global_batch_size=4, epochs=1, compute_loss=True)
    for name, rows in (("prompts", turns.prompt_ids), ("responses", turns.response_ids)):
        data[name] = nested(rows)
    data["values"], data["returns"] = values, nested(returns)
    metrics = worker.train_mini_batch(data)["metrics"]
    return values.values().clone(), float(sum(metrics["loss"]))


@pytest.mark.slow
def test_it_learns_the_returns_and_goes_on_from_its_checkpoint(worker_of, tmp_path):
    turns = Trajectories(ROWS)
    returns = [[float(row % 2)] * tokens for row, (_, tokens) in enumerate(ROWS)]
    worker = worker_of()
    steps = [step_of(worker, turns, returns) for _ in range(6)]
    assert not steps[0][0].any()  # the head is 0 at first
    assert steps[5][1] < 0.3 * steps[0][1]
    worker.save_checkpoint(str(tmp_path / "critic"), None, 6)
    went_on = [step_of(worker, turns, returns) for _ in range(2)]
    other = worker_of()
    other.load_checkpoint(str(tmp_path / "critic"))
    for (value_N, loss), (other_N, other_loss) in zip(
        went_on, [step_of(other, turns, returns) for _ in range(2)], strict=True
    ):
        assert torch.equal(value_N, other_N) and loss == other_loss and value_N.any()
