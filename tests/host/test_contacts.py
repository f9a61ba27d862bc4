"""evidence/host/contacts.py: the stored contacts are those of the code, and a tree of verl that differs is named."""

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "evidence" / "host" / "contacts.py"


@pytest.fixture(scope="module")
def contacts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield _loaded()


def _loaded():
    spec = importlib.util.spec_from_file_location("contacts", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_manifest_is_of_this_code_and_the_installed_verl(contacts):
    """`make contacts` names a contact that the code added or verl changed, and `make contacts ARGS=--write` stores it."""
    verl = contacts.installed()
    found = contacts.manifest(contacts.contacts_of(contacts.host(), verl), verl)
    stored = json.loads(contacts.MANIFEST.read_text())
    assert found == stored["contacts"]
    assert stored["verl"] == verl.version
    assert contacts.differences(found, verl) == {}
    # The table of a step's hooks would be empty if the classes of ours were not followed to verl's.
    step = "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob"
    assert found[step] == "self, batch, metrics"


def test_what_the_script_names_by_hand_is_used(contacts):
    text = "".join(path.read_text() for path in (ROOT / "verl_credit" / "host").rglob("*.py"))
    assert [name for names in contacts.NAMED.values() for name in names if name not in text] == []


THEIRS = {
    "__init__.py": "",
    "version/version": "1.2\n",
    "base.py": "class Base:\n  def step(self, batch, metrics=None): self.batch = batch\n  def end(self, *, at): pass\n",
    "trainer.py": "from .base import Base\nclass Trainer(Base):\n  limit: int = 3\n  def save(self): pass\n",
    "tools.py": "from .base import *\nfrom os import path\ntry:\n  import fast\nexcept ImportError:\n  fast = None\n",
    "deep/__init__.py": "from .inner import helper as help\n",
    "deep/inner.py": "def helper(a, /, b=1, *rest, c, d=2, **more): pass\n",
}
OURS = {
    "__init__.py": "",
    "host/__init__.py": "",
    "host/part.py": "class Mixin:\n  def end(self, *, at): return super().end(at=at)\n",
    "host/ours.py": (
        "import verl.tools as tools\nfrom verl.deep import help\nfrom verl import trainer\n"
        "from verl_credit.host.part import Mixin\n"
        "class Ours(Mixin, trainer.Trainer):\n  mine = 1\n  def step(self, batch, metrics=None):\n"
        "    self.own, self.limit = tools.fast, 2\n    return self.batch, self.save()\n"
    ),
}
EXPECTED = {
    "verl.base:Base.batch": None,
    "verl.base:Base.end": "self, *, at",
    "verl.base:Base.step": "self, batch, metrics=",
    "verl.deep:help": "a, b=, *rest, c, d=, **more",
    "verl.tools": None,
    "verl.tools:fast": None,
    "verl.trainer:Trainer": None,
    "verl.trainer:Trainer.limit": None,
    "verl.trainer:Trainer.save": "self",
    "verl:trainer": None,
}


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder.parent


@pytest.fixture
def known(contacts, tmp_path, monkeypatch):
    monkeypatch.setattr(contacts, "NAMED", {})
    ours = contacts.Sources(written(tmp_path / "ours" / "verl_credit", OURS), "verl_credit")
    verl = contacts.Sources(written(tmp_path / "old" / "verl", THEIRS), "verl")
    return contacts.manifest(contacts.contacts_of(ours, verl), verl)


def test_names_overrides_calls_and_values_are_found(known):
    assert known == EXPECTED


def test_another_tree_differs_where_a_contact_is_gone_or_takes_other_arguments(contacts, known, tmp_path):
    newer = THEIRS | {
        "version/version": "1.3\n",
        "base.py": "class Base:\n  def step(self, batch, metrics): self.rows = batch\n  def end(self, *, at): pass\n",
        "trainer.py": "from .base import Base\nclass Trainer(Base):\n  limit: int = 3\n  def save_all(self): pass\n",
        "deep/__init__.py": "",
    }
    folder = written(tmp_path / "new" / "verl", newer)
    differs = {
        "verl.base:Base.batch": "absent",
        "verl.base:Base.step": "(self, batch, metrics)",
        "verl.deep:help": "absent",
        "verl.trainer:Trainer.save": "absent",
    }
    wheel = tmp_path / "verl-1.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in newer.items():
            packed.writestr(f"verl/{name}", text)
    for path in (folder, folder / "verl", wheel):
        verl = contacts.Sources(path, "verl")
        assert (verl.version, contacts.differences(known, verl)) == ("1.3", differs)
    assert len(contacts.table(known, verl, {})) == 2 + len(differs)
