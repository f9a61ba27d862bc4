"""Checks of the processes of a run before its first step, and the notes that name what runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config.settings import CreditSettings
from verl_credit.host.registry import LOOPS, LOSS, require_registered
from verl_credit.host.rollout.agent_manager import CreditAgentLoopManager
from verl_credit.host.step.recorded import of_rollout_server
from verl_credit.names import LOOP_MANAGER, LOSS_MODE
from verl_credit.recipe.agent_loops import VERLS_TOOL_LOOP, own_loops
from verl_credit.recipe.unread import without_effect_in
from verl_credit.records.run import events


def check_actors(config: DictConfig, probed: list[dict]) -> dict[str, str | None]:
    """Raises RuntimeError for an actor worker without our names, or with another loss; returns what the actors run."""
    found: dict[str, str | None] = {}
    for rank, names in enumerate(probed):
        found = {kind: names[kind] for kind in ("attention", "log_probs")}
        require_registered(f"actor worker {rank}", names, LOSS)
        ours = config.actor_rollout_ref.actor.policy_loss.loss_mode == LOSS_MODE
        if ours and names["actor_loss"] != "credit_ppo_loss":
            raise RuntimeError(f"actor worker {rank} trains with {names['actor_loss']}, not credit_ppo_loss")
    return found


def check_agent_loops(config: DictConfig, manager) -> Callable[[str], list]:
    """Returns the manager's `drain`. A manager of somebody else keeps nothing for it, which a note says."""
    if not isinstance(manager, CreditAgentLoopManager):
        text = (
            f"{LOOP_MANAGER}={type(manager).__module__}.{type(manager).__name__} is not watched: nothing tells what its "
            "rollouts raised (lost ones are counted all the same), which held-out rows had a tool fault, whether a worker "
            "died, and whether its workers have our agent loops. Agent loops that are not ours have to apply a row's "
            "`sampling` (held-out rows: greedy or sampled) themselves, and to give seeds and versions of the weights"
        )
        events.note(Path(config.run_dir), "agent_loops", text)
        return lambda kind: []
    for number, names in enumerate(manager.probe()):
        require_registered(f"agent loop worker {number}", names, *LOOPS.values())
    return manager.drain


def note_engines(config: DictConfig, settings: CreditSettings, of_workers: Mapping[str, str | None]) -> None:
    search, run_dir = config.search, Path(config.run_dir)
    index = (search.index_fingerprint or "not named by its server") if search.max_searches else "none"
    events.note(run_dir, "banner", f"{settings.banner()} | index={index}")
    loop, ids = config.actor_rollout_ref.rollout.agent.default_agent_loop, settings.algorithm.turn_ids
    if ids == "mask" or (loop == VERLS_TOOL_LOOP and loop not in own_loops(config)):
        text = f"turns are runs of the response mask (algorithm.turn_ids={ids}, default_agent_loop={loop})"
        events.note(run_dir, "turn_ids", text)
    for kind, text in {**of_workers, "rollouts": of_rollout_server(config, "start_line")}.items():
        if text:
            events.note(run_dir, kind, text)


def note_idle(config: DictConfig, settings: CreditSettings, steps: int) -> None:
    """Notes keys without effect in a run whose number of steps is known only now, because it follows from the data."""
    if config.trainer.total_training_steps is None:
        length = f"{steps} steps (trainer.total_epochs={config.trainer.total_epochs})"
        for line in without_effect_in(config, settings, steps, length):
            events.note(Path(config.run_dir), "idle", f"without effect: {line}")
