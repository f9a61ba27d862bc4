"""One thread for torch and no network, here and in what the tests start: the models are tiny, and machines are shared."""

import gc
import logging
import os
import re
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "kit" / "quick_start"), os.environ.get("PYTHONPATH")])
)

import pytest
import yaml

gc.disable()  # until all tests are collected: nothing that is imported is garbage
yaml.Dumper = yaml.CDumper  # before OmegaConf derives its own from it; a third of the time


WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_configure(config):
    """The process that only hands tests to the workers of xdist needs no torch; until it has it, no worker starts."""
    if WORKER or not config.getoption("tx", None):
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Every second worker of xdist reads the files from the last to the first, so that of two workers each rewrites the
    assertions of half of them and finds the other half: that takes 5 s of CPU where none is rewritten yet."""
    report = yield
    if WORKER[2:].isdigit() and int(WORKER[2:]) % 2 and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config, items):
    """Some tests need an environment of their own, a browser, or hours: they run only where `-m` names them."""
    own_lane = {"vllm", "browser", "nightly", "drawn"} - set(re.findall(r"\w+", config.option.markexpr))
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in own_lane)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # Runs of Ray come first: they take the longest, and no core waits for them at the end.
    kept = [item for item in items if not any(item.get_closest_marker(name) for name in own_lane)]
    if WORKER:  # the order has to be the same in all workers
        kept.sort(key=lambda item: item.path.parts)
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """A test that leaves logging off fails, not those that read a log after it, in whatever order they come."""
    yield
    level, logging.root.manager.disable = logging.root.manager.disable, 0
    assert level == 0, f"the test leaves logging disabled up to level {level}"


def pytest_collection_finish():
    """The garbage collector no longer walks through what is imported by now: tests of recipes take a third less time.
    It starts once in 50,000 new objects, not once in 700: it took a sixth of the rest. Where older objects are collected,
    too, in every 40th start, not in every 10th, it takes a thirtieth less of the tests of recipes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 40)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def recipes_composed_once():
    """The project composes each recipe and reads each text once in a process, and copies of them are quick to make
    (kit/recipes.py). ``tests/config`` compares what it composes with Hydra."""
    from omegaconf._utils import OmegaConfDumper

    from kit.recipes import composed_once, read_once

    assert issubclass(OmegaConfDumper, yaml.CDumper), (
        "a plugin of pytest imports OmegaConf first: see addopts"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_credit.recipe.compose.compose_recipe", composed_once)
        patch.setattr("omegaconf.OmegaConf.load", staticmethod(read_once))
        # It clears the caches of all loggers, twice for each configuration; verl's warnings were given at the collection.
        patch.setattr("verl_credit.recipe.compose._quiet", nullcontext)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once():
    """Each client of httpx reads all certificates, for longer than a test takes to ask it: here a process does so once."""
    import httpx

    once = cache(httpx.create_ssl_context)
    with pytest.MonkeyPatch.context() as patch:
        for place in (httpx, httpx._transports.default):
            patch.setattr(place, "create_ssl_context", once)
        yield


@pytest.fixture(scope="session")
def tiny_lab(tmp_path_factory):
    """The lab that `lab.size=tiny` builds, once for all workers and all runs of Ray: tests copy what they change. Tests that
    use it are slow."""
    from verl_credit.worlds.lab.build import build_lab

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return build_lab(shared / "lab" / "tiny", size="tiny")  # of two workers the second waits for the first


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, without a network. Called with (name, folder): puts the folder's files there."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(name, folder):
        home = cache / f"models--{name.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("c0ffee")
        return Path(shutil.copytree(folder, home / "snapshots" / "c0ffee"))

    return put


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from kit.chromium import PROGRAM, Chromium

    if PROGRAM is None:
        pytest.fail("no chromium on the PATH: apt-get install chromium")
    with Chromium(tmp_path_factory.mktemp("profile")) as found:
        found.size(1280, 1000)
        yield found
