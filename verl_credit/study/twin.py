"""A training run of the lab in one process, without Ray: verl's trainer's twin, from the same configuration.

On the same rollouts it makes verl's step (tests/e2e/test_e2e_lab.py). Its own rollouts are drawn with other random numbers:
a run is another seed of the same experiment."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import RandomSampler

from verl_credit.config.settings import CreditSettings
from verl_credit.policy.packed import PackedPolicy
from verl_credit.records.run.files import METRICS, VALIDATION, append_json
from verl_credit.study.fidelity.subject import Subject, load_policy, make_subject
from verl_credit.study.fidelity.turn_rows import turn_batch
from verl_credit.study.twin_step import Objective, credited, update
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.turns.step.assign import CreditRun
from verl_credit.worlds.rollouts.rollout import Start, Trajectory, roll


class Twin:
    """``config`` is a run's of the recipe `lab`; the world's files are there already."""

    def __init__(self, config: DictConfig, run_dir: Path, say: Callable[[str], None]):
        self.config, self.run_dir, self._say = config, run_dir, say
        torch.manual_seed(config.seed)
        model, self.tokenizer = load_policy(Path(config.actor_rollout_ref.model.path))
        given = {"lab": Path(config.lab.dir), "prompts": None}
        self.train_set, self.test_set = (
            make_subject("twin", config, model, self.tokenizer, questions=Path(questions), **given)
            for questions in (config.data.train_files, config.data.val_files)
        )
        actor, temperature = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.temperature
        packed = {"temperature": temperature, "budget": actor.ppo_max_token_len_per_gpu}
        self.policy, settings = PackedPolicy(model, **packed), CreditSettings.from_config(config)
        frozen = settings.scores_gain and SCORERS[settings.algorithm.info_gain_scorer].frozen
        self.reference = PackedPolicy(copy.deepcopy(model), **packed) if frozen else None
        optim = actor.optim
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
        )
        self.credit = CreditRun.of(settings, self.tokenizer)
        self.objective = objective_of(config)

    def run(self) -> None:
        """Every step's metrics and every evaluation go into the files of the run, as verl's trainer writes them."""
        every, last = self.config.trainer.test_freq, self.config.trainer.total_training_steps
        if self.config.trainer.get("val_before_train", True):
            self.evaluate(0)
        for step, metrics in self.steps():
            append_json(self.run_dir / METRICS, {"step": step, **metrics})
            if step in self.config.keep_checkpoints:
                folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
                self.save(folder / "actor" / "huggingface")
            if (every > 0 and step % every == 0) or step == last:
                self.evaluate(step)

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields (number, metrics) of every planned step, as it ends."""
        last, prompts = self.config.trainer.total_training_steps, self._prompts()
        for step in range(1, last + 1):
            began = time.perf_counter()
            metrics = self.step(step, [next(prompts) for _ in range(self.config.data.train_batch_size)])
            seconds = time.perf_counter() - began
            self._say(f"step {step:3d}/{last}  EM {metrics['credit/outcome/em']:.3f}  s/step {seconds:.1f}")
            yield step, metrics | {"timing_s/step": seconds}

    def save(self, folder: Path) -> None:
        """The policy in Hugging Face format, without the optimiser's state."""
        self.policy.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def step(self, step: int, questions: list[int]) -> dict[str, float]:
        """Rollouts of these training questions, their credit, and the updates."""
        n = self.config.actor_rollout_ref.rollout.n
        began = time.perf_counter()
        rows = [*chain(*self._roll(self.train_set, questions, n, f"step {step}"))]
        generated = time.perf_counter()
        turns = turn_batch(rows, self.train_set.data)
        outcome_B = torch.tensor([trajectory.reward for trajectory in rows])
        group_B = torch.arange(len(questions)).repeat_interleave(n)
        with self.policy.packing():
            steps = {"step": step, "planned_steps": self.config.trainer.total_training_steps}
            given = turns, outcome_B, group_B
            batch, _, metrics = credited(self.credit, self.policy, *given, reference=self.reference, **steps)
            credit_given = time.perf_counter()
            updates = update(self.policy, self.optimizer, batch, self.objective)
        times = {"gen": generated - began, "credit": credit_given - generated}
        times["update_actor"] = time.perf_counter() - credit_given
        return {
            "credit/outcome/em": outcome_B.mean().item(),
            "num_turns/mean": turns.n_turns_B.double().mean().item(),
            **{f"actor/{name}": sum(one[name] for one in updates) / len(updates) for name in updates[0]},
            **{name: value for name, value in metrics.items() if isinstance(value, float)},
            **{f"timing_s/{name}": seconds for name, seconds in times.items()},
        }

    def evaluate(self, step: int) -> None:
        """Exact match on held-out questions, greedy and sampled, into the run's files."""
        chosen = held_out(len(self.test_set.prompts), self.config.data.val_max_samples, self.config.data.seed)
        em = {}
        for mode in ("greedy", "sampled"):
            groups = self._roll(self.test_set, chosen, 1, f"test {step}", greedy=mode == "greedy")
            em[mode] = sum(group[0].reward for group in groups) / len(chosen)
        row = {f"val-aux/lab-{mode}/em/mean@1": value for mode, value in em.items()}
        append_json(self.run_dir / VALIDATION, {"step": step, **row})
        shares = ", ".join(f"{mode} {value:.3f}" for mode, value in em.items())
        self._say(f"held-out EM after step {step}: {shares}")

    def _roll(self, subject: Subject, questions, count, name, *, greedy=False) -> list[list[Trajectory]]:
        seed = self.config.seed
        starts = [Start(subject.prompts[q], count, seed, f"{name} {i}") for i, q in enumerate(questions)]
        return roll(subject.sampler(greedy=greedy), subject.protocol, starts)

    def _prompts(self) -> Iterator[int]:
        """The questions in the order of verl's data loader with this seed."""
        generator = torch.Generator().manual_seed(self.config.data.seed or self.config.seed)
        while True:
            yield from RandomSampler(self.train_set.prompts, generator=generator)


def held_out(total: int, most: int, seed: int | None) -> list[int]:
    """The rows of the test file that verl's data set evaluates: ``most`` of them, chosen by ``data.seed``; all for -1."""
    if not 0 < most < total:
        return list(range(total))
    return np.random.default_rng(seed).choice(total, size=most, replace=False).tolist()


def objective_of(config: DictConfig) -> Objective:
    actor = config.actor_rollout_ref.actor
    sides = actor.clip_ratio_low, actor.clip_ratio_high
    low, high = (actor.clip_ratio if value is None else value for value in sides)
    return Objective(
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=actor.clip_ratio_c,
        ratio_level=actor.policy_loss.ratio_level,
        dynamic_clip=actor.policy_loss.dynamic_clip,
        loss_agg_mode=actor.loss_agg_mode,
        mini_batch_rows=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        epochs=actor.ppo_epochs,
        grad_clip=actor.optim.clip_grad,
        loss_scale_factor=actor.loss_scale_factor,
        entropy_coeff=actor.entropy_coeff,
    )
