"""Decides the keys of an adopted launch that depend on each other: loop, turns, lengths of rows, batches and budgets."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.config.engines import ENGINE, engine_named
from verl_credit.config.fit import DEFAULT, LOG_PROB, MODEL_LEN, MOST, REFERENCE
from verl_credit.config.keys import Algorithm, Search
from verl_credit.names import AGENTS, OUR_REWARD, SEPARATE_MODE, TURN_AGENT
from verl_credit.recipe.adopt.adoption import NULL, Adoption, shown, whole
from verl_credit.recipe.agent_loops import KEYS, LISTED, MULTI_TURN
from verl_credit.recipe.decisions import MODE as TRAINER
from verl_credit.recipe.older_verl import ACTOR, KEEPS_TURNS, MANAGER, PER_GPU, REF, ROLLOUT
from verl_credit.recipe.rules.engines import HAND_ON, OVERLONG, RESPONSE, UPDATE
from verl_credit.recipe.step_size import BATCH, MINI_BATCH
from verl_credit.recipe.unread import CHARACTERS

MODE, PROMPT = "algorithm.info_gain_norm_mode", "data.max_prompt_length"
SEARCHES, TOKENS, PAGES, CHARS = (
    f"search.{n}" for n in ("max_searches", "max_new_tokens", "topk", "max_page_chars")
)
OVERLONG_SECTION = OVERLONG.rpartition(".")[0]
REWARD, TEMPLATE = "reward.custom_reward_function.path", "algorithm.info_gain_template"
SIGNALS = ("algorithm.turn_signal", "algorithm.turn_signals")
ANSWERS = 64
"""Tokens for the gold answers that are scored after each context."""
ROUND = 256
QUESTION = 4096
"""Tokens of a prompt where a fork's max_prompt_length holds the whole dialogue."""
MANAGERS = ("naive", "dapo", "gdpo", "rate_limited", "remote")
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
STEPS, AHEAD = "trainer.total_training_steps", "trainer.v1.separate_async.num_warmup_batches"
UPDATES, AT_ONCE, STALE = (
    f"async_training.{name}"
    for name in ("trigger_parameter_sync_step", "require_batches", "staleness_threshold")
)
TOTAL = "rollout.total_rollout_steps"


def fit_to_turns(adoption: Adoption, given: Mapping[str, str], *, asynchronous: bool) -> None:
    if asynchronous:
        _fully_async(adoption, given)
    _rows_of_forks(adoption, given)
    many = _loop(adoption)
    if many and MODE not in adoption.given:
        mode = Algorithm.model_fields["info_gain_norm_mode"].default
        adoption.put(
            MODE, mode, "each turn gets its own credit, and the start says which; none: your outcomes alone"
        )
    if not many and (mode := adoption.given.pop(MODE, None)):
        adoption.drop(MODE, mode, "there is one turn, because no tool and no search is named")
    if (name := adoption.given.get(ENGINE)) and (untried := engine_named(name).untried):
        adoption.notes.append(f"{ENGINE}={name}: {untried}")
    _reward(adoption, many)
    _batches(adoption)
    _budgets(adoption, many)


def _fully_async(adoption: Adoption, given: Mapping[str, str]) -> None:
    """verl's older asynchronous trainer counts prompts until the weights are handed on, as a batch of the v1 trainer."""
    adoption.put(TRAINER, SEPARATE_MODE, "rollouts on devices of their own, with turns")
    if BACKEND not in adoption.given:
        adoption.put(BACKEND, "nccl", "that trainer's default, which hands weights to other devices")
    updates, batches = (
        whole(key, given.get(key, default)) for key, default in ((UPDATES, "4"), (AT_ONCE, "1"))
    )
    batch = adoption.count(MINI_BATCH, 256) * updates * batches
    old = f"{UPDATES}={updates}, {AT_ONCE}={batches}"
    adoption.put(BATCH, batch, "the prompts between two hand-overs of weights", old=old)
    if total := given.get(TOTAL):
        adoption.put(
            STEPS,
            max(whole(TOTAL, total) // max(batch, 1), 1),
            "steps of a batch each",
            old=f"{TOTAL}={total}",
        )
    if stale := given.get(STALE):
        adoption.put(AHEAD, stale, "the share of a batch by which rollouts run ahead", old=f"{STALE}={stale}")
    counted = (UPDATES, AT_ONCE, TOTAL, STALE)
    adoption.dropped = [change for change in adoption.dropped if change.old.partition("=")[0] not in counted]


def _rows_of_forks(adoption: Adoption, given: Mapping[str, str]) -> None:
    """Forks count a turn's tokens in max_response_length and the dialogue's in max_prompt_length; verl 0.9.1 has prompt and
    dialogue, where what tools return counts, too."""
    steps, turns = adoption.given.pop("env.max_steps", None), adoption.given.pop("max_turns", None)
    environment = adoption.given.pop("env.env_name", "search")
    start, observation = (adoption.given.pop(f"data.max_{n}_length", None) for n in ("start", "obs"))
    if steps is None and turns is None:
        return
    if environment != "search":
        why = "this project has no such environment; name your tools in multi_turn.tool_config_path"
        adoption.drop("env.env_name", environment, why)
        return
    name, value = ("max_turns", turns or "") if steps is None else ("env.max_steps", steps)
    # Search-R1 counts the turns that search, and lets one more answer.
    searches = max(whole(name, value) - (not observation), 0)
    adoption.put(SEARCHES, searches, "turns that may search; one more answers", old=f"{name}={value}")
    turn = adoption.number(RESPONSE, 512)
    adoption.put(TOKENS, turn, "that key counted one turn", old=f"{RESPONSE}={turn}")
    if observation:
        pages = adoption.count(PAGES, Search.model_fields["topk"].default)
        result = whole("data.max_obs_length", observation)
        why = f"{pages} pages together, {CHARACTERS} characters a token"
        adoption.put(CHARS, result * CHARACTERS // pages, why, old=f"data.max_obs_length={observation}")
    else:
        pages = adoption.count(PAGES, Search.model_fields["topk"].default)
        result = pages * Search.model_fields["max_page_chars"].default // CHARACTERS
    row = (searches + 1) * turn + searches * result
    adoption.put(RESPONSE, row, "all turns and what the searches return")
    if start:
        adoption.put(
            PROMPT, start, "that key counted the whole dialogue", old=f"data.max_start_length={start}"
        )
    elif (dialogue := adoption.number(PROMPT)) > QUESTION:
        adoption.put(PROMPT, QUESTION, "that key counted the whole dialogue", old=f"{PROMPT}={dialogue}")
    adoption.put(
        REWARD,
        OUR_REWARD,
        "the fork's exact match of <answer> stands in its own code",
    )
    if "search.url" not in adoption.given:
        adoption.notes.append(
            "search.url is not given: the address of a server, verl-credit-retriever serve or Search-R1's"
        )


def _loop(adoption: Adoption) -> bool:
    """Has a rollout several turns? Chooses the agent loop, and the tokens of a turn."""
    tools = [f"{MULTI_TURN}.{key}" for key in KEYS if adoption.has(f"{MULTI_TURN}.{key}")]
    searches, loop = adoption.number(SEARCHES), adoption.given.get(DEFAULT)
    if loop is not None and loop not in AGENTS:
        adoption.notes.append(f"{DEFAULT}={loop}: {KEEPS_TURNS}")
        if not adoption.has(LISTED):
            adoption.notes.append(f"{LISTED} is not given: the file that lists {loop}")
        return True
    if adoption.has(LISTED):
        adoption.notes.append(
            f"{LISTED}: a row whose column agent_name names one of these loops takes it; {KEEPS_TURNS}"
        )
    if tools and not searches:
        adoption.put(
            DEFAULT,
            TURN_AGENT,
            f"it calls the tools of {tools[0].rpartition('.')[2]} and says which turn is whose",
        )
        adoption.notes.append(
            f"{tools[0]}: the classes that it names have to be importable; the package of verl 0.9.1 has no tool classes"
        )
        _turns(adoption)
        return True
    if not searches:
        adoption.given.pop(DEFAULT, None)
        adoption.notes.append(
            "one turn: no tool and no search is named, so that there is no turn to give credit to"
        )
    return bool(searches)


def _turns(adoption: Adoption) -> None:
    turns, response = adoption.number(MOST), adoption.number(RESPONSE, 512)
    if turns:
        why = f"{RESPONSE} / {turns} turns: every turn fits; verl lets one fill the response, which null for the turns keeps"
        adoption.put(TOKENS, max(response // turns, 1), why, old=f"{MOST}={turns}")


def _reward(adoption: Adoption, many: bool) -> None:
    name = adoption.given.get(f"{MANAGER}.name")
    own = adoption.given.get(f"{MANAGER}.source", "register") != "register"
    if name and not own and (name not in MANAGERS or (many and name not in HAND_ON)):
        why = (
            "it does not hand the loop's record to the reward function"
            if name in MANAGERS
            else "verl 0.9.1 has none"
        )
        adoption.put(f"{MANAGER}.name", "naive", why, old=f"{MANAGER}.name={name}")
        for key in [key for key in adoption.given if key.startswith(OVERLONG_SECTION)]:
            adoption.drop(key, adoption.given[key], "the manager naive knows no penalty for long rows")
    if not adoption.has(REWARD) and not own:
        adoption.notes.append(
            "no reward function is given: verl's own score for each row's data_source is the outcome (ours, exact match of "
            f"an answer: reward.custom_reward_function.path={OUR_REWARD})"
        )
    scored = many and adoption.given.get(MODE) != "none" and not {*SIGNALS} & adoption.given.keys()
    if scored and TEMPLATE not in adoption.given and adoption.given.get(REWARD) != OUR_REWARD:
        adoption.notes.append(
            f"{TEMPLATE} is not given: each turn is scored by the probability of <answer>GOLD</answer>, unless the rows' "
            f"answers have a form; write it as your reward reads an answer, for example {TEMPLATE}='#### {{answer}}'"
        )


def _batches(adoption: Adoption) -> None:
    batch, mini = adoption.count(BATCH, 1024), adoption.count(MINI_BATCH, 256)
    if batch % mini:
        fitting = next(n for n in range(min(mini, batch), 0, -1) if batch % n == 0)
        why = f"prompts of an update, which divide {BATCH}={batch}"
        adoption.put(MINI_BATCH, fitting, why, old=f"{MINI_BATCH}={mini}")
    devices = adoption.count("trainer.n_gpus_per_node", 8) * adoption.count("trainer.nnodes", 1)
    for key, now in PER_GPU.items():
        text = adoption.given.pop(key, NULL)
        if text.isdigit() and now not in adoption.given:
            rows = max(int(text) // devices, 1)
            adoption.put(now, rows, f"rows of one GPU, of {devices}", old=shown(key, text))


def _budgets(adoption: Adoption, many: bool) -> None:
    """Raises a micro-batch's tokens to the longest row and the answers after it; drops an engine's length below a row."""
    row = adoption.number(PROMPT, 512) + adoption.number(RESPONSE, 512)
    if (length := adoption.number(MODEL_LEN)) and length < row:
        adoption.drop(MODEL_LEN, str(length), f"a row has {row} tokens; auto is the longest row")
    if not adoption.is_on(f"{ACTOR}.use_dynamic_bsz"):
        return
    turns = (adoption.number(SEARCHES) or adoption.number(MOST, 1) or 1) + 1
    answers = turns * ANSWERS if many else 0
    _budget(adoption, UPDATE, adoption.number(UPDATE, 16384), row, "the longest row")
    update = adoption.number(UPDATE, 16384)
    _budget(
        adoption,
        LOG_PROB,
        adoption.number(LOG_PROB, update),
        row + answers,
        "the longest row and the answers scored after it",
    )
    if adoption.is_on(f"{ACTOR}.use_kl_loss") and adoption.is_on(f"{REF}.log_prob_use_dynamic_bsz", True):
        _budget(adoption, REFERENCE, adoption.number(REFERENCE, update), row, "the longest row")


def _budget(adoption: Adoption, key: str, tokens: int, needed: int, what: str) -> None:
    if tokens < needed:
        adoption.put(key, -(-needed // ROUND) * ROUND, f"{what}: {needed} tokens", old=f"{key}={tokens}")
