"""Three public launches of verl become runs with turn credit: `adopt`, then `train` for two steps on the tiny lab.

Model, data, sizes and hardware are the lab's. Reward, tool and dataset class are files of an author, at the places that the
launch names.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow
import pyarrow.parquet as parquet
import pytest

from kit import launches
from kit.train_run import train
from verl_credit.cli import main
from verl_credit.records.run.files import METRICS, read_json_lines
from verl_credit.turns.rollout.search.wire import SCHEMA

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ROLLOUT = "actor_rollout_ref.rollout"

TOOLS = '''
import json
from pathlib import Path

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


def log(name, **entry):
    with (Path(__file__).parent / name).open("a") as file:
        file.write(json.dumps(entry) + "\\n")


class Pages(BaseTool):
    """Finds the pages that share words with the query. A call earns 0, as one of verl's SearchTool does."""

    earns = 0.0

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        lines = Path(config["corpus"]).read_text().splitlines()
        self.pages = [json.loads(line)["contents"] for line in lines]

    async def execute(self, instance_id, parameters, **kwargs):
        wanted = set(str(parameters.get("query", "")).split())
        text = "\\n".join(sorted(self.pages, key=lambda page: -len(wanted & set(page.split())))[:2])
        log("calls.jsonl", query=parameters.get("query"))
        return ToolResponse(text=text), self.earns, {}


class Unpaid(Pages):
    """A call earns nothing, and has no metrics, as one of retool's tool."""

    async def execute(self, instance_id, parameters, **kwargs):
        return (await super().execute(instance_id, parameters))[0], None, None


class Checked(Pages):
    """A call earns 1 where it finds the right answer, which the row gives to `create`, as verl's Gsm8kTool has it."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.truths = {}

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        instance_id, answer = await super().create(instance_id)
        self.truths[instance_id] = create_kwargs["ground_truth"]
        return instance_id, answer

    async def execute(self, instance_id, parameters, **kwargs):
        answer, _, metrics = await super().execute(instance_id, parameters)
        return answer, float(self.truths[instance_id] in answer.text), metrics

    async def release(self, instance_id, **kwargs):
        del self.truths[instance_id]
'''
REWARD = '''
from own_tools import log


def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0):
    """A wrong answer has the score of its format."""
    right = f"<answer> {ground_truth}</answer>" in solution_str
    log("rewards.jsonl", source=data_source, format_score=format_score)
    return 1.0 if right else format_score * ("<answer>" in solution_str)
'''
RETOOL = '''
import datasets
from verl.utils.dataset import RLHFDataset

from own_tools import log


class CustomRLHFDataset(RLHFDataset):
    """Makes verl's rows of files that have problems and answers."""

    def _read_files_and_tokenize(self):
        frames = [datasets.load_dataset("parquet", data_files=file)["train"] for file in self.data_files]
        self.dataframe = datasets.concatenate_datasets(
            [frame.map(row, remove_columns=frame.column_names) for frame in frames]
        )


def row(one):
    truth = {"style": "rule", "ground_truth": one["answer"]}
    return {"data_source": "own", "prompt": [{"role": "user", "content": one["problem"]}], "reward_model": truth}


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    """From -1 to 1; turns soften a wrong answer."""
    log("rewards.jsonl", source=data_source, turns=int(extra_info["num_turns"]))
    right = f"<answer> {ground_truth}</answer>" in solution_str
    score = 1.0 if right else min(-0.6, -1 + (extra_info["num_turns"] - 2) / 2 * 0.1)
    return {"score": score, "acc": right, "pred": ""}
'''
LOOPS = "- {name: tool_agent, _target_: verl_credit.host.rollout.agent_loop.TurnAgentLoop}\n"
PROMPTS, STEPS = 4, 2


def of_search_r1(row, answer):
    return row | {"reward_model": {"style": "rule", "ground_truth": answer}}


def of_gsm8k(row, answer):
    """As verl's preparation of GSM8K with tools writes a row."""
    given = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"search": {"create_kwargs": {"ground_truth": answer}}},
    }
    return of_search_r1(row, answer) | {"agent_name": "tool_agent", "extra_info": row["extra_info"] | given}


def of_retool(row, answer):
    return {"problem": row["prompt"][-1]["content"], "answer": answer}


@dataclass(frozen=True)
class Author:
    """``row``: a row of the author's data. ``lines``: what the launch does not say. ``response``: tokens of a row."""

    tool: str
    tool_file: str
    row: Callable[[dict, str], dict]
    files: dict[str, str]
    n: int
    source: str
    lines: tuple[str, ...] = ()
    response: int = 416


AUTHORS = {
    "search_r1_like": Author(
        "Pages", "examples/sglang_multiturn/config/tool_config/search_tool_config.yaml", of_search_r1,
        {"reward.py": REWARD}, 5, "lab",
        ("custom_reward_function.path=reward.py", "+custom_reward_function.reward_kwargs.format_score=0.1"),
    ),
    "gsm8k_tools": Author(
        "Checked", "tools/configs/mcp_tools/bfcl_mcp_tools.json", of_gsm8k,
        {"reward.py": REWARD, "loops.yaml": LOOPS}, 8, "lab",
        ("reward.custom_reward_function.path=reward.py", "algorithm.turn_signal=tool_reward",
         f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml"),
    ),
    "retool": Author(
        "Unpaid", "verl-recipe/retool/sandbox_fusion_tool_config.yaml", of_retool,
        {"verl-recipe/retool/retool.py": RETOOL}, 16, "own", response=960,
    ),
}  # fmt: skip


def write_launch(folder, name, lab):
    """The launch's script with the author's files beside it. The older call of a YAML is Hydra's."""
    launch, author = launches.read(name), AUTHORS[name]
    config = {"type": "native", "corpus": str(lab.root / "corpus.jsonl")}
    tool = {"class_name": f"own_tools.{author.tool}", "config": config, "tool_schema": SCHEMA}
    words = ["python3", "-m", launch.entry, *launch.overrides, *author.lines]
    files = author.files | {"own_tools.py": TOOLS, author.tool_file: json.dumps({"tools": [tool]})}
    if launch.config:
        files[launch.config.name] = launch.config.read_text()
        words += ["--config-path=.", f"--config-name={launch.config.stem}"]
    files["run.sh"] = f'{shlex.join(words)} "$@"\n'
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    for split in ("train", "test"):
        rows = parquet.read_table(lab.questions(split)).to_pylist()
        rows = [author.row(row, row["reward_model"]["ground_truth"]["target"][0]) for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def of_the_lab(lab, response):
    """Model, data, sizes and hardware."""
    return [
        "hardware=laptop", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"actor_rollout_ref.model.path={lab.policy}", "data.train_files=train.parquet", "data.val_files=test.parquet",
        f"data.train_batch_size={PROMPTS}", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_prompt_length=48", f"data.max_response_length={response}", f"{ROLLOUT}.max_model_len=auto",
        "algorithm.info_gain_template='<answer> {answer}</answer>'", "search.require_schema=false",
        "trainer.logger=[console]", f"{ROLLOUT}.trace.backend=null",
        f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", AUTHORS)
def test_an_adopted_launch_trains_with_the_authors_reward_and_tool(
    name, tiny_lab, tmp_path, monkeypatch, capsys
):
    write_launch(tmp_path, name, tiny_lab)
    monkeypatch.chdir(tmp_path)
    changed = of_the_lab(tiny_lab, AUTHORS[name].response)
    code = main(["adopt", "--from", "run.sh", "--write", "own/mine.yaml", "--", *changed])
    assert code == 0, capsys.readouterr().out
    code, output = train(tmp_path / "log", "--config-dir", "own", "--config-name", "mine", "run_dir=run")
    assert code == 0, output
    trained_with(tmp_path, name)


def test_run_adopts_the_launch_of_a_script_that_really_runs_and_trains(tiny_lab, tmp_path):
    name = "search_r1_like"
    write_launch(tmp_path, name, tiny_lab)
    changed = [*of_the_lab(tiny_lab, AUTHORS[name].response), "run_dir=run"]
    command = [sys.executable, "-m", "verl_credit.cli", "run", "--", "bash", "run.sh", *changed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    trained_with(tmp_path, name)


def trained_with(tmp_path, name):
    """Both steps, each with the author's reward and tool."""
    author = AUTHORS[name]
    metrics = read_json_lines(tmp_path / "run" / METRICS)
    calls, rewards = (read_json_lines(tmp_path / f"{logged}.jsonl") for logged in ("calls", "rewards"))
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert len(rewards) >= STEPS * PROMPTS * author.n and {one["source"] for one in rewards} == {
        author.source
    }
    assert len(calls) >= sum(row["credit/tool/other_calls"] for row in metrics) > 0
    for row in metrics:
        assert row["credit/rows_trained"] == PROMPTS * author.n and row["credit/rollouts_failed"] == 0
        assert row["credit/tool/other_errors"] == row["credit/invalid_rows"] == 0
        assert row["credit/sync/weights_changed"] == 1.0 and row["actor/grad_norm"] > 0
    if name == "gsm8k_tools":  # it names a signal
        assert all(row["credit/signal/tool_reward/turns"] > 0 for row in metrics)
        assert any(row["credit/signal/tool_reward/std"] > 0 for row in metrics)
        assert all(row["credit/clip_scale/std"] > 0 for row in metrics)
    else:
        first, second = (row["credit/values/states"] for row in metrics)
        assert second > first > 0
    if name == "search_r1_like":
        assert {one["format_score"] for one in rewards} == {0.1}
    if name == "retool":
        assert any(one["turns"] > 2 for one in rewards)
