"""Starts the server that the settings describe."""

import os
import sys
from contextlib import ExitStack
from functools import partial

from verl_credit_retriever.index.manifest import read_manifest
from verl_credit_retriever.index.memory import require_recorded
from verl_credit_retriever.serve import EXIT_PORT_IN_USE, announce, bind, serve_in_this_process
from verl_credit_retriever.settings import ServeSettings


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGTERM, SIGINT or the end of `settings.parent_pid`; returns the exit code.

    0 after a drain, within 30 s: new requests get 503, queued ones are answered. 4: the port is in use. The port
    file is written once a canary query has worked, and deleted when the server ends. Errors: those of loading index and
    encoder.
    """
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(bind(settings.host, settings.port))
        except OSError as error:
            reason = error.strerror or error
            print(f"error: cannot listen on {settings.host}:{settings.port}: {reason}", file=sys.stderr)
            return EXIT_PORT_IN_USE
        if settings.port_file is not None:
            # The file is removed only after binding: it may belong to the server that has the port.
            settings.port_file.unlink(missing_ok=True)
            stack.callback(settings.port_file.unlink, missing_ok=True)
        # Reports a wrong folder before seconds of imports.
        print(f"{settings.index}: {_memory_of(settings)}", flush=True)
        # The metrics are those of this process, whatever metrics folder the environment names.
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        on_ready = partial(announce, listener, settings.host, settings.port_file)
        return serve_in_this_process(settings, listener, on_ready)


def _memory_of(settings: ServeSettings) -> str:
    """The memory plan as text."""
    manifest = read_manifest(settings.index)
    on_gpus = settings.gpu and manifest["kind"] == "flat"  # whose file is copied to them
    mmap = settings.mmap or on_gpus
    return require_recorded(settings.index, manifest, backend=settings.backend, mmap=mmap)[1].text()
