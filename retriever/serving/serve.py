"""One server: bind, load, announce the port, serve until a signal or the parent's end."""

import os
import sys

from verl_credit_retriever.index.manifest import IndexMismatch, read_manifest
from verl_credit_retriever.index.memory import plan_memory, require_memory
from verl_credit_retriever.serving.process import serve_in_this_process
from verl_credit_retriever.serving.settings import ServeSettings
from verl_credit_retriever.serving.sockets import announce, bind

EXIT_PORT_IN_USE = 4


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGTERM, SIGINT or the end of `settings.parent_pid`; returns the exit code.

    0 after a drain, within 30 s: new requests get 503, queued ones are answered. 4: the port is in use. The port
    file is written once a canary query has worked in every worker, and deleted when the server ends. Errors: those
    of loading index and encoder.
    """
    try:
        listener = bind(settings.host, settings.port)
        if settings.workers > 1:  # nobody else has the port; now it is for sockets that share it
            port = listener.getsockname()[1]
            listener.close()
            listener = bind(settings.host, port, shared=True)
    except OSError as error:
        reason = error.strerror or error
        print(f"error: cannot listen on {settings.host}:{settings.port}: {reason}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    with listener:
        if (
            settings.port_file is not None
        ):  # only after binding: it may belong to the server that has the port
            settings.port_file.unlink(missing_ok=True)
        # Reports a wrong folder before seconds of imports.
        print(f"{settings.index}: {_memory_of(settings)}", flush=True)
        try:
            if settings.workers > 1:
                from verl_credit_retriever.serving.workers import run_workers

                return run_workers(settings, listener)
            # A single process does not write to a metrics folder that the environment names.
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
            return serve_in_this_process(
                settings, listener, lambda: announce(listener, settings.host, settings.port_file)
            )
        finally:
            if settings.port_file is not None:
                settings.port_file.unlink(missing_ok=True)


def _memory_of(settings: ServeSettings) -> str:
    """The memory plan as text. Several workers load at the same time, so their sum is checked here."""
    manifest = read_manifest(settings.index)
    on_gpus = settings.gpu and manifest["kind"] == "flat"  # whose file is copied to them
    how = {"backend": settings.backend, "mmap": settings.mmap or on_gpus}
    try:
        if settings.workers == 1:
            return plan_memory(manifest, **how).text()
        return require_memory(manifest, workers=settings.workers, **how).text()
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise IndexMismatch(
            f"{settings.index / 'manifest.json'}: parameters={manifest.get('parameters')!r} ({error!r}); "
            "rebuild the index"
        ) from None
