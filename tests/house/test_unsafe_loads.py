"""Nothing that ships runs what it reads: no unpickling, no eval, no unsafe YAML, no code of a model's, no shell.

A file of another's may hold code in each of these. What the project loads is JSON, YAML of data, `.npy` without objects,
safetensors, and tensors with ``weights_only``.
"""

import ast
import re
from pathlib import Path

import pytest

from kit.each import each

ROOT = Path(__file__).parents[2]
FOLDERS = ("verl_credit", "retriever", "recipes", "evidence")
PICKLES = ("pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
READS = ("load", "loads", "Unpickler", "open")
SAFE_YAML = re.compile("(C?Safe|C?Base)Loader$")
ALLOWED = {  # what is found -> why it may stay
    "verl_credit/credit/laws/laws.py: pickle.loads(pickle.dumps(subject.function))": "its own bytes, of a moment before",
    "verl_credit/recipe/doctor/lengths.py: trust_remote_code=bool(model.get('trust_remote_code'))": (
        "verl's key of the user's model, false unless the user sets it; the run would do the same"
    ),
    "verl_credit/host/process/stream_check.py: trust_remote_code=bool(model.get('trust_remote_code'))": "the same key",
    "verl_credit/host/hf_rollout/loaded_model.py: {'trust_remote_code': model_config.trust_remote_code}": "the same key",
}


def unsafe(source: str) -> list[str]:
    """Every unsafe expression of a source, as text."""
    tree = ast.parse(source)
    real = {}  # local name -> what was imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            real |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            name = real.get(first, first).removeprefix("verl_credit.lazy.") + (f".{rest}" if rest else "")
            found += _in_call(node, name)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and key.value == "trust_remote_code"
                    and not _is(value, False)
                ):
                    found.append(f"{{'trust_remote_code': {ast.unparse(value)}}}")
    return found


def _in_call(call: ast.Call, name: str) -> list[str]:
    top, last = name.split(".")[0], name.split(".")[-1]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    found = [
        f"{key}={ast.unparse(given[key])}"
        for key in ("trust_remote_code", "allow_pickle", "shell")
        if key in given and not _is(given[key], False)
    ]
    whole = ast.unparse(call)
    if name in ("eval", "exec", "os.system", "os.popen") or (top in PICKLES and last in READS):
        found.append(whole)
    if top == "pandas" and last == "read_pickle":
        found.append(whole)
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        found.append(whole)
    if top == "yaml" and last in ("load", "load_all", "full_load", "unsafe_load"):
        loader = given.get("Loader", call.args[1] if len(call.args) > 1 else None)
        names = re.findall(r"\w*Loader\b", ast.unparse(loader)) if loader is not None else []
        if not names or not all(map(SAFE_YAML.match, names)):
            found.append(whole)
    return found


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_that_is_read_is_run(folder):
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in unsafe(path.read_text())
    }
    assert found == {place for place in ALLOWED if place.startswith(f"{folder}/")}


def test_no_recipe_trusts_a_models_own_code():
    files = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "evidence").rglob("*.yaml")]
    assert files
    said = re.compile(r"trust_remote_code['\"]?\s*[:=]\s*true", re.IGNORECASE)
    assert [path for path in files if said.search(path.read_text())] == []


UNSAFE = [
    "import pickle as p; p.loads(b'')", "from pickle import load; load(f)", "from dill import loads as l; l(b'')",
    "import cloudpickle; cloudpickle.load(f)", "import joblib; joblib.load(f)", "import shelve; shelve.open('x')",
    "import pickle; pickle.Unpickler(f).load()", "import pandas as pd; pd.read_pickle('x')",
    "eval('1')", "exec(text)", "import os; os.system('ls')", "import subprocess; subprocess.run('ls', shell=True)",
    "import yaml; yaml.load(text)", "import yaml; yaml.load(text, Loader=yaml.FullLoader)", "import yaml; yaml.full_load(t)",
    "import torch; torch.load(f)", "import torch; torch.load(f, weights_only=False)", "from torch import load; load(f)",
    "from verl_credit.lazy import torch; torch.load(f)",
    "import numpy as np; np.load(f, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
    "AutoModel.from_pretrained(x, trust_remote_code=flag)", "options = {'trust_remote_code': True}",
]  # fmt: skip
SAFE = [
    "import json; json.loads('1')", "import torch; torch.load(f, weights_only=True)", "model.eval()", "index.load(path)",
    "import yaml; yaml.safe_load(t)", "import yaml; yaml.load(t, getattr(yaml, 'CSafeLoader', yaml.SafeLoader))",
    "import numpy as np; np.load(f)", "import pickle; pickle.dumps(1)", "f(x, trust_remote_code=False)",
    "import subprocess; subprocess.run(['ls'])",
]  # fmt: skip


@each("source", UNSAFE)
def test_each_unsafe_call_is_found(source):
    assert unsafe(source)


@pytest.mark.parametrize("source", SAFE)
def test_what_is_safe_is_not(source):
    assert unsafe(source) == []
