"""Ends a server when the process that started it ends."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable


def watch_process(pid: int, on_gone: Callable[[], None], poll_seconds: float = 0.5) -> threading.Thread:
    """Call `on_gone` in a daemon thread once process `pid` has ended (at once if it has already)."""

    def wait() -> None:
        try:
            descriptor = os.pidfd_open(pid)  # Linux: readable when the process ends, even as a zombie
        except ProcessLookupError:
            return on_gone()
        except (AttributeError, OSError):
            while alive(pid):
                time.sleep(poll_seconds)
            return on_gone()
        select.select([descriptor], [], [])
        os.close(descriptor)
        on_gone()

    thread = threading.Thread(target=wait, name="parent-watch", daemon=True)
    thread.start()
    return thread


def end_with(pid: int, *, force_after: float) -> None:
    """This process gets SIGTERM when `pid` ends, and ends by force that many seconds later."""

    def gone() -> None:
        end_by_force_after(force_after)
        os.kill(os.getpid(), signal.SIGTERM)

    watch_process(pid, gone)


def end_by_force_after(seconds: float) -> None:
    """End this process with code 1 after that time, even when its main thread is stuck in foreign code."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=end, name="last-resort", daemon=True).start()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
