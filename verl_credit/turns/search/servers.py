"""The servers of a client: their addresses, and the choice of the server for each attempt."""

from collections.abc import Callable
from dataclasses import dataclass

from verl_credit.turns.search.circuit_breaker import CircuitBreaker


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
