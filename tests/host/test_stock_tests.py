"""evidence/host/stock_tests.py on a small checkout: another result with the plugin is named, and so is a new failure."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "evidence" / "host" / "stock_tests.py"


@pytest.fixture(scope="module")
def stock():
    spec = importlib.util.spec_from_file_location("stock_tests", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


TESTS = (
    "import pytest\n"
    "def test_passes(): pass\n"
    "def test_fails(): assert 0\n"
    "@pytest.mark.skip\n"
    "def test_waits(): pass\n"
    "@pytest.fixture\n"
    "def broken(): raise ValueError\n"
    "def test_has_no_fixture(broken): pass\n"
    "@pytest.mark.parametrize('n', [1, 2])\n"
    "def test_each(n): assert n == 1\n"
)


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder / "test_small_on_cpu.py").write_text(TESTS)
    (folder / "test_gone_on_cpu.py").write_text("from verl_of_tomorrow import name\n")
    (folder / "test_cluster_on_cpu.py").write_text("import ray\nray.init()\n")
    (folder / "test_gpu.py").write_text("assert 0\n")
    return tmp_path


@pytest.mark.slow
def test_a_checkout_is_run_without_what_starts_ray(stock, tree):
    files = stock.files_of(tree)
    assert files == ["tests/trainer/test_gone_on_cpu.py", "tests/trainer/test_small_on_cpu.py"]
    assert stock.files_of(tree, "small") == files[1:]
    small = f"{files[1]}::test_"
    assert stock.results_of(tree, files, plugin=False) == {
        files[0]: "error",
        f"{small}passes": "passed",
        f"{small}fails": "failed",
        f"{small}waits": "skipped",
        f"{small}has_no_fixture": "error",
        f"{small}each[1]": "passed",
        f"{small}each[2]": "failed",
    }
    assert not list((tree / "tests").rglob("__pycache__")), "the checkout is written to"


def test_a_different_result_and_an_unknown_failure_are_named(stock):
    without = {"a": "passed", "b": "failed", "c": "failed", "d": "skipped"}
    assert stock.faults(without, without, {"b", "c"}) == []
    assert stock.faults(without, without, {"b"}) == ["c: failed, and known_failures.txt does not have it"]
    with_plugin = {"a": "failed", "b": "passed", "c": "failed"}
    assert stock.faults(without, with_plugin, {"b", "c"}) == [
        "a: passed without the plugin, failed with it",
        "b: failed without the plugin, passed with it",
        "d: skipped without the plugin, not run with it",
    ]
