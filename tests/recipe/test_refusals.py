"""What is refused before anything starts: each key by itself, asked of its declaration, and what does not go together."""

from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kit.recipes import check, copied, load_config
from kit.settings import numbers
from verl_credit.config.keys import CANONICAL, LOSS, OURS, VERLS, Algorithm, Lab, keys_of, read_section
from verl_credit.config.keys.section import choices
from verl_credit.credit.plugins import TransformSpec, UncertaintySpec
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.errors import ConfigError, unknown_key

SECTIONS = (*OURS, *VERLS, Lab)
KEYS = {key.name: key for section in SECTIONS for key in keys_of(section)}
RANGES = {key: (low, high, whole) for section in SECTIONS for key, low, high, whole in numbers(section)}


@cache
def good(section):
    values = read_section(section, load_config("lab")).model_dump()
    config = OmegaConf.create({} if section.prefix else values)
    if section.prefix:
        OmegaConf.update(config, section.prefix, values)
    return config


SECTION_OF = {key.name: section for section in reversed(SECTIONS) for key in keys_of(section)}


def refused(key, value):
    """The error of a section in which all is right but this value."""
    section = SECTION_OF[key]
    config = copied(good(section))
    OmegaConf.update(config, key, value)
    with pytest.raises(ConfigError) as caught:
        read_section(section, config)
    assert caught.value.key == key
    return caught.value


def test_a_refusal_is_written_with_key_value_and_what_is_accepted():
    def text(**fields):
        return str(ConfigError(key="a.b", **fields))

    names = ["grpo", "maxrl"]
    assert text(value="maxlr", accepted=names) == "a.b=maxlr (did you mean maxrl?): accepted are grpo, maxrl"
    beside = {"c.d": True, "e": None}
    assert text(value=1, beside=beside, accepted="set it to 0") == "a.b=1 with c.d=true, e=null: set it to 0"
    assert text(value="5", shown="'5'", accepted="expected a number") == "a.b='5': expected a number"
    unknown = unknown_key("a", "bc", ["bcd", "x"], 3)
    assert str(unknown) == "unknown key a.bc=3 (did you mean a.bcd?): accepted below a are bcd, x"
    assert (unknown.key, unknown.value, unknown.accepted) == ("a.bc", 3, ["bcd", "x"])
    assert str(refused("algorithm.gamma", "high")) == "algorithm.gamma='high': expected a number from 0 to 1"


def by_section(keys):
    """Parameters: the keys of a section among ``keys``, for every section that has some."""
    named = ((section.__name__, [k.name for k in keys_of(section) if k.name in keys]) for section in SECTIONS)
    return [pytest.param(names, id=name) for name, names in named if names]


def failures(keys, wrong_values, is_right):
    """Every wrong value that a section accepts, or refuses with another key or text."""
    found = []
    for key in keys:
        for value in wrong_values(key):
            try:
                error = refused(key, value)
            except (AssertionError, pytest.fail.Exception) as why:
                found.append(f"{key}={value!r}: {why}")
            else:
                found += [] if is_right(key, value, error) else [f"{key}={value!r} is refused with {error}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("keys", by_section(RANGES))
def test_a_number_is_a_number_in_its_range(keys):
    def wrong(key):
        low, high, whole = RANGES[key]
        return [
            *("abc", True, [], {}, float("inf"), float("nan")),
            *([low - 1] if low > float("-inf") else []),
            *([high + 1] if high < float("inf") else []),
            *([0] if low > 0 else []),
            *([1.5] if whole else []),
        ]

    def right(key, value, error):
        low, high, whole = RANGES[key]
        ends = [end for end in (low, high) if float("-inf") < low and end < float("inf")]
        kind = "expected a whole number" if whole else "expected a number"
        says_ends = all(f"{end:g}" in error.accepted for end in ends)
        return error.accepted.startswith(kind) and repr(value) in str(error) and says_ends

    assert failures(keys, wrong, right) == []


@pytest.mark.parametrize(
    "keys", by_section([k for k, key in KEYS.items() if choices(key.field.annotation, key.field.metadata)])
)
def test_a_name_is_one_of_those_that_are_declared(keys):
    def names(key):
        return choices(KEYS[key].field.annotation, KEYS[key].field.metadata)

    def right(key, value, error):
        return (error.value, error.accepted) == (value, names(key))

    assert failures(keys, lambda key: ("another", None, 1, [names(key)[0]]), right) == []


@pytest.mark.parametrize(
    "keys", by_section([k for k, key in KEYS.items() if key.expected.startswith("true or false")])
)
def test_a_switch_is_true_or_false(keys):
    def right(key, value, error):
        return error.accepted.startswith("expected true or false")

    assert failures(keys, lambda key: (1, "yes", None), right) == []


WORDS = "expected auto, the text between a context and"
# fmt: off
DECLARED = [  # (key, value, what is accepted: all names, or a part of the sentence)
    ("algorithm.info_gain_norm_mode", None, "progress, turn_gae, or a dotted"),
    ("algorithm.info_gain_type", "diff", ["prob_diff", "log_prob_diff", "log_gap"]),
    ("algorithm.info_gain_scorer", None, ["auto", "branch", "rows", "reference"]),
    ("algorithm.info_gain_curriculum.gain", [1], "expected [first step, last step]"),
    ("algorithm.info_gain_curriculum.outcome", [0.5, -1], "at least 0"),
    ("algorithm.info_gain_template", "x", "a text with {answer}"),
    ("algorithm.info_gain_prefix", "{answer}", WORDS),
    ("algorithm.info_gain_prefix", None, WORDS),
    ("algorithm.advantage_mode", None, "grpo, rloo, low_baseline, half_negative, maxrl, reinforce_pp, or a dotted"),
    *(("algorithm.canonical.entropy_clip", clip, "0 <= low < high")
      for clip in ([2, 1], [-1, 1], [1], [0, 1, 2], 5, "abc")),
    (f"{LOSS}.dynamic_clip", "perhaps", "expected true or false"),
    ("evaluation.modes", ["beam"], "expected a list of ['greedy', 'sampled'], not empty"),
    ("evaluation.modes", 1, "expected a list"),
    ("run_dir", 7, "expected a folder's name"),
    ("trainer.default_local_dir", None, "expected a folder's name"),
    ("trainer.total_training_steps", 0, "or null"),
    ("search.url", 5, "expected an address"),
    ("search.url", [], "expected an address"),
    ("search.url", ["http://a", 5], "expected an address"),
    ("search.url", "localhost:8000", "address 'localhost:8000'; expected http://HOST:PORT"),
    ("search.token_env", 5, "expected the name of an environment variable"),
    ("search.token_env", "", "expected the name of an environment variable"),
    ("search.index_fingerprint", 12, "expected text"),
]
# fmt: on


@pytest.mark.parametrize("keys", by_section(dict.fromkeys(key for key, *_ in DECLARED)))
def test_a_value_that_a_key_does_not_accept_is_refused_with_what_it_does(keys):
    cases = [case for case in DECLARED if case[0] in keys]

    def right(key, value, error):
        (accepted,) = {str(said): said for k, v, said in cases if (k, v) == (key, value)}.values()
        said = error.accepted == accepted if isinstance(accepted, list) else accepted in error.accepted
        secret = key.startswith(("search.token", "search.url"))  # value as it may be shown
        return said and (isinstance(error.value, str) if secret else error.value == value)

    assert failures(keys, lambda key: [value for k, value, _ in cases if k == key], right) == []


def test_neither_a_token_in_the_wrong_place_nor_a_password_is_shown():
    for key, value, shown in (
        ("search.token_env", "sk-s3cret", "..."),
        ("search.url", ["ftp://me:s3cret@host"], "***@host"),
    ):
        error = refused(key, value)
        assert shown in error.value and shown in str(error)
        assert "s3cret" not in f"{error} {vars(error)}"


def test_a_number_that_verl_lets_be_absent_may_be():
    check("trainer.total_training_steps=null", "trainer.max_actor_ckpt_to_keep=null")


def own_outcome(rewards, params):
    return rewards


def own_algorithm(context):
    return context.logprobs_G


def own_uncertainty(context):
    return context.logprobs


def own_detector(token_ids_B_T, mask_B_T, decode):
    return mask_B_T


by_parts = TransformSpec("by_parts")
whole_distributions = UncertaintySpec("whole_distributions", own_uncertainty, needs_distributions=True)


def by_episode(context):  # reads the advantages of outcomes only
    rows = zip(context.episode_advantages, context.logprobs_G, strict=True)
    return [[advantage] * len(own) for advantage, own in rows]


def by_turn(context):
    return context.turn_advantages_G


by_turn.uses_turn_advantages = True


def gives_a_number():
    return 3


def mine(name: str) -> str:
    return f"{__name__}.{name}"


ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{role}" for role in ("rollout", "actor", "model"))
MODE, SCORER, ROWS, BRANCH = (
    "info_gain_norm_mode", "info_gain_scorer", "info_gain_scorer=rows", "info_gain_scorer=branch"
)  # fmt: skip
ATTENTION = f"{MODEL}.override_config.attn_implementation"
PENALTY = "reward.custom_reward_function.reward_kwargs.format_penalty"
REASONING = "reward.custom_reward_function.reward_kwargs.include_reasoning"
BYPASS = "rollout_correction.bypass_mode=true"  # the branch scorer needs the forward that it saves
CLIP_OFF = f"{LOSS}.dynamic_clip=false"
ALONE = (f"{MODE}=none", CLIP_OFF)  # no turn mode
VERLS_OWN = ("adv_estimator=grpo", *ALONE)
OWN, ENTROPY = f"algorithm_mode={mine('own_algorithm')}", "uncertainty_kind=shannon_entropy"
# fmt: off
RULES = [  # (overrides, the first one refused; a part of what is said of it)
    # names and dotted paths
    (["advantage_mode=maxlr"], "did you mean maxrl?"),
    (["transform_mode=gtpo_spea"], "did you mean gtpo_sepa?"),
    (["transform_mode=x"], "gtpo_canonical, grpo_s, or a dotted path"),
    (["uncertainty_kind=suprisal"], "did you mean surprisal?"),
    (["planning.detector=gram"], "did you mean grams?"),
    (["advantage_mode=no_such.f"], "cannot import 'no_such'"),
    (["transform_mode=math.no"], "module 'math' has no 'no'"),
    (["transform_mode=math.pi"], "expected a function or a spec"),
    ([f"transform_mode={mine('gives_a_number')}"], "gives_a_number' gave a int; expected a TransformSpec"),
    (["uncertainty_kind=math.no"], "has no 'no'"),
    ([f"uncertainty_kind={mine('whole_distributions')}"], "precomputed_entropy holds"),
    (["planning.detector=math.pi"], "expected a function"),
    (["algorithm_mode=x", *ALONE], "a dotted path such as"),
    # an algorithm replaces everything; verl's own estimators read none of it
    ([f"{MODE}=turn-group-v1d", OWN], "would do nothing; set it to none"),
    (["advantage_mode=maxrl", OWN, *ALONE], "would do nothing; set it to grpo"),
    (["transform_mode=gtpo", OWN, *ALONE], "would do nothing; set it to none"),
    *(([*VERLS_OWN, override], "would do nothing; leave algorithm.adv_estimator out .* or choose credit=verl")
      for override in ("advantage_mode=maxrl", "transform_mode=gtpo", "turn_signal=tool_reward", OWN)),
    (["adv_estimator=gae"], "leave algorithm.adv_estimator out .* or choose credit=verl"),
    # outcome level
    *(([f"advantage_mode={outcome}", f"{MODE}={mode}", CLIP_OFF], f"with algorithm.{MODE}={mode}: .* others: none, separate")
      for outcome in ("maxrl", "reinforce_pp", mine("own_outcome")) for mode in ("joint", "turn-group")),
    ([f"{PENALTY}=0.5", "advantage_mode=maxrl"], "divides by the mean outcome, .* set it to 0"),
    *(([f"{PENALTY}={value}", *more], "expected a number")
      for value in ("null", "abc", "inf", "[1]", "true") for more in ((), ("advantage_mode=maxrl",))),
    ([f"{REASONING}=true"], r"expected \$\{search.include_reasoning\}, so that loop and reward read"),
    (["use_kl_in_reward=true", "advantage_mode=maxrl"], "divides by the mean outcome, .*use_kl_loss instead"),
    # token level
    *(([f"{MODE}=turn-group-v1d", f"transform_mode={mode}", ENTROPY], f"{mode}: .* shapes rewards itself, .* set it to none")
      for mode in CANONICAL),
    *((["advantage_mode=maxrl", f"transform_mode={mode}", ENTROPY, *ALONE], f"{mode}: .* set it to grpo")
      for mode in CANONICAL),
    *((["uncertainty_kind=surprisal", f"transform_mode={mode}", *ALONE], f"{mode}: .*uncertainty_kind=shannon_entropy")
      for mode in CANONICAL),
    *(([kind, BYPASS, ROWS], "bypass_mode=true: .* use surprisal or predictive_variance")
      for kind in (ENTROPY, "uncertainty_kind=token_entropy")),
    (["sepa.steps=0", "transform_mode=gtpo_sepa"], "give the steps of its ramp"),
    ([f"{MODE}=turn-group-v1d", f"transform_mode={mine('by_episode')}"], "would do nothing; set it to none"),
    # planning
    (["strategic_grams='let me,?!'"], "expected a phrase of words"),
    (["strategic_grams=[3]"], "expected a string|a list of phrases"),
    # turn level
    (["info_gain_prefix='<answer>'"], "would be written twice"),
    (["info_gain_curriculum.gain=[1,0.5]", f"{MODE}=turn-group", CLIP_OFF], "turn-group: that mode normalises gains and"),
    ([f"{LOSS}.dynamic_clip=true", f"{MODE}=joint"], "only turn-group-v1d, turn-group-unbiased give turns a clip scale"),
    ([f"{LOSS}.dynamic_clip=true", "adv_estimator=grpo", f"{MODE}=none"], "with algorithm.adv_estimator=grpo"),
    (["search.max_searches=0"], f"with algorithm.{MODE}=turn-group-v1d: without a tool"),
    ([f"{ROLLOUT}.n=1"], "at least 2"),
    # sizes
    (["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=5"], "not a multiple of .*ppo_mini_batch_size=5"),
    (["data.max_response_length=30"], "cannot hold a turn of search.max_new_tokens=40"),
    ([f"{ACTOR}.ppo_max_token_len_per_gpu=400"], "cannot hold a row"),
    # scorers
    ([f"{ATTENTION}=sdpa", BRANCH], f"with algorithm.{SCORER}=branch: .* set .*=auto, or .*=rows"),
    ([f"{MODEL}.use_remove_padding=false"], "serves packed rows: set .*use_remove_padding=true"),
    *(([f"actor_rollout_ref.{role}.{inner}ulysses_sequence_parallel_size=2"], "attention over several ranks is not built")
      for role in ("actor", "ref") for inner in ("", "fsdp_config.")),
    ([f"{ACTOR}.strategy=megatron"], "built for and tested with verl's FSDP engine, whichever .* use fsdp2 or fsdp"),
    ([f"{ACTOR}.strategy=megatron", ROWS, f"{ATTENTION}=flash_attention_2"], "built for and tested with verl's FSDP engine"),
    ([BYPASS, BRANCH], "answers ride on the old_log_probs"),
    ([f"{MODEL}.use_fused_kernels=true"], "rows' places"),
    # rollouts
    ([f"{ROLLOUT}.name=sglang"], "trainer.device=cpu: sglang generates on cuda alone; set the engine to hf or vllm"),
    ([f"{ROLLOUT}.max_model_len=464", f"{ROLLOUT}.name=sglang", "trainer.device=cuda"], "and 1 that verl.* set it to 465"),
    ([f"{ROLLOUT}.name=trtllm"], "accepted are hf, vllm, sglang"),
    ([f"{ROLLOUT}.enable_rollout_routing_replay=true"], "verl's FSDP engine replays no routes"),
]
# fmt: on


def full(override):
    top, _, _ = override.partition("=")[0].partition(".")
    ours = {*Algorithm.model_fields, "use_kl_in_reward", "rollout_correction"}
    return f"algorithm.{override}" if top in ours else override


def checked(*overrides):
    """``algorithm.`` may be left out."""
    return check(*map(full, overrides))


@pytest.mark.parametrize("overrides, said", RULES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_cannot_work_together_is_refused_with_the_first_key_and_the_remedy(overrides, said):
    with pytest.raises(ConfigError, match=said) as caught:
        checked(*overrides)
    first = OverridesParser.create().parse_override(full(overrides[0]))
    assert (caught.value.key, caught.value.value) == (first.key_or_group, first.value())
    assert str(caught.value).startswith(f"{first.key_or_group}=") and caught.value.accepted


ACCEPTED = [
    *([f"transform_mode={mode}"] for mode in TRANSFORMS),
    *([f"transform_mode={mode}", "uncertainty_kind=entropy", *ALONE] for mode in CANONICAL),
    ["advantage_mode=maxrl", f"{MODE}=separate", CLIP_OFF, f"{PENALTY}=0"],
    ["search.include_reasoning=true"],
    [f"reward.custom_reward_function.path={__file__}", f"{REASONING}=true"],
    ["advantage_mode=grpo", f"{MODE}=joint", CLIP_OFF, f"{PENALTY}=0.5", "use_kl_in_reward=true"],
    [f"{MODE}=turn-group-unbiased"],
    [f"advantage_mode={mine('own_outcome')}", "+algorithm.advantage_params.a=1"],
    [f"transform_mode={mine('by_episode')}", *ALONE],
    [f"transform_mode={mine('by_turn')}"],
    [f"transform_mode={mine('by_parts')}"],
    [OWN, *ALONE],
    [f"uncertainty_kind={mine('own_uncertainty')}"],
    ["uncertainty_kind=nll", BYPASS, ROWS],
    [f"planning.detector={mine('own_detector')}"],
    ["transform_mode=gtpo_sepa", "sepa.schedule=auto", "sepa.steps=0"],
    ["transform_mode=gtpo_hicra", 'strategic_grams="let me see, hold on"'],
    [*VERLS_OWN],
    [ROWS, f"{ATTENTION}=sdpa", f"{MODEL}.use_fused_kernels=true"],
    [*ALONE, f"{ATTENTION}=sdpa"],  # nothing is scored
    ["info_gain_template=auto"],
    ["info_gain_prefix='So: '"],
    ["search.url=null"],
    ["search.url=[http://a:8000,http://b:8000/retrieve]"],
    ["search.token_env=RETRIEVER_TOKEN", "search.index_fingerprint=ab12"],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_what_works_is_accepted(overrides):
    checked(*overrides)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[f"{MODE}=joint"], ["adv_estimator=grpo", f"{MODE}=none"]])
def test_a_clip_that_would_have_no_scale_is_off_when_it_is_automatic(overrides):
    assert checked(*overrides).actor_rollout_ref.actor.policy_loss.dynamic_clip is False
    assert checked().actor_rollout_ref.actor.policy_loss.dynamic_clip is True
