"""A campaign of two conditions, and a stand-in for `verl-credit train` that writes a run's files as train does."""

import json
import sys

import pytest
import yaml

from verl_credit.study.campaign import runner
from verl_credit.study.campaign.design import composed

METRIC = "val-aux/lab-sampled/em/mean@1"
TRAIN = """
import json, os, signal, sys, time
run_dir, plan = sys.argv[1], json.load(open(sys.argv[2]))
name = "/".join(run_dir.split("/")[-2:])
what = plan.get(name, "done")
os.makedirs(run_dir, exist_ok=True)
with open(os.path.dirname(sys.argv[2]) + "/started", "a") as file:
    file.write(name + "\\n")
def event(kind, **more):
    with open(run_dir + "/events.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "kind": kind, "text": kind, **more}) + "\\n")
def end(reason, code):
    event("end", reason=reason, text=reason + ", 30 of 30 steps done")
    print("ends", name, flush=True)
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: end("interrupted", 130))
event("start")
if what == "killed":
    os.kill(os.getpid(), 9)
if what == "fails":
    end("failed", 1)
if what.startswith("waits for "):
    while not os.path.exists(what.removeprefix("waits for ")):
        time.sleep(0.01)
with open(run_dir + "/validation.jsonl", "a") as file:
    for step, value in zip((0, 15, 30), plan.get("values", {}).get(name, (0.2, 0.4, 0.6))):
        file.write(json.dumps({"step": step, METRIC: value}) + "\\n")
end("done", 0)
""".replace("METRIC", repr(METRIC))


class Stand:
    """``plan``: folder of a run to what its start does."""

    def __init__(self, root):
        self.file, self.folder, self.root = root / "mine.yaml", root / "campaign", root
        self.tree = {
            "name": "mine",
            "hypothesis": "joint is faster",
            "recipe": "lab",
            "overrides": ["lab.size=tiny"],
            "conditions": {
                "grpo": ["algorithm.info_gain_norm_mode=none"],
                "joint": ["algorithm.info_gain_norm_mode=joint"],
            },
            "baseline": "grpo",
            "seeds": [1, 2],
            "metric": {"name": METRIC, "window": [0, 30]},
        }
        self.does()

    def does(self, **plan):
        (self.root / "plan.json").write_text(json.dumps(plan))

    def run(self, *more, parallel=1, **changes):
        self.tree |= changes
        self.file.write_text(yaml.safe_dump(self.tree, sort_keys=False))
        return runner.run_campaign(str(self.file), self.folder, parallel, more)[0]

    @property
    def started(self):
        """Folders of the runs, in the order of their starts, since this was asked last."""
        file = self.root / "started"
        names = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return names

    def run_command(self, engine, recipe, overrides, config_dir=None):
        run_dir = overrides[-1].removeprefix("run_dir=").strip("'")
        return [sys.executable, "-S", "-c", TRAIN, run_dir, str(self.root / "plan.json")]


COMPOSED = {}


def composed_once(campaign, folder, complete=True):
    """Whatever does not change from test to test: the configurations hold the folder of the first."""
    key = str([campaign.recipe, campaign.overrides, campaign.conditions, campaign.metric])
    if key not in COMPOSED:
        COMPOSED[key] = composed(campaign, folder, complete)
    return COMPOSED[key]


@pytest.fixture
def stand(tmp_path, monkeypatch):
    stand = Stand(tmp_path)
    monkeypatch.setattr(runner, "run_command", stand.run_command)
    monkeypatch.setattr(runner, "composed", composed_once)
    return stand
