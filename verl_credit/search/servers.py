"""The servers of a client: their addresses, and the choice of the server for each attempt."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from socket import inet_aton

import httpx

from verl_credit.redact import redact
from verl_credit.search.circuit_breaker import CircuitBreaker


@dataclass(frozen=True)
class Server:
    """One retriever: the address of its POST /retrieve, and its breaker."""

    url: str
    breaker: CircuitBreaker


class ServerList:
    """Successive searches begin at successive servers, and each search tries the servers in a circle.

    `ready` maps the address of a server that sent Retry-After to the clock time until which it asks to wait.
    """

    def __init__(self, urls: list[str], *, failures: int, pause_s: float, clock: Callable[[], float]):
        self.servers = [
            Server(url, CircuitBreaker(failures=failures, pause_s=pause_s, clock=clock)) for url in urls
        ]
        self._clock, self._turn = clock, 0

    def start(self) -> int:
        """The number of the server at which the next search begins."""
        self._turn += 1
        return self._turn - 1

    def pick(self, start: int, attempt: int, ready: dict[str, float]) -> tuple[Server, int] | None:
        """(server, ticket of its breaker); None when every breaker refuses.

        Servers are tried from number `start + attempt` on; those that asked to wait come last.
        """
        count, now = len(self.servers), self._clock()
        order = [self.servers[(start + attempt + offset) % count] for offset in range(count)]
        for server in sorted(order, key=lambda server: max(ready.get(server.url, now), now)):
            if (ticket := server.breaker.enter()) is not None:
                return server, ticket
        return None

    def wait(self, ready: dict[str, float]) -> float:
        """Seconds until the first server whose breaker is not open is ready: 0 when one did not ask to wait."""
        usable = [s for s in self.servers if not s.breaker.refuses] or self.servers
        now = self._clock()
        return max(0.0, min(ready.get(server.url, now) for server in usable) - now)


def endpoint(url: str) -> str:
    """The address of POST /retrieve, given as such or as the server's. Errors: ValueError names the address."""
    wrong = f"address {redact(url)!r}; expected http://HOST:PORT"
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{wrong} ({error})") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.host
        or parts.query
        or parts.fragment
        or not 0 < (parts.port or 80) < 65536
    ):
        raise ValueError(wrong)
    return url.rstrip("/") if parts.path.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"


def without_password(url: str) -> tuple[httpx.URL, httpx.BasicAuth | None]:
    """The address, and what its user and password become: a header. httpx logs the address of every request."""
    address = httpx.URL(url)
    if not address.userinfo:
        return address, None
    return address.copy_with(userinfo=b""), httpx.BasicAuth(address.username, address.password)


def loopback(url: str) -> bool:
    """Whether every machine resolves the address to itself: localhost, 127.0.0.0/8, ::1 and the "any" addresses."""
    host = httpx.URL(url).host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        try:
            address = ip_address(inet_aton(host))  # 127.1 and other short forms that resolvers accept
        except OSError:
            return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def base(url: str) -> str:
    """The server's address without /retrieve and a final slash."""
    return endpoint(url).removesuffix("/retrieve")
