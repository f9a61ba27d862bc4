"""Values of verl's own keys that our code divides by, compares or opens, checked before anything does."""

from __future__ import annotations

import math

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

HOST_NUMBERS = {  # key: (smallest, largest, whole number?)
    "data.max_prompt_length": (1, math.inf, True),
    "data.max_response_length": (1, math.inf, True),
    f"{ACTOR}.ppo_mini_batch_size": (1, math.inf, True),
    f"{ACTOR}.ppo_epochs": (1, math.inf, True),
    f"{ROLLOUT}.temperature": (1e-3, math.inf, False),
    f"{ROLLOUT}.top_p": (1e-3, 1.0, False),
    f"{ROLLOUT}.top_k": (-1, math.inf, True),
    f"{ROLLOUT}.gpu_memory_utilization": (0.01, 1.0, False),
    "trainer.nnodes": (1, math.inf, True),
    "trainer.n_gpus_per_node": (1, math.inf, True),
    "trainer.save_freq": (-1, math.inf, True),
    "trainer.test_freq": (-1, math.inf, True),
    "trainer.total_epochs": (1, math.inf, True),
}
FOLDERS = ("run_dir", "trainer.default_local_dir")
OR_NULL = {  # the same, or null
    f"{ROLLOUT}.max_model_len": (1, math.inf, True),
    f"{ACTOR}.ulysses_sequence_parallel_size": (1, math.inf, True),
    "actor_rollout_ref.model.lora_rank": (0, math.inf, True),
    "trainer.total_training_steps": (1, math.inf, True),
    "trainer.max_actor_ckpt_to_keep": (1, math.inf, True),
    "ray_kwargs.ray_init.num_cpus": (1, math.inf, True),
    "ray_kwargs.ray_init.num_gpus": (0, math.inf, True),
    "ray_kwargs.ray_init.object_store_memory": (1, math.inf, True),
}
