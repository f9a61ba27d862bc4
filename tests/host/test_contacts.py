"""evidence/host/contacts.py: the stored contacts are those of the code, and a tree of verl that differs is named."""

import importlib.util
import json
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
