"""uvicorn's protocol with two limits more: how many connections there are, and how long a request's headers may take."""

import asyncio
import logging
import resource
import time
from contextlib import suppress

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20.0
ACCEPTED_AT_A_TIME = 16
"""Connections that asyncio accepts before the protocol sees the first of them (it takes the server's backlog)."""
RESERVED_FILES = 64 + 4 * ACCEPTED_AT_A_TIME
"""Descriptors of no connection: libraries, the index's files, pipes; and connections that are being closed."""
MOST_FILES = 1 << 20
LOG_EVERY_S = 60.0
log = logging.getLogger("verl_credit_retriever")


def most_connections() -> int:
    """How many connections this process can hold, once its soft limit of open files is its hard one, or a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if wanted > soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):  # the kernel may allow fewer than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, (MOST_FILES if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES)


def limited(most: int, header_seconds: float = HEADER_SECONDS) -> type[asyncio.Protocol]:
    """The protocol of one server process.

    A connection above `most` is closed at once; with a log line at most once a minute. So is a connection whose headers are
    not complete after `header_seconds`, counted from the connection or from the first byte of its next request.
    """
    last_warning = -LOG_EVERY_S

    class LimitedProtocol(AutoHTTPProtocol):
        _refused, _headers_due = False, None

        def connection_made(self, transport) -> None:
            nonlocal last_warning
            self._refused = len(self.connections) >= most
            if not self._refused:
                super().connection_made(transport)
                return self._await_headers()
            transport.abort()
            if time.monotonic() - last_warning >= LOG_EVERY_S:
                last_warning = time.monotonic()
                log.warning("%d connections are open, which is the limit; further ones are closed", most)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_headers()
            else:
                self._headers_have_come()

        def connection_lost(self, error) -> None:
            self._headers_have_come()
            if not self._refused:
                super().connection_lost(error)

        def on_response_complete(self) -> None:
            self._headers_have_come()  # those of a pipelined request; uvicorn's own time for an idle connection begins
            super().on_response_complete()

        def _await_headers(self) -> None:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(header_seconds, self.transport.abort)

        def _headers_have_come(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

    return LimitedProtocol
