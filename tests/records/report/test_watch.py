"""`report --watch`: written anew after every change, quiet between, and it ends with the run."""

import json
import os
import socket

import pytest

from kit.report_page import training, write_run
from verl_credit.cli import main
from verl_credit.errors import ExitCode
from verl_credit.records.report.write import EVERY_S, watch
from verl_credit.records.run import events
from verl_credit.records.run.lock import LOCK, holder_is_gone

RELOADS = f'<meta http-equiv="refresh" content="{EVERY_S}">'


def append(folder, text):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


class Run:
    """What happens in a run's folder while the watch pauses, one entry a pause."""

    def __init__(self, folder, *happens):
        self.folder, self.happens, self.said, self.pages = folder, list(happens), [], []

    def watch(self):
        return watch(self.folder, self.said.append, self.pause)

    def pause(self, seconds):
        assert seconds == EVERY_S
        page = self.folder / "report.html"
        self.pages.append(page.read_text() if page.exists() else None)
        self.happens.pop(0)()


def stop():
    raise KeyboardInterrupt


def test_it_follows_a_run_to_its_end(tmp_path):
    line = json.dumps(training(1))
    run = Run(
        tmp_path,
        lambda: events.start(tmp_path, 3),
        lambda: append(tmp_path, line[:40]),  # half a line
        lambda: append(tmp_path, line[40:] + "\n"),
        lambda: None,
        lambda: append(tmp_path, json.dumps(training(2)) + "\n" + line[:30]),
        lambda: events.end(tmp_path, ExitCode.DONE, "", 3),
    )
    assert run.watch() == tmp_path / "report.html"
    assert [page and RELOADS in page for page in run.pages] == [None] * 3 + [True] * 3
    assert "Training step 1." in run.pages[3] and run.pages[4] == run.pages[3]
    assert "Training steps 1 to 2." in run.pages[5]
    last = (tmp_path / "report.html").read_text()
    assert RELOADS not in last and "Done: 2 of 3 training steps" in last
    assert run.said[0].endswith("waiting for the first step") and run.said[-1].endswith("the run has ended")
    assert not list(tmp_path.glob("*.partial"))


def test_ctrl_c_leaves_a_page_that_does_not_reload(tmp_path):
    write_run(tmp_path)
    events.start(tmp_path, 9)
    run = Run(tmp_path, stop)
    with pytest.raises(KeyboardInterrupt):
        run.watch()
    assert RELOADS in run.pages[0] and RELOADS not in (tmp_path / "report.html").read_text()


def test_a_run_whose_process_is_gone_has_ended(tmp_path):
    """The greatest number of a process that Linux allows is 2^22."""
    write_run(tmp_path)
    events.start(tmp_path, 9)
    here, none = socket.gethostname(), 2**22 + 5
    for pid, host, gone in (
        (os.getpid(), here, False),
        (none, "another", False),
        ("x", here, False),
        (none, here, True),
    ):
        (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "host": host}))
        assert holder_is_gone(tmp_path) is gone
    assert Run(tmp_path).watch() == tmp_path / "report.html"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--watch", "no/such/folder"], "no/such/folder does not exist: a report needs the folder of a run"),
        (["--watch", ".", "."], "--watch takes one run"),
        ([".", ".", "."], "expected one run, or two to compare"),
    ],
)
def test_what_cannot_be_watched_is_refused(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == ExitCode.PREFLIGHT
    assert said in capsys.readouterr().out and not list(tmp_path.iterdir())
