"""`verl-credit plan`: memory, FLOPs, seconds and disk of a recipe, from first principles, before anything starts."""

from verl_credit.recipe.plan.compute import Step, step
from verl_credit.recipe.plan.hardware import Hardware, find_hardware
from verl_credit.recipe.plan.job import Assumptions, Job
from verl_credit.recipe.plan.memory import Phase, actor_peak, phases
from verl_credit.recipe.plan.model_shape import ModelShape, shape_of

__all__ = [
    "Assumptions", "Hardware", "Job", "ModelShape", "Phase", "Step", "find_hardware",
    "actor_peak", "phases", "shape_of", "step",
]  # fmt: skip
