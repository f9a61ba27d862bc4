"""What a trial changed: deletions are told, binary files are said, the diff can be applied."""

import shutil
import subprocess

import pytest

from kit.trials import trial
from verl_credit.records.lineage import RecipeEdit


def tree(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def diff(before, after):
    return RecipeEdit(trial("b"), after, before).diff()


BEFORE = {
    "same": b"s",
    "changed": b"1\n2\n3",
    "gone/x": b"old\n",
    "gone.bin": b"\xff",
    "both.bin": b"\0",
    "empty": b"",
}
AFTER = {"same": b"s", "changed": b"1\n2\n4\n", "new": b"n\x0bn", "both.bin": b"\1\0", "new.bin": b"\xfe"}


def test_every_kind_of_change_is_told(tmp_path):
    before, after = tree(tmp_path / "before", BEFORE), tree(tmp_path / "after", AFTER)
    (after / "link").symlink_to(before)
    assert diff(before, after) == (
        "Binary files a/both.bin and b/both.bin differ\n"
        "--- a/changed\n+++ b/changed\n@@ -1,3 +1,3 @@\n 1\n 2\n-3\n\\ No newline at end of file\n+4\n"
        "--- a/empty\n+++ /dev/null\n"
        "Binary files a/gone.bin and /dev/null differ\n"
        "--- a/gone/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n"
        "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+n\x0bn\n\\ No newline at end of file\n"
        "Binary files /dev/null and b/new.bin differ\n"
    )
    assert diff(before, before) == "" and RecipeEdit(trial("a"), after, None).diff() == ""


@pytest.mark.skipif(shutil.which("patch") is None, reason="without patch")
def test_patch_makes_the_one_of_the_other(tmp_path):
    text = {name: content for name, content in BEFORE.items() if "." not in name and content}
    before = tree(tmp_path / "before", text)
    after = tree(tmp_path / "after", {"same": b"s", "changed": b"4\n5", "new": b"n"})
    subprocess.run(["patch", "-p1", "-s"], cwd=before, input=diff(before, after).encode(), check=True)
    left = {path.name: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    assert left == {"same": b"s", "changed": b"4\n5", "new": b"n"}


def test_two_files_are_compared_and_what_is_not_there_is_named(tmp_path):
    tree(tmp_path, {"a/config.yaml": b"x: 1\n", "b/config.yaml": b"x: 2\n"})
    found = diff(tmp_path / "a/config.yaml", tmp_path / "b/config.yaml")
    assert found == "--- a/config.yaml\n+++ b/config.yaml\n@@ -1 +1 @@\n-x: 1\n+x: 2\n"
    with pytest.raises(FileNotFoundError, match="snapshot .*gone is not there"):
        diff(tmp_path / "gone", tmp_path / "b")
