"""The engine's own options in verl's configuration."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """`rollout.engine_kwargs.hf`: threads of the server, and how long it waits for a batch to fill."""

    num_threads: int = 1
    """Threads of torch in the server process."""
    quiet_ms: float = 10.0
    """A batch starts when no request arrived for so many milliseconds."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_threads, int) or self.num_threads < 1:
            raise ValueError(
                f"rollout.engine_kwargs.hf.num_threads={self.num_threads!r}: expected an integer >= 1"
            )
        if not 0 <= self.quiet_ms <= 1000:
            raise ValueError(f"rollout.engine_kwargs.hf.quiet_ms={self.quiet_ms!r}: expected 0 to 1000")

    @classmethod
    def read(cls, engine_kwargs: dict[str, Any]) -> "EngineOptions":
        """Raises ValueError for a key that is not one of the fields."""
        given = {key: value for key, value in (engine_kwargs.get("hf") or {}).items() if value is not None}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(
                f"rollout.engine_kwargs.hf.{unknown[0]} is not known: accepted are {', '.join(known)}"
            )
        return cls(**given)
