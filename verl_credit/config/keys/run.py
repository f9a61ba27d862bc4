"""Keys of a whole run: its folder, seed, limits, the faults that it tolerates, its evaluation, probe, trial and world."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from verl_credit.config.keys.section import Expected, OneOf, Section
from verl_credit.names import bare_id

EVALUATION_MODES = ("greedy", "sampled")
FOLDERS = ("run_dir", "trainer.default_local_dir")  # a run writes into these folders
LONGEST_NAME, LONGEST_PATH = 255, 3840  # bytes; Linux allows 4096, which leaves 256 for the files of a run


def _can_be_made(folder: str) -> str:
    path = os.fsencode(folder)
    if b"\0" in path or len(path) > LONGEST_PATH or max(map(len, path.split(b"/"))) > LONGEST_NAME:
        most = f"at most {LONGEST_PATH} bytes, and at most {LONGEST_NAME} bytes between two slashes"
        raise ValueError(f"expected a folder's name without null bytes, of {most}")
    if no_home(folder):
        raise ValueError(f"{no_home(folder)}; expected a folder's name")
    return folder


def no_home(path: str) -> str:
    """Says that the path begins with a home which is not there; empty for any other path."""
    missing = os.path.expanduser(path).startswith("~")
    return f"{path.partition('/')[0]} is the home of no user" if missing else ""


Folder = Annotated[
    str, Field(min_length=1), AfterValidator(_can_be_made), Expected("a folder's name (put digits in quotes)")
]


class KeepRollouts(Section):
    steps: Annotated[int, Field(ge=0)] = 10
    """Last steps whose rollouts are stored token by token, for the report; 0: none. An older step
    keeps the text of one rollout per stored group, and the credit of all turns."""
    groups: Annotated[int, Field(ge=0, le=1000)] | None = 3
    """Groups of a step whose rollouts are stored, the longest rollouts first; null: all, which the entropy probe needs."""


class Run(Section):
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1
    """The seed of data order, rollouts and actor."""
    run_dir: Folder = "???"
    """Folder of the run: metrics, validation, trajectories, checkpoints, report."""
    keep_rollouts: KeepRollouts = Field(default_factory=KeepRollouts)
    keep_checkpoints: Annotated[
        list[Annotated[int, Field(ge=1)]],
        Expected("a list of steps of at least 1 (step 0 is actor_rollout_ref.model.path)"),
    ] = Field(default_factory=list)
    """Steps that are saved and kept independently of trainer.save_freq and trainer.max_actor_ckpt_to_keep."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of torch in the actor and in the engine hf; the actor's: OMP_NUM_THREADS goes first."""
    max_hours: Annotated[float, Field(ge=1e-3)] | None = None
    """Hours after which a run ends cleanly: a step that would end later is the last, saved and evaluated; null: no limit."""
    credit_preset: str | None = None
    """The chosen preset of recipes/credit/ (credit=NAME); null: none."""
    credit_overrides: list[str] = Field(default_factory=list)
    """The credit keys that differ from the preset; filled in at the start."""
    credit_reason: str | None = None
    """The credit that algorithm.info_gain_norm_mode=auto chose, and why; filled in at the start."""


class Faults(Section):
    """The shares of faults that a run tolerates before it stops."""

    prefix = "faults"

    max_failed_rollouts: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a step's rollouts that may raise (agent loop or reward function)."""
    max_tool_faults: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a step's rows in which the search server, or the engine after the first turn, may fail; they are not trained
    on."""
    max_lost_rewards: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a step's turn rewards that may be missing (a judge that is down, gains under drop)."""
    max_unrewarded_steps: Annotated[int, Field(ge=0)] | None = 2
    """Consecutive steps in which a turn signal may reward no turn although tools were called; null: any number."""


class Evaluation(Section):
    prefix = "evaluation"

    modes: Annotated[
        list[Annotated[str, OneOf(EVALUATION_MODES)]],
        Field(min_length=1),
        Expected(f"a list of {list(EVALUATION_MODES)}, not empty"),
    ] = Field(default_factory=lambda: list(EVALUATION_MODES))
    """Held-out evaluation: greedy, sampled (T=1), or both."""
    max_hours: Annotated[float, Field(ge=1e-3)] | None = None
    """Hours that an evaluation may take, all modes together; a longer evaluation ends the run after the current batch;
    null: no limit."""
    keep_trajectories: bool = False
    """Write every held-out trajectory with its texts and scores to `held_out/` in the run's folder (docs/report.md)."""


class Probe(Section):
    """The entropy probe inside training (docs/probe.md)."""

    prefix = "probe"

    every: Annotated[int, Field(ge=0)] = 0
    """Every n-th update is compared with its first-order prediction of entropy on the next step's rollouts; 0: off."""
    budget: Annotated[float, Field(ge=0.001, le=1)] = 0.1
    """Largest share of a step's time for the comparison; it sets the number of prompts, at least `probe.groups`."""
    groups: Annotated[int, Field(ge=2, le=100)] = 4
    """Groups of prompts from which the standard error is computed, one backward each."""


LONGEST_TEXT = 20_000  # characters; readers of the table accept fields of at most 131,072


def _cell(text: str) -> str:
    if len(text) > LONGEST_TEXT or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        most = f"at most {LONGEST_TEXT:,} characters"
        raise ValueError(f"expected a text of {most}, without null bytes and broken Unicode")
    return text


Text = Annotated[str, AfterValidator(_cell)]


ValidationMetric = Annotated[
    str, Field(pattern=r"^val-"), Expected("a name in validation.jsonl, which begins with val-")
]


class Lineage(Section):
    """The table that records a run as a trial, its hypothesis, and the rule that keeps it (docs/campaigns.md)."""

    prefix = "lineage"

    dir: Folder | None = None
    """Folder of the table of trials, results.tsv; null: `lineage` beside run_dir, so that runs with one parent share it."""
    exp_id: Annotated[str, AfterValidator(bare_id), Expected("a name (put digits in quotes)")] | None = None
    """The trial's id, without `exp_`; null: the name of run_dir. A number is added where the id has ended already."""
    parent: Annotated[Text, Expected("a trial's id (put digits in quotes)")] | None = None
    """Trial that this trial changes; null: the trial that run_dir resumes, else the best trial at the start."""
    hypothesis: Text | None = None
    """The change that is tried and its expected effect."""
    expected_delta: (
        Annotated[float | Text, Expected(f"a text of at most {LONGEST_TEXT:,} characters or a number")] | None
    ) = None
    """The expected change of the metric."""
    threshold: Annotated[float, Field(ge=0)] = 0.005
    """A finished trial is kept when it gains more than this over the best kept trial; else it is discarded."""
    metric: ValidationMetric | None = None
    """The held-out metric that decides; null: exact match over all questions, greedy where it is evaluated."""
    lower_is_better: bool = False
    """A smaller value of the metric is better."""


class Lab(Section):
    """Keys of recipes with the embedded world only; their values are those of recipes/lab.yaml."""

    prefix = "lab"

    dir: Folder
    """Folder of the lab's files; absent files are built. auto: its folder in the cache."""
    world_seed: Annotated[int, Field(ge=0)]
    """Seed of the encyclopedia."""
    hops: Annotated[int, Field(ge=1, le=6)] | None
    """The searches that every question needs, in a lab of its own; null: a mix of 1 to 3."""
    size: Literal["full", "tiny"]
    """tiny: for tests."""
    template: Annotated[str, Field(pattern=r"\{answer\}"), Expected("a text that contains {answer}")]
    """The form in which a policy of the lab answers."""
    index: Folder | None
    """Folder of the search index that is served; null: the lab's own."""


class Real(Section):
    """Keys of recipes with trained weights of the package index only; their values are those of recipes/real_cpu.yaml."""

    prefix = "real"

    dir: Folder
    """Folder of the files; absent files are built."""
    task: Literal["arithmetic", "multihop"]
    """The questions: a generator's, or HotpotQA's with a search index and a supervised start."""
    size: Literal["full", "tiny"]
    """tiny: two layers, for tests."""
    data_seed: Annotated[int, Field(ge=0)]
    """Seed of the arithmetic, of the choice of held-out questions, and of the supervised start."""
    questions: str | None
    """HotpotQA's questions with their paragraphs: its file, or a name on the hub (multihop only)."""


class Doorkey(Section):
    """Keys of the recipe doorkey alone; their values are those of recipes/doorkey.yaml."""

    prefix = "doorkey"

    dir: Folder
    """Folder of the tasks and of the policy; absent files are built where the run reads one of them."""
    world_seed: Annotated[int, Field(ge=0, le=200)]
    """Seed of the tasks, of the demonstrations and of the policy."""
    size: Literal["full", "tiny"]
    """tiny: for tests."""
