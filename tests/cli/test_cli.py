"""Both command lines: what they hand on, and how a wrong line and Ctrl-C end."""

import os
import sys
from importlib.metadata import version

import pytest

from verl_credit.cli import main
from verl_credit_retriever.cli import main as retriever

SERVE = "serve --index i --encoder e"
LAB = "--config-dir=there --config-name=lab"


@pytest.mark.parametrize(
    "command, line, named",
    [
        (main, "", "command"),
        (main, "trian", "'trian'"),
        (main, "train", "--config-name"),
        (main, "train --config-name", "--config-name"),
        (main, "report", "run_dir"),
        (main, "explain --valeus", "--valeus"),
        (main, "plan --devices 2.5", "'--devices'"),
        (main, "lab --dir x --size huge", "'huge' is not one of 'full', 'tiny'"),
        (main, "check --params 5", "'--params': Value error, '5' is not a JSON object"),
        (retriever, "", "command"),
        (retriever, "index --corpus c --encoder e --out o --kind tree", "'tree' is not one of 'flat'"),
        (retriever, f"{SERVE} --threads 0", "'--threads': Value error, 0; at least 1"),
        (retriever, f"{SERVE} --port 80a", "'80a'"),
        (retriever, f"{SERVE} --port 65536", "--port=65536; expected 0 to 65535"),
    ],
)
def test_a_wrong_line_ends_with_2_and_names_what_is_wrong(command, line, named, capsys):
    assert command(line.split()) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, line, now",
    [
        (main, "train --config-name lab -m seed=1,2", "verl-credit campaign"),
        (main, "train --multirun seed=1,2", "verl-credit campaign"),
        (main, "report --watch runs/a", "verl-credit report RUN"),
        (main, "report runs/a runs/b", "verl-credit diff A B"),
        (main, "lineage show --dir runs", "results.tsv"),
        (main, "lineage best", "lineage render"),
        (main, "bench joint --table", "leave it out"),
        (main, "prepare check file --search=http://127.0.0.1:1", "--corpus=FILE"),
        (main, "fidelity lens runs/a", "verl-credit fidelity RUN --dir FOLDER"),
        (retriever, f"{SERVE} --workers 2", "search.url"),
    ],
)
def test_a_word_that_is_gone_is_refused_with_what_is_there_now(command, line, now, capsys):
    assert command(line.split()) == 2
    commit, _, rest = capsys.readouterr().err.partition("; now: ")
    assert "33b16abd" in commit and now in rest


def test_a_word_that_is_gone_is_refused_at_its_own_command_alone(capsys):
    for line in (
        "report ./lens",
        "fidelity ./lens",
        "check -m",
        "prepare --search",
        "report runs/a --table",
        "trains -m",
    ):
        main(line.split())
        assert "is gone" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["train a=1 --config-name lab b=2 --config-dir there c=3", f"train a=1 b=2 c=3 {LAB}"],
)
def test_overrides_stand_before_between_and_behind_options(line, monkeypatch):
    seen = []
    monkeypatch.setattr("verl_credit.recipe.doctor.network.ray_on_loopback", lambda environment: None)
    monkeypatch.setattr("verl_credit.cli.train.start.start", lambda *given: seen.append(given) or 5)
    assert main(line.split()) == 5
    assert seen == [("lab", ["a=1", "b=2", "c=3"], "there")]


@pytest.mark.slow
def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("verl_credit.cli.recipe.stages.explanation", interrupted)
    assert main(["explain"]) == 130


@pytest.mark.slow
@pytest.mark.parametrize("command", ["modes", "keys"])
def test_a_page_that_cannot_be_written_ends_with_4_and_one_line(command, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main([command]) == 4
        monkeypatch.undo()
        said = capsys.readouterr().err
        assert said.startswith(f"verl-credit {command}: ") and said.endswith("No space left on device\n")


def test_the_command_finds_modules_in_the_current_folder(tmp_path, monkeypatch, capsys):
    """As `python -m verl.trainer.main_ppo` does, after everything that is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["verl-credit", "--help"])
    assert main() == 0 and sys.path[-1] == os.getcwd()
    assert "adopt" in capsys.readouterr().out


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"verl-credit {version('verl-credit')}\n"
