"""Decides the keys of an adopted launch that depend on each other: loop, turns, lengths of rows, batches and budgets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from contextlib import suppress

from verl_credit.config.engines import ENGINE, engine_named
from verl_credit.config.fit import DEFAULT, LOG_PROB, MODEL_LEN, MOST, REFERENCE
from verl_credit.config.keys import Algorithm, Environment, Search
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ConfigError
from verl_credit.names import AGENTS, ENV_AGENT, OUR_REWARD, SEPARATE_MODE, TURN_AGENT
from verl_credit.recipe.adopt.adoption import NULL, Adoption, shown, value_of, whole
from verl_credit.recipe.adopt.deciding import (
    AHEAD,
    AT_ONCE,
    STALE,
    STEPS,
    TOTAL,
    TURNS,
    UPDATES,
    decides,
    means_turns,
)
from verl_credit.recipe.adopt.deciding import REWARD as REWARD_KEYS
from verl_credit.recipe.adopt.entry import is_fully_async, is_one_step_off
from verl_credit.recipe.agent_loops import KEYS, LISTED, MULTI_TURN, loops_in
from verl_credit.recipe.decisions import MODE as TRAINER
from verl_credit.recipe.older_verl import (
    ACTOR,
    COUNTS_ROWS,
    INSTEAD,
    KEEPS_TURNS,
    MANAGER,
    OWN_ENVIRONMENT,
    PER_GPU,
    REF,
    ROLLOUT,
)
from verl_credit.recipe.rules.engines import HAND_ON, OVERLONG, RESPONSE, UPDATE
from verl_credit.recipe.step_size import BATCH, EACH, MINI_BATCH
from verl_credit.recipe.unread import CHARACTERS

MODE, PROMPT = "algorithm.info_gain_norm_mode", "data.max_prompt_length"
SEARCHES, TOKENS, PAGES, CHARS = (
    f"search.{n}" for n in ("max_searches", "max_new_tokens", "topk", "max_page_chars")
)
MAX_STEPS, SEEN, WINDOW = (f"environment.{n}" for n in ("max_steps", "max_chars", "window"))
OVERLONG_SECTION = OVERLONG.rpartition(".")[0]
ESTIMATOR, PARAMS = "algorithm.adv_estimator", "algorithm.turn_params"
DDOF = f"{PARAMS}.ddof"
DEVICES = ("trainer.n_gpus_per_node", "trainer.nnodes")
STEPS_OF, ENVIRONMENT, HISTORY = "env.max_steps", "env.env_name", "env.history_length"
ADAPTERS = {"minigrid": "MiniGrid-", "gymnasium": "(FrozenLake|FrozenLake8x8|Taxi|CliffWalking|Blackjack)-v"}
"""Our adapter of an environment, by what its name begins with."""
PREPARE = (
    "a row needs the seed of its environment: `verl-credit prepare env` writes it (docs/environments.md). The fork's first "
    "environment has the seed env.seed, and the first held-out one env.seed + 1000"
)
OBSERVED = "data.max_obs_length"
FORKS = (STEPS_OF, "max_turns", ENVIRONMENT, "do_search", "data.max_start_length", OBSERVED)
"""Keys of forks from which the lengths of a row and its turns are made."""
ONE_TURN = "there is one turn, because no tool and no search is named"
NO_KWARGS = "only the manager dapo reads these; those of your function are reward.custom_reward_function.reward_kwargs"
REWARD, TEMPLATE = "reward.custom_reward_function.path", "algorithm.info_gain_template"
SIGNALS = ("algorithm.turn_signal", "algorithm.turn_signals")
ANSWERS = 64
"""Tokens for the gold answers that are scored after each context."""
ROUND = 256
QUESTION = 4096
"""Tokens of a prompt where a fork's max_prompt_length holds the whole dialogue."""
MANAGERS = ("naive", "dapo", "gdpo", "rate_limited", "remote")
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"


def fit_to_turns(
    adoption: Adoption, given: Mapping[str, str], entry: str, unknown: Set[str] = frozenset()
) -> None:
    """``given``: the launch's own keys, before they were translated. ``entry``: the module that it starts. ``unknown``: the
    launch's keys whose values are not known."""
    if is_fully_async(entry):
        _fully_async(adoption, given)
    elif is_one_step_off(entry):
        _own_devices(adoption)
    asked = not _rows_of_forks(adoption, given, unknown)
    many = _loop(adoption)
    if not many and asked:
        _no_turns(adoption, given)
    if many and MODE not in adoption.given:
        mode = Algorithm.model_fields["info_gain_norm_mode"].default
        adoption.put(
            MODE, mode, "each turn gets its own credit, and the start says which; none: your outcomes alone"
        )
    if not many:
        for key in [key for key in adoption.given if key.startswith((MODE, f"{PARAMS}."))]:
            if adoption.given[key] != "none":
                adoption.drop(key, adoption.given[key], ONE_TURN, lost=False)
    mode = "turn-group-v1d" if {*SIGNALS} & adoption.given.keys() else ""  # the default's beside a signal
    mode = adoption.given.get(MODE, "").replace("auto", mode)
    population = mode in MODES and MODES[mode].options.get("ddof") == 0 and DDOF not in adoption.given
    if population and given.get(ESTIMATOR) in ("grpo", "grpo_vectorized"):
        why = "verl's grpo divides outcomes by the sample's std, and now the mode divides its gains so, too"
        adoption.put(DDOF, 1, why)
    if (name := adoption.given.get(ENGINE)) and (untried := engine_named(name).untried):
        adoption.notes.append(f"{ENGINE}={name}: {untried}")
    _reward(adoption, many)
    _batches(adoption, {*given} | unknown)
    _budgets(adoption, many)


def _own_devices(adoption: Adoption) -> None:
    adoption.put(TRAINER, SEPARATE_MODE, "rollouts on devices of their own, with turns")
    if BACKEND not in adoption.given:
        adoption.put(BACKEND, "nccl", "that trainer's default, which hands weights to other devices")
    for name, default in (("nnodes", 1), ("n_gpus_per_node", 8)):
        if (key := f"{ROLLOUT}.{name}") not in adoption.given and adoption.known(key):
            adoption.put(key, default, "that trainer's default")


def _fully_async(adoption: Adoption, given: Mapping[str, str]) -> None:
    """verl's older asynchronous trainer counts prompts until the weights are handed on, as a batch of the v1 trainer."""
    _own_devices(adoption)
    updates, batches = (
        whole(key, given.get(key, default)) for key, default in ((UPDATES, "4"), (AT_ONCE, "1"))
    )
    batch = adoption.count(MINI_BATCH, 256) * updates * batches
    if BATCH in adoption.chosen:
        batch = adoption.count(BATCH, 1)
    elif adoption.known(MINI_BATCH, UPDATES, AT_ONCE):
        old = f"{UPDATES}={updates}, {AT_ONCE}={batches}"
        adoption.put(BATCH, batch, "the prompts between two hand-overs of weights", old=old)
    else:
        why = f"{MINI_BATCH} times {UPDATES} times {AT_ONCE}, and one of them is not known"
        adoption.lose(BATCH, why, (BATCH,))
    total = None if STEPS in adoption.chosen else given.get(TOTAL)
    if total and not adoption.known(BATCH):
        adoption.lose(STEPS, f"{TOTAL}={total} counts prompts, and {BATCH} is not known", (STEPS,))
    elif total:
        steps = max(whole(TOTAL, total) // max(batch, 1), 1)
        adoption.put(STEPS, steps, "steps of a batch each", old=f"{TOTAL}={total}")
    if (stale := given.get(STALE)) and AHEAD not in adoption.chosen:
        adoption.put(AHEAD, stale, "the share of a batch by which rollouts run ahead", old=f"{STALE}={stale}")
    counted = (UPDATES, AT_ONCE, TOTAL, STALE)
    adoption.dropped = [change for change in adoption.dropped if change.old.partition("=")[0] not in counted]


def _rows_of_forks(adoption: Adoption, given: Mapping[str, str], unknown: Set[str]) -> bool:
    """Forks count a turn's tokens in max_response_length and the dialogue's in max_prompt_length; verl 0.9.1 has prompt and
    dialogue, where what tools return counts, too. Returns whether a fork's launch says why there is no search."""
    found = {key: adoption.given.pop(key) for key in FORKS if key in adoption.given}
    steps, turns, name = (found.get(key) for key in FORKS[:3])
    switch, start, observation = (found.get(key) for key in FORKS[3:])
    environment = name or ("search" if steps is None or "search.url" in adoption.given else "")
    if switch and switch.lower() == "false":
        for key, text in found.items():
            adoption.drop(
                key, text, "do_search=false: nothing is searched, so that there is one turn", lost=False
            )
        return True
    if environment.lower() != "search":
        if DEFAULT not in adoption.given and _is_adapted(adoption, environment):
            del found[ENVIRONMENT]
        if acts := adoption.given.get(DEFAULT) == ENV_AGENT:
            found.pop(STEPS_OF, None)
        for key, text in found.items():
            adoption.drop(key, text, OWN_ENVIRONMENT, lost=key == (ENVIRONMENT if name else STEPS_OF))
        if acts:
            _rows_of_environments(adoption, steps, given.get(HISTORY), unknown)
        return True
    open_turns = next((key for key in (STEPS_OF, "max_turns") if key in unknown), "")
    if steps is None and turns is None and not (open_turns and SEARCHES in adoption.given):
        missing = f"{open_turns} is not known" if open_turns else "max_turns is not given"
        for key, text in found.items():
            if key != ENVIRONMENT:
                adoption.drop(key, text, f"{missing}; {INSTEAD[key]}")
        return False
    if SEARCHES in adoption.given:
        searches = whole(SEARCHES, adoption.given[SEARCHES])
    else:
        key, value = ("max_turns", turns or "") if steps is None else (STEPS_OF, steps)
        # Search-R1 counts the turns that search, and lets one more answer.
        searches = max(whole(key, value) - (not (observation or OBSERVED in unknown)), 0)
        adoption.put(SEARCHES, searches, "turns that may search; one more answers", old=f"{key}={value}")
    adoption.put(REWARD, OUR_REWARD, "the fork's exact match of <answer> stands in its own code")
    if searches and "search.url" not in adoption.given:
        why = "it is not given: the address of a server, verl-credit-retriever serve or Search-R1's"
        adoption.lose("search.url", why, ("search.url",))
    pages = adoption.count(PAGES, Search.model_fields["topk"].default)
    if observation:
        result = whole(OBSERVED, observation)
        why = f"{pages} pages together, {CHARACTERS} characters a token"
        adoption.put(CHARS, result * CHARACTERS // pages, why, old=f"{OBSERVED}={observation}")
    else:
        result = pages * adoption.count(CHARS, Search.model_fields["max_page_chars"].default) // CHARACTERS
    _row(adoption, searches + 1, searches * result, "all turns and what the searches return")
    if start:
        adoption.put(
            PROMPT, start, "that key counted the whole dialogue", old=f"data.max_start_length={start}"
        )
    elif (dialogue := adoption.number(PROMPT)) > QUESTION:
        adoption.put(PROMPT, QUESTION, "that key counted the whole dialogue", old=f"{PROMPT}={dialogue}")
    return False


def _row(adoption: Adoption, turns: int, results: int, why: str) -> None:
    """``results``: the tokens of what tools or an environment return."""
    if adoption.known(RESPONSE):
        turn = adoption.number(RESPONSE, 512)
        adoption.put(TOKENS, turn, "that key counted one turn", old=f"{RESPONSE}={turn}")
        adoption.put(RESPONSE, turns * turn + results, why)


def _is_adapted(adoption: Adoption, name: str) -> bool:
    """Is it the name of an environment that an adapter of ours makes? Then the adapter is chosen."""
    for path, begin in ADAPTERS.items():
        if re.match(begin, name):
            adoption.put("environment.path", path, "our adapter makes it", old=f"{ENVIRONMENT}={name}")
            adoption.put("environment.kwargs.id", name, "its texts are those of the adapter")
            adoption.put(DEFAULT, ENV_AGENT, "a step of the environment is a turn")
            adoption.notes.append(PREPARE)
            return True
    return False


def _rows_of_environments(
    adoption: Adoption, steps: str | None, history: str | None, unknown: Set[str]
) -> None:
    """An environment of ours stands in for the fork's: so many steps, and rows that hold them."""
    if not adoption.has(REWARD):
        adoption.put(REWARD, OUR_REWARD, "the fork's reward stands in its own code")
    if steps is not None and MAX_STEPS not in adoption.given:
        adoption.put(MAX_STEPS, whole(STEPS_OF, steps), "turns of a rollout", old=f"{STEPS_OF}={steps}")
    elif STEPS_OF in unknown:
        adoption.lose(MAX_STEPS, f"{STEPS_OF} is not known", (MAX_STEPS,))
    if history is not None and WINDOW not in adoption.given:
        adoption.put(WINDOW, whole(HISTORY, history), "earlier steps in a prompt", old=f"{HISTORY}={history}")
        adoption.dropped = [one for one in adoption.dropped if one.old.partition("=")[0] != HISTORY]
    if WINDOW in adoption.given:  # a row is a step, there as here
        turn = adoption.number(RESPONSE, 512)
        adoption.put(TOKENS, turn, "that key counts one turn", old=f"{RESPONSE}={turn}")
        return
    if RESPONSE not in adoption.chosen and adoption.known(MAX_STEPS):
        turns = adoption.count(MAX_STEPS, Environment.model_fields["max_steps"].default)
        seen = adoption.count(SEEN, Environment.model_fields["max_chars"].default) // CHARACTERS
        _row(adoption, turns, (turns - 1) * seen, "all turns and what the environment answers")


def _loop(adoption: Adoption) -> bool:
    """Has a rollout several turns? Chooses the agent loop."""
    tools = [f"{MULTI_TURN}.{key}" for key in KEYS if adoption.has(f"{MULTI_TURN}.{key}")]
    searches, loop = adoption.number(SEARCHES), adoption.given.get(DEFAULT)
    if loop is None and adoption.has(LISTED):
        loop = _listed(adoption)
    if loop is not None and loop not in AGENTS:
        if not adoption.known(LISTED):
            adoption.drop(DEFAULT, loop, f"{LISTED}, the file that lists it, is not known")
            return False
        adoption.notes.append(f"{DEFAULT}={loop}: {KEEPS_TURNS}")
        if not adoption.has(LISTED):
            adoption.notes.append(f"{LISTED} is not given: the file that lists {loop}")
        return True
    if loop == ENV_AGENT:
        if DEFAULT in adoption.chosen and MAX_STEPS not in adoption.given and adoption.has(MOST):
            turns = adoption.given.pop(MOST)
            adoption.put(MAX_STEPS, turns, "turns of a rollout", old=f"{MOST}={turns}")
        return True
    if tools and not searches:
        why = f"it calls the tools of {tools[0].rpartition('.')[2]} and says which turn is whose"
        adoption.put(DEFAULT, TURN_AGENT, why)
        adoption.notes.append(
            f"{tools[0]}: the classes that it names have to be importable; the package of verl 0.9.1 has no tool classes"
        )
        return True
    if not searches and loop is not None:
        adoption.drop(
            DEFAULT, loop, "no tool and no search is named, which it would call", lost=loop == TURN_AGENT
        )
    return bool(searches)


def _listed(adoption: Adoption) -> str | None:
    """The agent loop of rows that name none: the file's only loop. A file that cannot be read is refused later."""
    path, names = adoption.given[LISTED], tuple[str, ...]()
    with suppress(ConfigError):
        names = loops_in(value_of(LISTED, path))
    adoption.notes.append(
        f"{LISTED}: a row whose column agent_name names one of these loops takes it; {KEEPS_TURNS}"
    )
    if len(names) == 1:
        adoption.put(DEFAULT, names[0], f"the only agent loop of {path}")
    elif len(names) > 1:
        why = f"{path} lists {', '.join(names)}, and rows that name none of them need one"
        adoption.lose(DEFAULT, why, (DEFAULT,))
        adoption.put(DEFAULT, names[0], f"the first agent loop of {path}")
    return adoption.given.get(DEFAULT)


def _no_turns(adoption: Adoption, given: Mapping[str, str]) -> None:
    """A launch with several turns loses them; one without is as verl has it."""
    off = given.get(f"{MULTI_TURN}.enable", "").lower() == "false"
    several = [
        shown(key, text)
        for key, text in given.items()
        if means_turns(key) and decides(key, text) and not (off and key.startswith(MULTI_TURN))
    ]
    adoption.notes.append(
        "one turn: no tool and no search is named, so that there is no turn to give credit to"
    )
    if several:
        why = f"your launch has several turns ({', '.join(several[:3])}), and this recipe, without tools or search, has one"
        adoption.lose(f"{MULTI_TURN}.tool_config_path", why, TURNS)


def _reward(adoption: Adoption, many: bool) -> None:
    name = adoption.given.get(f"{MANAGER}.name")
    own = adoption.given.get(f"{MANAGER}.source", "register") != "register"
    if name and not own and (name not in MANAGERS or (many and name not in HAND_ON)):
        handed = "it does not hand the loop's record to the reward function"
        why = handed if name in MANAGERS else "verl 0.9.1 has none"
        adoption.put(f"{MANAGER}.name", "naive", why, old=f"{MANAGER}.name={name}")
        if name not in MANAGERS:
            key = f"{MANAGER}.name"
            adoption.lose(key, f"{name}: verl 0.9.1 has no such manager", {*REWARD_KEYS} - {key})
    if not own and adoption.given.get(f"{MANAGER}.name", "naive") != "dapo":
        for key in [key for key in adoption.given if key.startswith("reward.reward_kwargs.")]:
            text, penalty = adoption.given[key], key.startswith(OVERLONG_SECTION)
            why = "this manager knows no penalty for long rows" if penalty else NO_KWARGS
            adoption.drop(key, text, why, lost=key == OVERLONG and text.lower() == "true")
    if not adoption.has(REWARD) and not own:
        adoption.notes.append(
            "no reward function is given: verl's own score for each row's data_source is the outcome (ours, exact match of "
            f"an answer: reward.custom_reward_function.path={OUR_REWARD})"
        )
    scored = many and adoption.given.get(MODE) != "none" and not {*SIGNALS} & adoption.given.keys()
    scored = scored and adoption.given.get(DEFAULT) != ENV_AGENT  # whose gold answers are not read
    if scored and TEMPLATE not in adoption.given and adoption.given.get(REWARD) != OUR_REWARD:
        adoption.notes.append(
            f"{TEMPLATE} is not given: each turn is scored by the probability of <answer>GOLD</answer>, unless the rows' "
            f"answers have a form; write it as your reward reads an answer, for example {TEMPLATE}='#### {{answer}}'"
        )


def _batches(adoption: Adoption, named: Set[str]) -> None:
    """``named``: the launch's own keys, with values that are known or not."""
    n, by_rows = adoption.count(EACH, 1), not named.isdisjoint(COUNTS_ROWS)
    batch, mini = adoption.count(BATCH, 1024), adoption.count(MINI_BATCH, 256)
    prompts = mini / n if by_rows else mini
    if adoption.known(BATCH, MINI_BATCH, EACH) and (by_rows or batch % mini):
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        fitting = min(
            divisors, key=lambda d: max(d / prompts, prompts / d) if by_rows or d <= mini else math.inf
        )
        why = f"prompts of an update, which divide {BATCH}={batch}"
        if by_rows:
            updates = f"{batch * n / mini:g} updates a step, here {batch // fitting}"
            why += f"; your launch counts {mini} rows, {n} of a question, which is {updates}"
        adoption.put(MINI_BATCH, fitting, why, old=f"{MINI_BATCH}={mini}")
    known = adoption.known(*DEVICES)
    devices = adoption.count(DEVICES[0], 8) * adoption.count(DEVICES[1], 1)
    for key, now in PER_GPU.items():
        text = adoption.given.pop(key, NULL)
        if not text.isdigit():
            continue
        if now in adoption.given:
            adoption.drop(key, text, f"{now} is given, too", lost=False)
        elif known:
            rows = max(int(text) // devices, 1)
            adoption.put(now, rows, f"rows of one GPU, of {devices}", old=shown(key, text))
        else:
            why = "the number of GPUs is not known, and one row is always possible"
            adoption.put(now, 1, why, old=shown(key, text))


def _budgets(adoption: Adoption, many: bool) -> None:
    """Raises a micro-batch's tokens to the longest row and the answers after it; drops an engine's length below a row."""
    if not adoption.known(PROMPT, RESPONSE):
        return
    row = adoption.number(PROMPT, 512) + adoption.number(RESPONSE, 512)
    if (length := adoption.number(MODEL_LEN)) and length < row:
        adoption.drop(MODEL_LEN, str(length), f"a row has {row} tokens; auto is the longest row")
    if not adoption.is_on(f"{ACTOR}.use_dynamic_bsz"):
        return
    turns = (adoption.number(SEARCHES) or adoption.number(MOST, 1) or 1) + 1
    answers = turns * ANSWERS if many else 0
    _budget(adoption, UPDATE, adoption.number(UPDATE, 16384), row, "the longest row")
    update = adoption.number(UPDATE, 16384)
    budget, scored = adoption.number(LOG_PROB, update), "the longest row and the answers scored after it"
    _budget(adoption, LOG_PROB, budget, row + answers, scored)
    if adoption.is_on(f"{ACTOR}.use_kl_loss") and adoption.is_on(f"{REF}.log_prob_use_dynamic_bsz", True):
        _budget(adoption, REFERENCE, adoption.number(REFERENCE, update), row, "the longest row")


def _budget(adoption: Adoption, key: str, tokens: int, needed: int, what: str) -> None:
    if tokens < needed:
        adoption.put(key, -(-needed // ROUND) * ROUND, f"{what}: {needed} tokens", old=f"{key}={tokens}")
