"""Outcome and token level in a configuration: what is refused and why, what nothing reads, what the presets set."""

from copy import deepcopy
from functools import cache
from importlib.resources import files

import pytest
import yaml
from omegaconf import OmegaConf

from kit.settings import numbers
from verl_credit.config.compose import RECIPES, load_config
from verl_credit.config.keys import CANONICAL, Algorithm, read_section
from verl_credit.config.rules import validate
from verl_credit.config.settings import CreditSettings
from verl_credit.config.unread import unused
from verl_credit.credit.plugins import TransformSpec, UncertaintySpec
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.errors import ConfigError

NUMBERS = numbers(Algorithm)
LOSS = "actor_rollout_ref.actor.policy_loss"
PENALTY = "reward.custom_reward_function.reward_kwargs.format_penalty"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
ROWS = "algorithm.info_gain_scorer=rows"  # the branch scorer needs the forward that bypass mode saves
ALONE = ("algorithm.info_gain_norm_mode=none", f"{LOSS}.dynamic_clip=false")  # no turn mode
ENTROPY = "algorithm.uncertainty_kind=shannon_entropy"
FACTORIAL = {  # the eight conditions C1 to C8, in order: two outcome operators, four token levels
    "grpo_nostd": ("grpo", "none"),
    "grpo_gtpo": ("grpo", "gtpo"),
    "grpo_gtpo_hicra": ("grpo", "gtpo_hicra"),
    "grpo_gtpo_sepa": ("grpo", "gtpo_sepa"),
    "maxrl": ("maxrl", "none"),
    "maxrl_gtpo": ("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": ("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": ("maxrl", "gtpo_sepa"),
}
TURN_PRESETS = ("paper", "released")
PRESETS = (*FACTORIAL, "grpo", "grpo_gtpo_sepa_hicra", "maxrl_gtpo_sepa_hicra", *TURN_PRESETS)

own_outcome = own_algorithm = own_detector = own_uncertainty = lambda context: context
by_parts = TransformSpec("by_parts")
whole_distributions = UncertaintySpec("whole_distributions", own_uncertainty, needs_distributions=True)


def by_episode(context): ...  # reads the advantages of outcomes only


def by_turn(context): ...


by_turn.uses_turn_advantages = True


def gives_a_number():
    return 3


def mine(name: str) -> str:
    return f"{__name__}.{name}"


@cache
def composed(*overrides):
    return load_config("lab", list(overrides))


def check(*overrides):
    """Composed once; a list of overrides as on the command line, ``algorithm.`` left out of the keys that need it."""
    config = deepcopy(composed())
    OmegaConf.set_struct(config, True)
    for override in overrides:
        key, _, value = override.partition("=")
        if not key.startswith(("algorithm.", "actor_rollout_ref.", "reward.")):
            key = f"algorithm.{key}"
        OmegaConf.update(config, key, yaml.safe_load(value), force_add="_params" in key)
    validate(config)
    return config


CLIP_OFF = f"{LOSS}.dynamic_clip=false"
VERLS = ("adv_estimator=grpo", CLIP_OFF)
OWN = f"algorithm_mode={mine('own_algorithm')}"
# fmt: off
REFUSED = [  # (overrides, key and value as said, what to do as said)
    # names and dotted paths
    (["advantage_mode=maxlr"], "algorithm.advantage_mode='maxlr'", "did you mean maxrl?"),
    (["advantage_mode=null"], "algorithm.advantage_mode=None", "grpo, maxrl, reinforce_pp, or a dotted"),
    (["transform_mode=gtpo_spea"], "algorithm.transform_mode='gtpo_spea'", "did you mean gtpo_sepa?"),
    (["transform_mode=x"], "algorithm.transform_mode='x'", "gtpo_canonical, grpo_s, or a dotted path"),
    (["uncertainty_kind=suprisal"], "algorithm.uncertainty_kind='suprisal'", "did you mean surprisal?"),
    (["planning.detector=gram"], "algorithm.planning.detector='gram'", "did you mean grams?"),
    (["tied_groups=drop"], "algorithm.tied_groups='drop'", "accepted are keep, skip"),
    (["sepa.schedule=cosine"], "algorithm.sepa.schedule='cosine'", "accepted are linear, auto"),
    (["sepa.ramp_from=end"], "algorithm.sepa.ramp_from='end'", "accepted are start, gate"),
    (["canonical.population=each"], "algorithm.canonical.population='each'", "accepted are polarity, all, joint"),
    (["advantage_mode=no_such.f"], "algorithm.advantage_mode='no_such.f'", "cannot import 'no_such'"),
    (["transform_mode=math.no"], "algorithm.transform_mode='math.no'", "module 'math' has no 'no'"),
    (["transform_mode=math.pi"], "algorithm.transform_mode='math.pi'", "expected a function or a spec"),
    ([f"transform_mode={mine('gives_a_number')}"], "gives_a_number' gave a int", "expected a TransformSpec"),
    (["uncertainty_kind=math.no"], "algorithm.uncertainty_kind='math.no'", "has no 'no'"),
    ([f"uncertainty_kind={mine('whole_distributions')}"], "whole_distributions'", "precomputed_entropy holds"),
    (["planning.detector=math.pi"], "algorithm.planning.detector='math.pi'", "expected a function"),
    (["algorithm_mode=x", *ALONE], "algorithm.algorithm_mode='x'", "a dotted path such as"),
    # an algorithm replaces everything; verl's own estimators read none of it
    ([OWN], "algorithm.info_gain_norm_mode=turn-group-v1d would do nothing", "set it to none"),
    ([OWN, *ALONE, "advantage_mode=maxrl"], "algorithm.advantage_mode=maxrl would do nothing", "set it to grpo"),
    ([OWN, *ALONE, "transform_mode=gtpo"], "algorithm.transform_mode=gtpo would do nothing", "set it to none"),
    *(([*VERLS, override], f"algorithm.{override} does nothing", "set algorithm.adv_estimator=info_gain")
      for override in ("advantage_mode=maxrl", "transform_mode=gtpo", OWN)),
    # outcome level
    *(([f"advantage_mode={outcome}", f"info_gain_norm_mode={mode}", CLIP_OFF],
       f"algorithm.advantage_mode={outcome} with algorithm.info_gain_norm_mode={mode}", "others: none, separate")
      for outcome in ("maxrl", "reinforce_pp", mine("own_outcome")) for mode in ("joint", "turn-group")),
    (["info_gain_norm_mode=turn-group-unbiased", "info_gain_first_turn=none"],
     "turn-group-unbiased with algorithm.info_gain_first_turn=none", "set info_gain_first_turn=prior"),
    (["advantage_mode=maxrl", f"{PENALTY}=0.5"], f"{PENALTY}=0.5", "set it to 0"),
    (["advantage_mode=maxrl", "use_kl_in_reward=true"], "algorithm.use_kl_in_reward=true", "use_kl_loss instead"),
    # token level
    *(([f"transform_mode={mode}", ENTROPY], f"{mode} shapes rewards itself, so that algorithm.info_gain", "to none")
      for mode in CANONICAL),
    *(([f"transform_mode={mode}", ENTROPY, *ALONE, "advantage_mode=maxrl"], "algorithm.advantage_mode=maxrl", "to grpo")
      for mode in CANONICAL),
    *(([f"transform_mode={mode}", *ALONE], mode, "uncertainty_kind=shannon_entropy (it is surprisal)")
      for mode in CANONICAL),
    ([ENTROPY, BYPASS, ROWS], "bypass_mode=true", "use surprisal or predictive_variance"),
    (["uncertainty_kind=token_entropy", BYPASS, ROWS], "bypass_mode=true", "use surprisal or predictive_variance"),
    (["transform_mode=gtpo_sepa", "sepa.steps=0"], "algorithm.sepa.steps=0", "give the steps of its ramp"),
    *(([f"canonical.entropy_clip={clip}"], "algorithm.canonical.entropy_clip=", "0 <= low < high")
      for clip in ("[2, 1]", "[-1, 1]", "[1]", "[0, 1, 2]", "5", "abc")),
    (["advantage_mode=maxrl", f"{PENALTY}=null"], f"{PENALTY}=None", "expected a number"),
    ([f"transform_mode={mine('by_episode')}"], "info_gain_norm_mode=turn-group-v1d would do nothing", "set it to none"),
    # planning
    (["planning.detector=anchors"], "algorithm.planning.model=None", "needs the folder of a sentence encoder"),
    (["planning.detector=anchors", "planning.model=/no"], "algorithm.planning.model=/no", "in Hugging Face format"),
    (["strategic_grams='let me,?!'"], "algorithm.strategic_grams='let me,?!'", "expected a phrase of words"),
    (["strategic_grams=[3]"], "algorithm.strategic_grams=[3]", "a list of phrases"),
    # numbers
    *(([f"{key}={low - 1:g}"], f"{key}={low - 1:g}: expected", f"{low:g}") for key, low, _, _ in NUMBERS),
    *(([f"{key}=2"], f"{key}=2: expected", f"to {high:g}") for key, _, high, _ in NUMBERS if high < 2),
    *(([f"{key}=.inf"], f"{key}=inf: expected", "number of at least") for key, _, high, _ in NUMBERS if high > 2),
    *(([f"{key}=1.5"], f"{key}=1.5", "expected a whole number") for key, *_, whole in NUMBERS if whole),
]
# fmt: on


@pytest.mark.parametrize("overrides, said, remedy", REFUSED)
def test_what_cannot_work_is_refused_with_key_value_and_remedy(overrides, said, remedy):
    with pytest.raises(ConfigError) as error:
        check(*overrides)
    assert said in str(error.value) and remedy in str(error.value)


ACCEPTED = [
    *([f"transform_mode={mode}"] for mode in TRANSFORMS),
    *([f"transform_mode={mode}", "uncertainty_kind=entropy", *ALONE] for mode in CANONICAL),
    ["advantage_mode=maxrl", "info_gain_norm_mode=separate", CLIP_OFF, f"{PENALTY}=0"],
    ["advantage_mode=grpo", "info_gain_norm_mode=joint", CLIP_OFF, f"{PENALTY}=0.5", "use_kl_in_reward=true"],
    ["info_gain_norm_mode=turn-group-unbiased"],
    [f"advantage_mode={mine('own_outcome')}", "advantage_params={a: 1}"],
    [f"transform_mode={mine('by_episode')}", *ALONE],
    [f"transform_mode={mine('by_turn')}"],
    [f"transform_mode={mine('by_parts')}"],
    [OWN, *ALONE],
    [f"uncertainty_kind={mine('own_uncertainty')}"],
    ["uncertainty_kind=nll", BYPASS, ROWS],
    [f"planning.detector={mine('own_detector')}"],
    ["transform_mode=gtpo_sepa", "sepa.schedule=auto", "sepa.steps=0"],
    ["transform_mode=gtpo_hicra", 'strategic_grams="let me see, hold on"'],
    [*VERLS],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_what_works_is_accepted(overrides):
    check(*overrides)


def test_anchors_with_a_model_are_accepted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check("planning.detector=anchors", f"planning.model={tmp_path}")


CANON = ("transform_mode=gtpo_canonical", ENTROPY, *ALONE)
GRPO_S = ("transform_mode=grpo_s", ENTROPY, *ALONE)
# fmt: off
UNUSED = [  # (override, pipeline that does not read it, pipelines that do)
    ("gtpo.beta=0.5", [], (["transform_mode=gtpo"], ["transform_mode=entropy_mask"])),
    ("hicra.alpha=0.5", ["transform_mode=gtpo"], (["transform_mode=gtpo_hicra"],)),
    ("entropy_mask.rho=0.5", ["transform_mode=gtpo"], (["transform_mode=entropy_mask"],)),
    (ENTROPY, [], (["transform_mode=gtpo"], GRPO_S)),
    (f"planning.detector={mine('own_detector')}", ["transform_mode=gtpo"], (["transform_mode=gtpo_sepa"],)),
    ("strategic_grams=hold on", ["transform_mode=gtpo"], (["transform_mode=gtpo_hicra"],)),
    ("sepa.delay_steps=7", ["transform_mode=gtpo_hicra"], (["transform_mode=gtpo_sepa_amp"],)),
    ("gamma=0.9", ALONE, ([],)),
    ("info_gain_type=log_prob_diff", ALONE, ([],)),
    ("canonical.population=joint", GRPO_S, (CANON,)),
    ("canonical.entropy_clip=[0.0,1.0]", ["transform_mode=gtpo"], (GRPO_S, CANON)),
    ("advantage_params={a: 1}", ["advantage_mode=maxrl"], ([f"advantage_mode={mine('own_outcome')}"],)),
    ("transform_params={a: 1}", ["transform_mode=gtpo"], ([f"transform_mode={mine('by_parts')}"],)),
    ("algorithm_params={a: 1}", [], ([OWN, *ALONE],)),
]
# fmt: on


@pytest.mark.parametrize("override, without, readers", UNUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_key_that_nothing_reads_is_named(override, without, readers):
    key = override.partition("=")[0].removeprefix("algorithm.")
    (said,) = unused(check(*without, override))
    assert said.startswith(f"algorithm.{key}=")
    for overrides in readers:
        assert unused(check(*overrides, override)) == []


def test_our_defaults_leave_nothing_unread():
    assert unused(check()) == []
    assert (
        read_section(Algorithm, composed()).model_copy(update={"info_gain_template": "auto"}) == Algorithm()
    )


def flat(node, prefix=""):
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for name, value in node.items() for k, v in flat(value, f"{prefix}.{name}").items()}


def preset(name):
    config = composed(f"credit={name}")
    validate(config)
    return config, CreditSettings.from_config(config), flat(OmegaConf.to_container(config, resolve=True))


def test_these_are_all_presets():
    shipped = {path.name for path in (files(RECIPES) / "credit").iterdir()}
    assert shipped == {f"{name}.yaml" for name in PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_all_of_it_is_read(name):
    config, settings, _ = preset(name)
    assert unused(config) == [] and settings.preset == name and settings.preset_overrides == ()
    assert settings.banner().startswith(f"verl_credit: preset={name} | ")


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in TURN_PRESETS])
def test_presets_of_the_token_level_have_no_turns_in_them(name):
    config, settings, _ = preset(name)
    outcome, _, transform = name.partition("_")
    assert settings.turn_estimator and not settings.scores_gain and settings.ratio_level == "token"
    assert settings.algorithm.advantage_mode == outcome
    assert settings.algorithm.transform_mode == ("none" if transform in ("", "nostd") else transform)
    assert settings.algorithm.norm_adv_by_std_in_grpo == (not name.startswith("grpo_"))
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, settings.dynamic_clip) == (0.2, 0.28, False)


@pytest.mark.parametrize("name, promised", FACTORIAL.items())
def test_conditions_of_the_factorial_differ_in_their_two_factors_only(name, promised):
    """Beside those the preset's name, and for MaxRL the std switch that it does not read (test_token_estimator)."""
    _, settings, keys = preset(name)
    _, _, first = preset("grpo_nostd")
    assert (settings.algorithm.advantage_mode, settings.algorithm.transform_mode) == promised
    free = {".credit_preset", ".algorithm.advantage_mode", ".algorithm.transform_mode"}
    free |= {".algorithm.norm_adv_by_std_in_grpo"} if promised[0] == "maxrl" else set()
    assert {key for key in keys.keys() | first.keys() if keys.get(key) != first.get(key)} <= free


def test_what_differs_from_a_preset_is_said():
    settings = CreditSettings.from_config(
        composed("credit=maxrl_gtpo", "algorithm.gtpo.beta=0.3", "search.topk=4")
    )
    assert settings.preset_overrides == ("algorithm.gtpo.beta=0.3",)
    assert "preset=maxrl_gtpo (overridden: algorithm.gtpo.beta=0.3) | " in settings.banner()
    assert "outcome=maxrl | tokens=gtpo | uncertainty=surprisal beta=0.3" in settings.banner()
