"""A question as a small decision process: what can be read, what it is worth, and how long one may search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

STOP = "stop"


@dataclass(frozen=True)
class Place:
    """What a trajectory has read so far."""

    potential: float
    """The policy's probability of the gold answer here, above 0 and at most 1. A constant: no gradient goes through it."""
    success: float
    """Probability that an answer given here is right. 0 and 1 make one trajectory of a path, others two."""
    searches: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Query -> (the place that it leads to, its share of the policy's searches here)."""


@dataclass(frozen=True)
class Question:
    """Places by name. A trajectory has at most ``turns`` turns; the last one can only be the answer."""

    name: str
    places: Mapping[str, Place]
    start: str
    turns: int

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"question {self.name!r}: turns={self.turns}; expected at least 1, the answer")
        self._known(self.start, "start")
        for name, place in self.places.items():
            where = f"question {self.name!r}, place {name!r}"
            if not 0 < place.potential <= 1:
                raise ValueError(f"{where}: potential={place.potential}; expected above 0 and at most 1")
            if not 0 <= place.success <= 1:
                raise ValueError(f"{where}: success={place.success}; expected 0 to 1")
            if STOP in place.searches:
                raise ValueError(f"{where}: a search named {STOP!r}; that is the answer's name, take another")
            shares = [share for _, share in place.searches.values()]
            if shares and (min(shares) <= 0 or abs(sum(shares) - 1) > 1e-12):
                raise ValueError(f"{where}: shares {shares}; expected numbers above 0 with sum 1")
            for query, (to, _) in place.searches.items():
                self._known(to, f"place {name!r}, search {query!r}")

    def _known(self, place: str, what: str) -> None:
        if place not in self.places:
            raise ValueError(f"question {self.name!r}, {what}: {place!r}; expected {', '.join(self.places)}")


# The page with the answer is one search away. Reading on without need makes the answer harder to find.
ONE_HOP = Question(
    name="one hop",
    start="question",
    turns=4,
    places={
        "question": Place(0.15, 0.4, {"answer": ("found", 0.6), "other": ("distractor", 0.4)}),
        "distractor": Place(0.08, 0.0, {"answer": ("found", 1.0)}),
        "found": Place(0.7, 1.0, {"more": ("crowded", 1.0)}),
        "crowded": Place(0.6, 0.5, {"more": ("crowded", 1.0)}),
    },
)
# The bridge page leads to the answer's page and hardly moves the potential, as on real text (evidence/real, section 2).
TWO_HOPS = Question(
    name="two hops",
    start="question",
    turns=4,
    places={
        "question": Place(0.1, 0.2, {"bridge": ("bridge", 0.6), "other": ("distractor", 0.4)}),
        "distractor": Place(0.06, 0.0, {"bridge": ("bridge", 1.0)}),
        "bridge": Place(0.12, 0.2, {"answer": ("both", 1.0)}),
        "both": Place(0.55, 1.0, {"more": ("crowded", 1.0)}),
        "crowded": Place(0.5, 0.5),
    },
)
QUESTIONS: Mapping[str, Question] = MappingProxyType({q.name: q for q in (ONE_HOP, TWO_HOPS)})
