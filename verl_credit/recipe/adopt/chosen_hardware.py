"""`hardware=NAME` beside a launch: the machine's devices, and its engine where it names one, stand in for the launch's."""

from __future__ import annotations

from verl_credit.config.engines import ENGINE
from verl_credit.config.resolved import leaves
from verl_credit.recipe import recipe_files as files

DEVICES = (
    ENGINE, "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node",
)  # fmt: skip


def values_of(hardware: str) -> dict[str, str]:
    """What the hardware's recipe says of engine and devices; nothing for an unknown name, which `explain` refuses."""
    file = files.recipes_folder() / "hardware" / f"{hardware}.yaml"
    said = dict(leaves(files.read_tree(file))) if file.is_file() else {}
    return {key: str(said[key]) for key in DEVICES if key in said}
