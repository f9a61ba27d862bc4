"""Does the hidden state of a policy with trained weights tell more about a turn's value than the prompt's other rollouts?

The policy of the `real_*` recipes (SmolLM2-135M-Instruct) computes in turns: every turn is one question of `real_math_cpu`'s
kind, and the next question continues with the policy's own result. The outcome is 1 if the last result is right. The hidden
state is read at the last token before each turn, in the forward that the sampler makes anyway.

    python evidence/horizon/hidden.py sample --out DIR --shard 0 2     # and 1 2 beside it; goes on where it stopped
    python evidence/horizon/hidden.py fit --out DIR                    # hidden.json

`hidden.md` explains the measures.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_credit.worlds.real.arithmetic import make_records, messages
from verl_credit.worlds.real.build import RealPaths, build_policy
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import ModelDecoder, TurnSampler

HERE = Path(__file__).resolve().parent
TURNS, TOKENS = 2, 32
CHUNK = 12
"""Prompts that are sampled together and then written."""
BOX = re.compile(r"\\boxed\{(-?\d+)\}")
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def chains(count: int) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """(first question, its answer, the operations after it); sums and products, whose true results are 2 to 30."""
    found = []
    for record in make_records(0, 900):
        rng = random.Random(record.id)
        value, operations = int(record.answers[0]), []
        if value > 24 or " - " in record.question:  # of differences it gets a quarter right
            continue
        while len(operations) < TURNS - 1:
            sign = rng.choice("+*")
            number = rng.randint(2, {"+": 9, "*": 3}[sign])
            if 2 <= APPLY[sign](value, number) <= 30:
                operations.append((sign, number))
                value = APPLY[sign](value, number)
        found.append((record.question, int(record.answers[0]), operations))
    return found[:count]


class Sums:
    """What follows a turn: the next question, with the policy's own result in it."""

    def __init__(self, tokenizer, prompts):
        self._tokenizer, self._prompts = tokenizer, prompts
        self._truths = [
            [*accumulate(operations, lambda value, one: APPLY[one[0]](value, one[1]), initial=answer)]
            for _, answer, operations in prompts
        ]

    def start(self, question: int) -> State:
        text = self._tokenizer.apply_chat_template(
            messages(self._prompts[question][0]), tokenize=False, add_generation_prompt=True
        )
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        return State(question, len(ids), ids)

    def budget(self, state: State) -> int:
        return TOKENS

    def result(self, ids) -> int | None:
        found = BOX.findall(self._tokenizer.decode(ids))
        return int(found[-1]) if found and len(found[-1]) < 6 else None

    def right(self, state: State, ids) -> bool:
        return self.result(ids) == self._truths[state.question][state.turn]

    def steps(self, written) -> list[Step]:
        return [self.step(*one) for one in written]

    def step(self, state: State, ids) -> Step:
        value = self.result(ids)
        if value is None or state.turn == TURNS - 1:
            return Step(state, ids, None, float(self.right(state, ids)))
        sign, number = self._prompts[state.question][2][state.turn]
        cut = "" if ids[-1] == self._tokenizer.eos_token_id else "<|im_end|>"
        text = f"{cut}\n<|im_start|>user\nWhat is {value} {sign} {number}?<|im_end|>\n<|im_start|>assistant\n"
        after = (*state.ids, *ids, *self._tokenizer.encode(text, add_special_tokens=False))
        return Step(state, ids, State(state.question, state.prompt_length, after, state.turn + 1), None)


class ReadingDecoder(ModelDecoder):
    """Keeps the hidden state of each context's last token, after the final norm and in the middle of the layers."""

    def __init__(self, model, pad_token_id: int):
        super().__init__(model, pad_token_id)
        self.states: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
        layers = model.model.layers
        self._places = {"last": model.model.norm, "middle": layers[len(layers) // 2 - 1]}

    def start(self, contexts, most_new_tokens):
        read = {}  # contexts end at the right
        hooks = [
            module.register_forward_hook(lambda m, _, output, name=name: read.update({name: output[:, -1]}))
            for name, module in self._places.items()
        ]
        try:
            log_prob = super().start(contexts, most_new_tokens)
        finally:
            for hook in hooks:
                hook.remove()
        for row, context in enumerate(contexts):
            state = {name: value[row].float().numpy().astype(np.float16) for name, value in read.items()}
            self.states[tuple(context)] = state
        return log_prob


def sample(out: Path, rollouts: int, prompts: int, shard: tuple[int, int], minutes: float) -> None:
    """A file of states per chunk of prompts, until the time is over."""
    paths = RealPaths(out / "real")
    build_policy(paths, "full", lambda share, text: None)
    tokenizer = AutoTokenizer.from_pretrained(paths.policy)
    model = AutoModelForCausalLM.from_pretrained(paths.policy, dtype=torch.bfloat16).eval()
    world = Sums(tokenizer, chains(prompts))
    decoder = ReadingDecoder(model, tokenizer.pad_token_id)
    sampler = TurnSampler(decoder, [tokenizer.eos_token_id], drawable=len(tokenizer), contexts_at_once=24)
    until = time.monotonic() + 60 * minutes
    for at in range(shard[0] * CHUNK, prompts, shard[1] * CHUNK):
        file = out / f"states_{at:04}.npz"
        if file.exists() or time.monotonic() > until:
            continue
        starts = [Start(world.start(q), rollouts, 0, "hidden") for q in range(at, min(at + CHUNK, prompts))]
        rows = []
        for path, trajectory in enumerate(p for of in roll(sampler, world, starts) for p in of):
            right = True
            for step in trajectory.steps:
                state = step.state
                about = {"question": state.question, "path": at * rollouts + path, "turn": state.turn}
                about |= {"outcome": trajectory.reward, "right": float(right)}
                rows.append(about | decoder.states[state.ids])
                right = right and world.right(state, step.turn_ids)
        decoder.states.clear()
        np.savez(file, **{name: np.stack([row[name] for row in rows]) for name in rows[0]})
        first = [row["outcome"] for row in rows if row["turn"] == 0]
        print(time.strftime("%H:%M:%S"), file.name, f"{len(rows) / len(first):.2f} turns, {np.mean(first):.3f} right",
              flush=True)  # fmt: skip


def load(out: Path) -> dict[str, np.ndarray]:
    parts = [np.load(file) for file in sorted(out.glob("states_*.npz"))]
    return {
        name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in parts[0].files
    }


def blocks(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The features of every state, by name."""
    first, (y, group) = data["turn"] == 0, (data["outcome"], data["question"].astype(int))
    total, count = np.bincount(group[first], y[first]), np.bincount(group[first])
    loo = (total[group] - y) / (count[group] - 1)
    after = np.stack([data["turn"] > k for k in range(TURNS - 1)], axis=1).astype(float)
    return {
        "turn": after,
        "LOO": np.concatenate([loo[:, None], loo[:, None] * after], axis=1),
        "right": np.concatenate([data["right"][:, None], data["right"][:, None] * after], axis=1),
        "last": data["last"],
        "middle": data["middle"],
    }


def kernel(x: np.ndarray) -> np.ndarray:
    z = (x - x.mean(0)) / (x.std(0) + 1e-9)
    return z @ z.T


def predict(kernel, y, fit, new) -> np.ndarray:
    """V of the states ``new``: the ridge of the states ``fit``, in its dual form, K (K + n I)^-1 y."""
    at, mean = np.flatnonzero(fit), y[fit].mean()
    weight = np.linalg.solve(kernel[np.ix_(at, at)] + len(at) * np.eye(len(at)), y[at] - mean)
    return kernel[np.ix_(np.flatnonzero(new), at)] @ weight + mean


def crossfit(small, wide, y, group, folds: int = 8) -> np.ndarray:
    """Values by fits that have not seen the prompt. The hidden state's penalty is chosen on the fit's own prompts.

    ``small``, ``wide``: features, and those of the hidden state (None: without)."""
    value, prompts = np.empty(len(y)), np.random.default_rng(0).permutation(np.unique(group))
    of_small = kernel(small) / 0.01 + 1e3  # the constant is an intercept that is not shrunk
    kernels = [of_small] if wide is None else [of_small + kernel(wide) / shrink for shrink in SHRINK]
    for fold in range(folds):
        own = np.isin(group, prompts[fold::folds])
        others = np.setdiff1d(prompts, prompts[fold::folds], assume_unique=True)
        fit, errors = np.isin(group, others), np.zeros(len(kernels))
        for inner in range(4 if wide is not None else 0):
            out = fit & np.isin(group, others[inner::4])
            errors += [((predict(one, y, fit & ~out, out) - y[out]) ** 2).sum() for one in kernels]
        value[own] = predict(kernels[int(np.argmin(errors))], y, fit, own)
    return value


class Measures:
    """EV of outcomes and of changes, as `credit/turn/values.py` defines them, with a bootstrap over prompts."""

    def __init__(self, data: dict[str, np.ndarray], draws: int = 2000):
        self.y, self.group, self.path = data["outcome"], data["question"], data["path"]
        prompts = np.unique(self.group)
        self._of = np.searchsorted(prompts, self.group)
        drawn = np.random.default_rng(1).integers(len(prompts), size=(draws, len(prompts)))
        counts = np.stack([np.bincount(row, minlength=len(prompts)) for row in drawn])
        self._weights = np.concatenate([np.ones((1, len(prompts))), counts])
        self._next = np.flatnonzero(self.path[1:] == self.path[:-1])

    def _sum(self, per_state: np.ndarray, at=slice(None)) -> np.ndarray:
        return self._weights @ np.bincount(self._of[at], per_state, minlength=self._weights.shape[1])

    def outcomes(self, value: np.ndarray) -> np.ndarray:
        n, s, q = self._sum(np.ones(len(self.y))), self._sum(self.y), self._sum(self.y**2)
        return 1 - self._sum((self.y - value) ** 2) / (q - s**2 / n)

    def changes(self, value: np.ndarray) -> np.ndarray:
        error = (self.y - value) ** 2
        left, before = error[self._next + 1], error[self._next]
        return 1 - self._sum(left, self._next) / self._sum(before, self._next)


def interval(draws: np.ndarray) -> list[float]:
    return [round(float(v), 3) for v in (draws[0], *np.percentile(draws[1:], [2.5, 97.5]))]


def ceiling(data: dict[str, np.ndarray]) -> float:
    """The share of the outcomes' variance that true values explain, from rollouts that stand in the same context."""
    _, context = np.unique(np.c_[data["question"], data["turn"], data["last"]], axis=0, return_inverse=True)
    context, y = context.ravel(), data["outcome"]
    n, s = np.bincount(context), np.bincount(context, y)
    shared = n[context] > 1
    within = np.bincount(context, (y - s[context] / n[context]) ** 2)
    noise = (within[n > 1] / (n[n > 1] - 1) * n[n > 1]).sum() / shared.sum()
    return float(1 - noise / y[shared].var())


MODELS = ["LOO + turn", "right + LOO + turn"]
MODELS += [f"{state} + {others}" for state in ("last", "middle") for others in ("turn", *MODELS)]
SHRINK = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Penalties of a hidden feature; the last one leaves next to nothing of them."""


def fit(out: Path) -> dict:
    data = load(out)
    of, y, group, measures = blocks(data), data["outcome"], data["question"], Measures(data)
    values, found = {}, {}
    for name in MODELS:
        parts = name.split(" + ")
        hidden = of[parts.pop(0)] if parts[0] in ("last", "middle") else None
        values[name] = crossfit(np.concatenate([of[part] for part in parts], axis=1), hidden, y, group)
        base = "right + LOO + turn" if "right" in parts else "LOO + turn"
        found[name] = {"outcomes": interval(measures.outcomes(values[name]))}
        found[name]["changes"] = interval(measures.changes(values[name]))
        if name != base and base in values:
            for kind in (measures.outcomes, measures.changes):
                more = kind(values[name]) - kind(values[base])
                found[name][f"{kind.__name__}, more than {base}"] = interval(more)
        print(name, found[name], flush=True)
    first = data["turn"] == 0
    about = {
        "prompts": len(np.unique(group)),
        "rollouts": int(first.sum()),
        "states": len(y),
        "right": round(float(y[first].mean()), 3),
        "true values explain": round(ceiling(data), 3),
    }
    return about | {"explained variance": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("sample", "fit"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--minutes", type=float, default=35)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "sample":
        sample(given.out, given.rollouts, given.prompts, tuple(given.shard), given.minutes)
    else:
        (HERE / "hidden.json").write_text(json.dumps(fit(given.out), indent=1) + "\n")


if __name__ == "__main__":
    main()
