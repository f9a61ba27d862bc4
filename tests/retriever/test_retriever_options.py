"""Options of `serve` and `deploy` are the fields of `Limits` and `ServeSettings`, with their names and defaults."""

from dataclasses import fields
from pathlib import Path

import pytest

from verl_credit_retriever import cli as command
from verl_credit_retriever import start
from verl_credit_retriever.cli import main
from verl_credit_retriever.settings import Limits, ServeSettings


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command line and returns the settings that it serves."""
    given = []
    monkeypatch.delenv("VERL_CREDIT_RETRIEVER_TOKEN", raising=False)
    monkeypatch.setattr(start, "run_server", lambda settings: given.append(settings) or 0)
    cluster = type("Cluster", (), {"deploy": staticmethod(lambda settings, **more: given.append(settings))})
    monkeypatch.setattr(command, "_cluster", lambda address: cluster)

    def run(*arguments):
        assert main([*map(str, arguments)]) == 0
        return given.pop()

    return run


def test_every_option_reaches_the_settings(run):
    limits = {field.name: field.default + 1 for field in fields(Limits)}
    own = {"backend": "exact", "nprobe": 2, "refine": 3, "ef_search": 4, "host": "localhost", "port": 0}
    own |= {"port_file": Path("port"), "parent_pid": 5, "device": "cuda"}
    values = {**own, **limits, "topk": limits["default_topk"]}
    del values["default_topk"]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    settings = run("serve", "--index=i", "--encoder=e", "--gpu", "--verify", *arguments)
    expected = ServeSettings(Path("i"), Path("e"), **own, gpu=True, verify="all", limits=Limits(**limits))
    assert settings == expected


@pytest.mark.parametrize("arguments, mmap", [([], False), (["--mmap"], True)])
def test_the_vectors_stay_in_the_file_where_that_is_asked_for(run, arguments, mmap):
    settings = run("serve", "--index=i", "--encoder=e", *arguments)
    assert (settings.mmap, settings.verify, settings.port) == (mmap, "known", 8000)


def test_a_deployment_names_its_folders_from_the_root(run):
    settings = run("deploy", "--index=i", "--encoder=e", "--threads=3", "--max-topk=7", "--port=9")
    expected = ServeSettings(Path.cwd() / "i", Path.cwd() / "e", port=9, threads=3, limits=Limits(max_topk=7))
    assert settings == expected
