"""verl's own keys that our code divides by, compares or opens, checked before anything does. Their defaults are verl's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Section
from verl_credit.names import TRAINER_MODE

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class VerlSection(Section):
    lenient = True


class Data(VerlSection):
    prefix = "data"
    train_batch_size: Positive
    max_prompt_length: Positive
    max_response_length: Positive


class Model(VerlSection):
    prefix = "actor_rollout_ref.model"
    lora_rank: Count | None


class Actor(VerlSection):
    prefix = "actor_rollout_ref.actor"
    ppo_mini_batch_size: Positive
    ppo_epochs: Positive
    ulysses_sequence_parallel_size: Positive | None


class Rollout(VerlSection):
    prefix = "actor_rollout_ref.rollout"
    n: Positive
    temperature: Annotated[float, Field(ge=1e-3)]
    top_p: Annotated[float, Field(ge=1e-3, le=1)]
    top_k: Annotated[int, Field(ge=-1)]
    max_model_len: Positive | None
    gpu_memory_utilization: Annotated[float, Field(ge=0.01, le=1)]


class Trainer(VerlSection):
    prefix = "trainer"
    nnodes: Positive
    n_gpus_per_node: Positive
    save_freq: Annotated[int, Field(ge=-1)]
    test_freq: Annotated[int, Field(ge=-1)]
    total_epochs: Positive
    total_training_steps: Positive | None
    max_actor_ckpt_to_keep: Positive | None
    default_local_dir: Folder


class TrainerV1(VerlSection):
    prefix = "trainer.v1"
    trainer_mode: Literal[TRAINER_MODE]


class RayInit(VerlSection):
    prefix = "ray_kwargs.ray_init"
    num_cpus: Positive | None
    num_gpus: Count | None
    object_store_memory: Positive | None
