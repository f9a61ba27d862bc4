"""``probe.*``: the entropy probe inside training (docs/probe.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verl_credit.config.keys.section import Section


class Probe(Section):
    prefix = "probe"

    every: Annotated[int, Field(ge=0)] = 0
    """Every n-th update is compared with its first-order prediction of entropy on the next step's rollouts; 0: off."""
    budget: Annotated[float, Field(ge=0.001, le=1)] = 0.1
    """Largest share of a step's time for the comparison; it sets the number of prompts, at least `probe.groups`."""
    groups: Annotated[int, Field(ge=2, le=100)] = 4
    """Groups of prompts from which the standard error is computed, one backward each."""
