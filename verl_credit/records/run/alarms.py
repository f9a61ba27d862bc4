"""Alarms of a run that collapses: one table of metrics, conditions over the run's own steps, sentences and remedies.

Most conditions compare the mean of a metric's last values with the run's own beginning, or with the best that the run had,
so that they hold for every model and task. `Watch` tests the table after each step; docs/run.md has the same table.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import gt, le, lt
from pathlib import Path

from verl_credit.names import ANSWER_WHEN_SOLVED, EXPLAINED_VARIANCE, INVALID_ACTIONS
from verl_credit.records.run.files import METRICS, VALIDATION, plain, read_json_lines

REWARD = "critic/score/mean"
HELD_OUT = r"val-(?:core|aux)/.+/(?:em|acc|reward)/mean@\d+"
GROUPS = "credit/groups/groups"
FIRST, BEST, ITSELF = "the first", "the best", ""
NOT_FINITE = "not finite"
SIDES = {"below": lt, "above": gt, "at most": le}
Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Condition:
    """The mean of the last ``window`` values is on a ``side`` of ``times`` the reference.

    0.75 times a reference is what is less by a quarter of its size, so that negative rewards fall, too.
    """

    metric: str
    """A name in metrics.jsonl; `HELD_OUT` is a pattern, because those names depend on the data."""
    side: str
    """below, above, at most; or `NOT_FINITE`: the last value is no finite number."""
    times: float = 1.0
    of: str = ITSELF
    """The reference: the mean of the first ``window`` values, the best such mean before, or 1."""
    by: float = 0.0
    """The least size of the change: half of nearly nothing is no collapse."""
    per: str | None = None
    """A metric that divides this one, step by step."""
    window: int = 5

    def seen(self, series: Series, since: int) -> tuple[float, float] | None:
        """(mean of the last values, reference) if the condition holds. All last values are of steps after ``since``."""
        if self.side == NOT_FINITE:
            step, value = series[-1]
            return None if step <= since or math.isfinite(value) else (value, 1.0)
        n, finite = self.window, [(step, value) for step, value in series if math.isfinite(value)]
        values, last = [value for _, value in finite], [value for step, value in finite if step > since][-n:]
        if len(last) < n or len(values) < {FIRST: 2 * n, BEST: n + 1, ITSELF: n}[self.of]:
            return None
        now, reference = _mean(last), 1.0
        if self.of == FIRST:
            reference = _mean(values[:n])
        elif self.of == BEST:
            reference = max(_mean(values[end - n : end]) for end in range(n, len(values)))
        limit = reference + (self.times - 1) * abs(reference)
        holds = SIDES[self.side](now, limit) and abs(now - reference) >= self.by
        return (now, reference) if holds else None


@dataclass(frozen=True)
class Alarm:
    name: str
    """The kind of its event."""
    seen: str
    """What a person sees."""
    conditions: tuple[Condition, ...]
    """All of them hold; the first names the metric of the alarm."""
    means: str
    remedy: str
    """Overrides, with {half_lr} for half of the run's learning rate and {more} for twice its rollouts: of each question, or,
    where the credit compares no rollouts of a question, of twice the questions; {tokens} for four times a turn's."""
    of_groups: bool = False
    """It is about groups, and silent where the credit compares no rollouts of a question."""


STALLED = Condition(REWARD, "at most", 1.1, FIRST)
LR = "actor_rollout_ref.actor.optim.lr={half_lr} actor_rollout_ref.actor.checkpoint.load_contents=[model]"
"""With the optimizer's and the schedule's state a resume restores the saved learning rate, whatever the key says."""
KL = "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001"
ALARMS = (
    Alarm(
        "held_out_falls", "held-out exact match falls",
        (Condition(HELD_OUT, "below", 0.75, BEST, window=2, by=0.05),),
        "An earlier checkpoint is better, from which the run can go on with smaller updates",
        f"trainer.resume_mode=resume_path trainer.resume_from_path=RUN/checkpoints/global_step_N {LR}",
    ),
    Alarm(
        "reward_falls", "the training reward falls", (Condition(REWARD, "below", 0.5, BEST, by=0.05),),
        "The policy has lost half of what it had learned", f"{LR} {KL}",
    ),
    Alarm(
        "entropy_falls", "entropy falls while questions stay unsolved",
        (Condition("actor/entropy", "below", 0.1, FIRST), Condition("credit/groups/all_failed", "above", 0.25, per=GROUPS)),
        "The rollouts of a question are nearly the same, so questions that fail stay without a right rollout",
        "actor_rollout_ref.actor.entropy_coeff=0.001 {more}",
    ),
    Alarm(
        "entropy_explodes", "entropy explodes", (Condition("actor/entropy", "above", 3.0, FIRST, by=0.3),),
        "The policy's tokens become random", f"actor_rollout_ref.actor.entropy_coeff=0 {LR} {KL}",
    ),
    Alarm(
        "right_answers_fall", "the probability of right answers falls",
        (Condition(ANSWER_WHEN_SOLVED, "below", 0.75, FIRST),),
        "Solved rollouts give the gold answer less probability than they did: updates against failed rollouts also push "
        "down what these share with solved ones, and the reward follows later", f"{LR} {KL}",
    ),
    Alarm(
        "turns_shrink", "turns shrink while the reward does not rise",
        (Condition("credit/turns_per_row", "below", 0.6, FIRST), STALLED),
        "The policy answers after fewer turns and gains nothing by it",
        f"algorithm.adv_rescale_alpha=1 {KL}",
    ),
    Alarm(
        "searches_stop", "tools are no longer called",
        (Condition("credit/tool/searches_per_row", "below", 0.1, FIRST),),
        "The policy hardly searches; without tool turns there is no turn credit. credit/tool/bad_calls and "
        "credit/tool/empty_searches tell whether it tries to", f"{LR} {KL}",
    ),
    Alarm(
        "responses_grow", "responses grow while the reward does not rise",
        (Condition("response_length/mean", "above", 2.0, FIRST), STALLED),
        "Longer rollouts cost time and are cut in the end",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean search.max_searches=2",
    ),
    Alarm(
        "answers_stop", "rollouts end without an answer", (Condition("credit/stop/answer", "below", 0.5, FIRST),),
        "credit/stop/* has the reasons; what was cut or has no answer tag counts as wrong",
        f"{LR} reward.custom_reward_function.reward_kwargs.format_penalty=0.1",
    ),
    Alarm(
        "gradients_grow", "the gradient norm grows", (Condition("actor/grad_norm", "above", 5.0, FIRST),),
        "Few rows dominate the update. actor_rollout_ref.actor.optim.clip_grad bounds its length, not its direction",
        f"{LR} algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0",
    ),
    Alarm(
        "no_contrast", "groups without contrast", (Condition("credit/groups/tied", "above", 0.9, per=GROUPS),),
        "In nine of ten groups all rollouts have the same outcome, so outcomes teach nothing there. All solved: the "
        "questions are too easy by now; all failed: too hard",
        "{more} data.train_files=OTHER_QUESTIONS",
        of_groups=True,
    ),
    Alarm(
        "values_say_nothing", "values of turns explain nothing", (Condition(EXPLAINED_VARIANCE, "below", 0.05),),
        "On questions that the fit has not seen, values predict outcomes hardly better than their mean does, so "
        "advantages between turns are noise. Observe more (docs/turn-values.md), or train without values",
        "algorithm.info_gain_norm_mode=none algorithm.turn_values=null",
    ),
    Alarm(
        "actions_invalid", "the environment takes hardly any action", (Condition(INVALID_ACTIONS, "above", 0.8, window=1),),
        "What the policy writes is no action, or is cut at search.max_new_tokens, so nothing moves, and there is little to "
        "learn from. Tokens help a turn that is cut; else name the format in the system message (prepare env --prompt), or "
        "read the action as the policy writes it (environment.action)",
        "search.max_new_tokens={tokens}",
    ),
    Alarm(
        "gradient_not_finite", "the gradient is not finite", (Condition("actor/grad_norm", NOT_FINITE),),
        "verl leaves out such an update", LR,
    ),
)  # fmt: skip


class Watch:
    """Tests the table after each step of one start of a run. Steps of earlier starts count as the beginning and the best;
    the last values are this start's, so that a remedy has a window to act in."""

    def __init__(
        self, run_dir: Path, before: int, settings: Mapping[str, object], grouped: bool = True
    ) -> None:
        """``before``: the last step of the starts before, or 0. ``settings``: what a remedy names (`Alarm.remedy`).
        ``grouped``: the credit compares the rollouts of a question."""
        self._since, self._settings = before, settings
        self._alarms = [alarm for alarm in ALARMS if grouped or not alarm.of_groups]
        self._values: dict[str, dict[int, float]] = {}
        for name in (VALIDATION, METRICS):
            for row in read_json_lines(Path(run_dir) / name):
                if row["step"] <= before:
                    self._add(row["step"], row)

    def see(self, step: int, metrics: Mapping) -> Iterator[tuple[str, str]]:
        """(kind of event, text) of every alarm that holds after this step."""
        self._add(step, metrics)
        for alarm in self._alarms:
            found = [self._seen(condition) for condition in alarm.conditions]
            if all(found):
                use = f"Try {alarm.remedy.format(**self._settings)} (docs/run.md#when-a-run-collapses)"
                yield alarm.name, f"warning: in step {step} {alarm.seen}: {found[0]}. {alarm.means}. {use}"

    def _add(self, step: int, metrics: Mapping) -> None:
        for name, value in metrics.items():
            if _READ.fullmatch(name):
                number = plain(value)  # None where it is not finite
                self._values.setdefault(name, {})[step] = math.nan if number is None else number

    def _seen(self, condition: Condition) -> str | None:
        """The numbers of the first metric for which the condition holds."""
        divisors = self._values.get(condition.per, {})
        for name in sorted(name for name in self._values if re.fullmatch(condition.metric, name)):
            series, what = sorted(self._values[name].items()), name
            if condition.per is not None:
                series = [(step, value / divisors[step]) for step, value in series if divisors.get(step)]
                what = f"{name} / {condition.per}"
            if found := condition.seen(series, self._since):
                if condition.side == NOT_FINITE:
                    return f"{what} is {found[0]}"
                if condition.window == 1:
                    return f"{what} is {found[0]:.3g}"
                before = f", {condition.of} {condition.window} {found[1]:.3g}" if condition.of else ""
                return f"{what} has mean {found[0]:.3g} over the last {condition.window}{before}"
        return None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_READ = re.compile("|".join({c.metric for a in ALARMS for c in a.conditions} | {GROUPS}))
