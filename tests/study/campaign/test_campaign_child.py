"""A run as a child: SIGINT and SIGTERM to a campaign leave it the time that it needs to end."""

import os
import signal
import sys
import threading
import time

import pytest

from verl_credit.study.campaign.child import run_child

RUN = """
import os, signal, sys, time
def stop(*_):
    time.sleep(1.0)  # Ray, the retriever, the report
    open(sys.argv[1], "w").write("cleaned up")
    sys.exit(130)
for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, stop)
open(sys.argv[1] + ".pid.partial", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".pid.partial", sys.argv[1] + ".pid")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_is_given_the_time_it_needs(tmp_path, number):
    file, pid = tmp_path / "left", tmp_path / "left.pid"

    def stop():
        while not pid.exists():
            time.sleep(0.02)
        if number == signal.SIGINT:  # a terminal sends it to the run and to us
            os.kill(int(pid.read_text()), number)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    assert run_child([sys.executable, "-c", RUN, str(file)]) == 130
    assert file.read_text() == "cleaned up"
