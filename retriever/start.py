"""Starts the server that the settings describe: in this process, or in several workers that share its port."""

import os
import socket
import sys
from contextlib import ExitStack
from functools import partial

from verl_credit_retriever.index.manifest import read_manifest
from verl_credit_retriever.index.memory import require_recorded
from verl_credit_retriever.serve import EXIT_PORT_IN_USE, announce, bind, serve_in_this_process
from verl_credit_retriever.settings import ServeSettings
from verl_credit_retriever.workers import run_workers


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGTERM, SIGINT or the end of `settings.parent_pid`; returns the exit code.

    0 after a drain, within 30 s: new requests get 503, queued ones are answered. 4: the port is in use. The port
    file is written once a canary query has worked in every worker, and deleted when the server ends. Errors: those
    of loading index and encoder.
    """
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(bind(settings.host, settings.port))
            if settings.workers > 1:  # no other process has the port; now it is for sockets that share it
                port = listener.getsockname()[1]
                listener.close()
                # Shared sockets do not listen until a worker is ready, so until then `bind` refuses no other server: this
                # name does. It ends with its process and belongs to the network namespace, as the port does.
                owner = stack.enter_context(socket.socket(socket.AF_UNIX))
                if sys.platform == "linux":  # elsewhere such names are files
                    owner.bind(f"\0verl-credit-retriever-{port}")
                listener = stack.enter_context(bind(settings.host, port, shared=True))
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
        if settings.workers > 1:
            return run_workers(settings, listener)
        # A single process does not write to a metrics folder that the environment names.
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        on_ready = partial(announce, listener, settings.host, settings.port_file)
        return serve_in_this_process(settings, listener, on_ready)


def _memory_of(settings: ServeSettings) -> str:
    """The memory plan as text; several workers load at the same time, so it is their sum."""
    manifest = read_manifest(settings.index)
    on_gpus = settings.gpu and manifest["kind"] == "flat"  # whose file is copied to them
    how = {"backend": settings.backend, "mmap": settings.mmap or on_gpus, "workers": settings.workers}
    return require_recorded(settings.index, manifest, **how)[1].text()
