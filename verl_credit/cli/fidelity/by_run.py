"""`verl-credit fidelity` through a run's own rollouts: its trainer starts again, loads the policy, and measures it.

Engine, agent loops, tools, search server and reward are the run's, so this needs the same machine as its training. Only
the lab has a quicker way (`fidelity.subject`).
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.cli.another_run import LOG, compose_run, own_folder, run_alone
from verl_credit.cli.fidelity.policies import QUESTION_FILES, Policy
from verl_credit.config.engines import engine_of
from verl_credit.config.fit import DEFAULT, reference_in_actor
from verl_credit.config.keys import AUTO
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.names import AGENT_NAME, MEASURE_MODE, OUR_REWARD
from verl_credit.recipe.agent_loops import FORMAT, MULTI_TURN, tools_given
from verl_credit.records.run.files import read_json_lines, write_text
from verl_credit.records.run.lock import LOCK, holder_is_gone
from verl_credit.records.run.progress_line import say_at_once
from verl_credit.records.run.state import deciding_keys
from verl_credit.study.fidelity.request import REQUEST, RESULT, ROLLOUTS, TABLE, Request, check_about
from verl_credit.study.fidelity.true_values import VALUES
from verl_credit.turns.rollout.tool_calls import NO_TOOL

DECIDES = ("search.", "reward.", "data.max_", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.")
"""The keys that, beside the weights, decide a rollout's continuation and its reward."""


def why_by_run(config: DictConfig, split: str = "train") -> str | None:
    """The reason why a policy of this run cannot be rolled out in this process; None where it can. Questions of a file
    outside of the lab's folder may not be the lab's."""
    if "lab" not in config:
        return "the run is not of the lab"
    own = {
        DEFAULT: (None, AGENT_NAME),
        **dict.fromkeys(tools_given(config), ()),
        FORMAT: (AUTO, NO_TOOL),  # the sampler reads Hermes' calls alone
        f"{MULTI_TURN}.max_user_turns": (None, 0),
        "reward.custom_reward_function.path": (OUR_REWARD,),
    }
    for key, ours in own.items():
        if (value := OmegaConf.select(config, key)) not in ours:
            return f"{key}={value}"
    if key := QUESTION_FILES.get(split):
        file = str(OmegaConf.select(config, key))
        return None if Path(file).is_relative_to(config.lab.dir) else f"{key}={file}"
    return None


def measure_policy(policy: Policy, request: Request, overrides: Sequence[str]) -> Mapping:
    """Measures a policy and prints its table. Returns its part of ``fidelity.json``. Raises as `run_alone`."""
    out = Path(request.out).resolve()
    folder, checkpoint = out / "run", policy.folder if policy.step else None
    of_policy = {"name": policy.name, "policy": str(policy.folder), "step": policy.step}
    request = replace(request, out=str(out), folder=str(Path.cwd()), **of_policy)
    if checkpoint is not None and not list(checkpoint.glob("actor/model_world_size_*")):
        why = "no shards of verl's (the twin writes none); expected --engine sampler"
        raise PreflightError(f"{checkpoint}/actor: {why}")
    if (folder / LOCK).exists() and not holder_is_gone(folder):
        raise PreflightError(f"{folder}: another measurement is going on there")
    shutil.rmtree(folder, ignore_errors=True)  # an earlier try; values and rollouts are stored elsewhere
    folder.mkdir(parents=True)
    fixed = {
        **own_folder(folder, checkpoint),
        "trainer.v1.trainer_mode": MEASURE_MODE,
        "trainer.save_freq": -1,
        # A value without some of its continuations would be another value.
        "faults.max_failed_rollouts": 0.0,
    }
    if not engine_of(policy.config).ours:
        # An engine without a seed per request begins with the same random numbers at every start.
        begun = sum(len(read_json_lines(out / name)) for name in (VALUES, ROLLOUTS))
        fixed["actor_rollout_ref.rollout.seed"] = request.seed + begun
    composed = compose_run(folder, policy.config, fixed, overrides, checkpoint)
    _check(composed, request)
    request = replace(request, about=_about(composed, checkpoint, request))
    check_about(out, request.about, continuations=request.continuations, seed=request.seed)
    write_text(folder / REQUEST, json.dumps(asdict(request), indent=1) + "\n")
    for name in (RESULT, TABLE):
        (out / name).unlink(missing_ok=True)
    log, mark = folder / LOG, f"fidelity {policy.name}"
    say_at_once(f"{mark}: through the run's own rollouts; Ray and verl say the rest in {log}")
    with _followed(log, mark):
        run_alone(folder, overrides, f"{policy.name} is not measured")
    print((out / TABLE).read_text().rstrip("\n"))
    return json.loads((out / RESULT).read_text())["policies"][0]


def _check(config: DictConfig, request: Request) -> None:
    model, reward = "actor_rollout_ref.model", config.reward.reward_model
    if config.actor_rollout_ref.rollout.full_determinism:
        use = "expected false: every continuation of a context would be the same text"
        raise ConfigError.of(config, "actor_rollout_ref.rollout.full_determinism", accepted=use)
    if reward.enable and not reward.enable_resource_pool:
        use = "expected reward.reward_model.enable_resource_pool=true: verl asks a model beside the actor in steps alone"
        raise ConfigError.of(config, "reward.reward_model.enable", accepted=use)
    if request.gradient and reference_in_actor(config):
        key = "lora_adapter_path" if OmegaConf.select(config, f"{model}.lora_adapter_path") else "lora_rank"
        use = "expected a policy without an adapter: --gradient is over all of its weights"
        raise ConfigError.of(config, f"{model}.{key}", accepted=use)


def _about(config: DictConfig, checkpoint: Path | None, request: Request) -> dict:
    """The inputs on which the values depend: weights, data, and the keys that decide rollouts and rewards."""
    rollout = config.actor_rollout_ref.rollout
    decides = {key: text for key, text in deciding_keys(config).items() if key.startswith(DECIDES)}
    decides.pop("actor_rollout_ref.rollout.seed", None)
    files = [*tools_given(config).values(), config.reward.custom_reward_function.path]
    data = OmegaConf.select(config, QUESTION_FILES[request.split])
    weights = checkpoint / "actor" if checkpoint is not None else config.actor_rollout_ref.model.path
    return {
        "policy": [request.policy, _stamps([weights])],
        "engine": f"run, {rollout.name}, {rollout.agent.default_agent_loop}",
        "settings": hashlib.blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=12).hexdigest(),
        "tools and reward": _stamps(files),
        "split": request.split,
        "data": _stamps(data if OmegaConf.is_list(data) else [data]),
    }


def _stamps(places: Iterable[str | Path | None]) -> list[str]:
    """Returns name, size and time of each file in each place; a hub name has no local files and stays a name."""
    stamps = []
    for place in places:
        path = Path(str(place)).expanduser()
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                stamps.append(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}")
            elif not file.is_dir():
                stamps.append(str(place))
    return stamps


@contextmanager
def _followed(log: Path, mark: str) -> Iterator[None]:
    """Prints the lines of ``log`` that have ``mark`` when they are written."""
    ended = threading.Event()

    def follow() -> None:
        place, over = 0, False
        while not over:
            over = ended.wait(1.0)  # what was written until then is read once more
            *lines, _ = log.read_bytes()[place:].split(b"\n") if log.exists() else [b""]
            place += sum(len(line) + 1 for line in lines)
            for line in lines:
                _, found, rest = line.decode(errors="replace").partition(mark)
                if found:
                    say_at_once(mark + rest)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
