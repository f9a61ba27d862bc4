"""``algorithm.*``: which credit a token gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from annotated_types import Predicate
from pydantic import Field

from verl_credit.config.keys import reads
from verl_credit.config.keys.section import Expected, OneOf, Section, When
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.token.gtpo_canonical import CANONICAL
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import UNCERTAINTY_KINDS
from verl_credit.credit.turn.info_gain import FIRST_TURN, INFO_GAIN_TYPES
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.names import ADV_ESTIMATOR

AUTO: Final = "auto"
DETECTORS = ("grams",)
TURN_SIGNALS = (AUTO, "none", "info_gain", "tool_reward", "column:NAME")
SCORERS = (AUTO, "branch", "rows", "reference")

AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Pair = Annotated[
    tuple[AtLeast0, AtLeast0],
    Field(strict=False),
    Expected("[first step, last step], two numbers of at least 0"),
]


def named(names: Iterable[str]) -> Expected:
    """Describes a key that takes a built-in name or a user's dotted path; the rules check that the path loads."""
    return Expected(f"{', '.join(names)}, or a dotted path to your own (my_module.my_name)")


Params = Annotated[dict[str, Any], Expected("a mapping of names to values")]


class Gtpo(Section):
    beta: Annotated[AtLeast0, When(reads.weighted)] = 0.1
    """Strength with which a token's weight follows its uncertainty; 0: all tokens weigh the same."""


class Hicra(Section):
    alpha: Annotated[AtLeast0, When(reads.amplified)] = 0.2
    """Planning tokens get alpha |A| in addition; 0: off."""


class Sepa(Section):
    steps: Annotated[Count, When(reads.sepa)] = 500
    """Steps of the linear ramp of lambda from 0 to 1."""
    schedule: Annotated[Literal["linear", "auto"], When(reads.sepa)] = "linear"
    """auto: the larger of the ramp and the fall of the execution tokens' variance."""
    delay_steps: Annotated[Count, When(reads.sepa)] = 50
    """Steps before the ramp begins."""
    correct_rate_gate: Annotated[Share, When(reads.sepa)] = 0.1
    """lambda stays 0 until this share of a step's outcomes was above 0.5; 0: open from the start."""
    ema_decay: Annotated[Share, When(reads.sepa)] = 0.99
    """Decay of the moving average of the variance (schedule=auto)."""
    var_threshold: Annotated[Share, When(reads.sepa)] = 0.2
    """Share of the starting variance below which schedule=auto begins to act."""
    warmup: Annotated[int, Field(ge=1), When(reads.sepa)] = 50
    """Observations before schedule=auto may act."""
    ramp_from: Annotated[Literal["start", "gate"], When(reads.sepa)] = "start"
    """start: lambda jumps to the ramp's value when the gate opens late (published). gate: the ramp starts there."""


class EntropyMask(Section):
    rho: Annotated[Share, When(lambda s: reads.transform(s).masked)] = 0.2
    """Share of a prompt's tokens that keep their advantage."""


class Canonical(Section):
    """gtpo_canonical and grpo_s (2508.04349)."""

    population: Annotated[Literal["polarity", "all", "joint"], When(reads.gtpo_canonical)] = "all"
    """The population of equation 6: the tokens of one polarity, or all tokens."""
    alpha_1: Annotated[AtLeast0, When(reads.gtpo_canonical)] = 1.0
    """Weight of the outcome in a token's reward."""
    alpha_2: Annotated[AtLeast0, When(reads.gtpo_canonical)] = 0.1
    """Weight of the entropy in a token's reward."""
    beta_1: Annotated[AtLeast0, When(reads.grpo_s)] = 1.0
    """Weight of the outcome in a row's reward."""
    beta_2: Annotated[AtLeast0, When(reads.grpo_s)] = 0.1
    """Weight of the entropy in a row's reward."""
    entropy_clip: Annotated[
        tuple[float, float] | None,
        Field(strict=False),
        Predicate(lambda clip: clip is None or 0 <= clip[0] < clip[1]),
        Expected("null or [low, high] with 0 <= low < high"),
        When(reads.canonical),
    ] = None
    """Entropies are clipped to [low, high]; null: no clip."""


class Planning(Section):
    detector: Annotated[str, named(DETECTORS), When(reads.planned)] = "grams"
    """Finds planning tokens: grams, or my_module.my_detector."""


class TurnJudge(Section):
    """A turn signal of yours that is a coroutine (a judge over HTTP), awaited in the agent loops."""

    concurrency: Annotated[int, Field(ge=1), When(reads.judged)] = 8
    """Calls at a time in each agent loop worker."""
    deadline_s: Annotated[float, Field(gt=0), When(reads.judged)] = 30.0
    """Seconds that a call may take."""
    retries: Annotated[Count, When(reads.judged)] = 2
    """Further tries after a call that raised or took too long; then the trajectory's rewards are missing."""


class Curriculum(Section):
    """Weights in steps that measure gains: [first such step, last step], linear in between."""

    gain: Annotated[Pair, When(reads.gains)] = (1.0, 1.0)
    """Weight of normalised gains."""
    outcome: Annotated[Pair, When(reads.gains)] = (1.0, 1.0)
    """Weight of outcomes."""


class Algorithm(Section):
    prefix = "algorithm"

    adv_estimator: str = ADV_ESTIMATOR
    """info_gain is our estimator. With the name of a verl estimator (credit=verl), none of the keys below acts."""
    advantage_mode: Annotated[str, named(OUTCOME_OPERATORS)] = "grpo"
    """Outcome level: how a prompt's outcomes become an advantage per trajectory; or my_module.my_operator."""
    advantage_params: Annotated[
        Params, When(lambda s: s.algorithm.advantage_mode not in OUTCOME_OPERATORS)
    ] = {}
    """Handed to an outcome operator of yours."""
    info_gain_norm_mode: Annotated[str, named((AUTO, *MODES))] = AUTO
    """Turn level: how outcomes, turn rewards or values become an advantage per turn. auto: turn_gae with values where there
    are several turns, and the start says which and why; none: verl's GRPO; or my_module.my_mode."""
    turn_params: Params = {}
    """Options of the turn mode that have no key of their own (`verl-credit modes` lists them)."""
    turn_signal: Annotated[str, named(TURN_SIGNALS), When(reads.turn_level)] = AUTO
    """Turn reward: info_gain, tool_reward, column:NAME, none, my_module.f; auto: the mode's."""
    turn_signals: Annotated[
        dict[str, float] | None,
        Expected("null, or a mapping of turn signals to weights"),
        When(reads.turn_level),
    ] = None
    """Several turn signals with their weights, {info_gain: 1.0, tool_reward: 0.5}; replaces turn_signal."""
    turn_signal_params: Annotated[Params, When(lambda s: bool(reads.own_signals(s)))] = {}
    """Handed to turn signals of yours."""
    turn_ids: Literal["auto", "loop", "mask"] = AUTO
    """Whose turn a token belongs to: as the agent loop says (loop), or a run of policy tokens between observations (mask);
    auto: the loop, and the mask where a row has no turn_ids (agent-loops.md)."""
    turn_anchor: Annotated[str, named((AUTO, "observation", "state", "prefix")), When(reads.anchored)] = AUTO
    """State that a turn starts from (gigpo, hgpo, g2po, turn_values=state): the last observation, the name that the agent
    loop has for it (env_agent), or all tokens before the turn; auto: the name where there is one, else observation."""
    turn_values: Annotated[str | None, Expected(reads.VALUES), When(reads.values_read)] = None
    """Values for turn_gae: a regression on the prompt's other outcomes, the turn and what is observed, or verl's critic
    (turn-values.md)."""
    turn_values_replay: Annotated[Count, When(reads.fitted)] = 4
    """Earlier steps whose turns join each fit; saved with checkpoints."""
    turn_values_ridge: Annotated[float, Field(gt=0), When(reads.fitted)] = 0.03
    """Penalty of the fit's weights, on features of variance 1 and per turn."""
    turn_values_folds: Annotated[int, Field(ge=2), When(reads.fitted)] = 8
    """A step's prompts are split into so many folds, each valued by a fit that has not seen it."""
    turn_judge: TurnJudge = Field(default_factory=TurnJudge)
    tied_groups: Annotated[Literal["keep", "skip"], When(reads.ours)] = "keep"
    """A question whose rollouts all score the same keeps training on gains (released code), or is skipped."""
    transform_mode: Annotated[str, named((*TRANSFORMS, *CANONICAL))] = "none"
    """Token level: how a turn's advantage is spread over its tokens."""
    transform_params: Annotated[Params, When(reads.own_transform)] = {}
    """Handed to a transform or uncertainty of yours."""
    algorithm_mode: Annotated[
        str | None, Expected("null, or a dotted path to your own (my_module.my_algorithm)")
    ] = None
    """my_module.my_algorithm replaces the whole pipeline."""
    algorithm_params: Annotated[Params, When(lambda s: s.algorithm.algorithm_mode is not None)] = {}
    """Handed to an algorithm of yours."""
    uncertainty_kind: Annotated[str, named(UNCERTAINTY_KINDS), When(reads.uncertain)] = "surprisal"
    """Measure that sets a token's weight: surprisal, predictive_variance, shannon_entropy, or my_module.my_uncertainty."""
    gtpo: Gtpo = Field(default_factory=Gtpo)
    hicra: Hicra = Field(default_factory=Hicra)
    sepa: Sepa = Field(default_factory=Sepa)
    entropy_mask: EntropyMask = Field(default_factory=EntropyMask)
    canonical: Canonical = Field(default_factory=Canonical)
    planning: Planning = Field(default_factory=Planning)
    strategic_grams: Annotated[
        str | list[str] | None,
        Expected("a comma list, a list of phrases, or null"),
        When(lambda s: reads.planned(s) and s.algorithm.planning.detector == "grams"),
    ] = None
    """JSON list or comma list; null: the 18 published grams."""
    info_gain_type: Annotated[str, OneOf(tuple(INFO_GAIN_TYPES)), When(reads.gains)] = "prob_diff"
    """prob_diff (paper) or log_prob_diff (released code), of exp(mean log-prob of the gold answer's tokens); log_gap: the
    fall of log(.1 - mean log-prob), TRACE's."""
    info_gain_first_turn: Annotated[str, OneOf(tuple(FIRST_TURN)), When(reads.gains)] = "prior"
    """prior: the first turn's gain is measured against the bare prompt. none: the first turn has no gain (released code)."""
    info_gain_context: Annotated[Literal["observation", "call"], When(reads.gains)] = "observation"
    """observation: the context includes what the turn's search returned. call: it ends at the call (released code)."""
    info_gain_template: Annotated[
        str, Field(pattern=r"^auto$|\{answer\}"), Expected("auto, or a text with {answer}"), When(reads.gains)
    ] = AUTO
    """The text scored after each context: a text with {answer}; auto: the form of the row's answers, a tag or a box."""
    info_gain_prefix: Annotated[
        str,
        Predicate(lambda prefix: "{answer}" not in prefix),
        Expected('auto, the text between a context and algorithm.info_gain_template, or "" for none'),
        When(reads.gains),
    ] = AUTO
    """Written before the template. auto: what the chat template writes before an answer, as Qwen3's empty thought."""
    info_gain_aliases: Annotated[Literal["max", "mean", "first"], When(reads.gains)] = "max"
    """The probability of several gold answers: the highest, their mean, or the first answer's."""
    info_gain_scorer: Annotated[str, OneOf(SCORERS), When(reads.gains)] = AUTO
    """branch: answers join their rows' old_log_probs forward; rows: a row for every context; reference: rows, by the frozen
    reference; auto: branch where the model's layers and attention allow it (families.md), else rows."""
    info_gain_every: Annotated[int, Field(ge=1), When(reads.gains)] = 1
    """Gains are measured in every n-th step; the steps between are plain GRPO."""
    info_gain_warmup_steps: Annotated[Count, When(reads.gains)] = 0
    """Steps at the start without a turn level."""
    info_gain_curriculum: Curriculum = Field(default_factory=Curriculum)
    info_gain_on_error: Annotated[Literal["raise", "drop", "zero"], When(reads.gains)] = "raise"
    """A gain that cannot be scored stops the run, is missing (drop), or is 0; credit/gain/failed_rows counts them."""
    gamma: Annotated[
        Share, When(lambda s: not s.turn_estimator or "gamma" in s.algorithm.turn_mode.options)
    ] = 1.0
    """Discount of later turns' rewards."""
    lam: Annotated[
        Share | Literal["auto"], When(lambda s: s.turn_estimator and "lam" in s.algorithm.turn_mode.options)
    ] = AUTO
    """Weight of later turns' changes of value (turn_gae): 0 the turn's own alone, 1 the return minus the value. auto: 1, or
    what fits the values that info_gain_norm_mode=auto chose."""
    adv_rescale_alpha: Annotated[AtLeast0, When(reads.rescaled)] = 0.3
    """Weight of the gains beside the outcome (released recipe: 0.3, paper: 1)."""
    norm_adv_by_std_in_grpo: Annotated[bool, When(reads.divides)] = True
    """Divide outcomes by their group's standard deviation."""

    @property
    def signal_weights(self) -> dict[str, float]:
        """The turn signals and their weights; empty where nothing reads turn rewards."""
        if not self.takes_turn_rewards:
            return {}
        if self.turn_signals is not None:
            return dict(self.turn_signals)
        default = self.turn_mode.default_signal if self.turn_mode.reads_turn_rewards else "none"
        name = default if self.turn_signal == AUTO else self.turn_signal
        return {} if name == "none" else {name: 1.0}

    @property
    def takes_turn_rewards(self) -> bool:
        """The turn mode reads turn rewards, or an algorithm of the user's may."""
        return self.algorithm_mode is not None or self.turn_mode.reads_turn_rewards

    @property
    def turn_mode(self) -> TurnMode:
        """Raises ValueError for a dotted path that cannot be loaded."""
        return find_turn_mode(self.info_gain_norm_mode)

    @property
    def token_level(self) -> bool:
        """Advantages differ between tokens of a turn."""
        return self.transform_mode != "none" or self.algorithm_mode is not None

    @property
    def canonical_transform(self) -> bool:
        return self.transform_mode in CANONICAL

    @property
    def own_transform(self) -> bool:
        """The token transform is a user's dotted path."""
        return self.transform_mode not in TRANSFORMS and not self.canonical_transform

    @property
    def replaces_turns(self) -> bool:
        """Advantages are computed without turns."""
        return self.canonical_transform or self.algorithm_mode is not None
