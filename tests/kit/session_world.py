"""Two agents whose rollouts can all be listed: one resets its context, the other asks a sub-agent.

The policy is a table: its chance of an action depends on the context, which is what it reads in the output at hand. After a
reset, and from a sub-agent's report, it cannot tell which page was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kit.turn_rows import Row
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.sessions import Link

POLICY = {
    "Q": {"atlas": 0.4, "blog": 0.35, "stop": 0.25},
    "Qatlas page ": {"tell": 0.3, "reset": 0.7},
    "Qblog page ": {"tell": 0.4, "reset": 0.6},
    "One page was read": {"tell": 0.3, "more": 0.3, "reset": 0.4},
    "One page was readmore page ": {"yes": 0.6, "no": 0.4},
    "Two resets": {"yes": 0.55, "no": 0.45},
    "P": {"ask": 0.7, "stop": 0.3},
    "Find it": {"atlas": 0.6, "blog": 0.4},
    "One page was found": {"yes": 0.7, "no": 0.3},
    "Find itblog page ": {"yes": 0.4, "no": 0.6},
    "Pask yes ": {"yes": 0.65, "no": 0.35},
    "Pask no ": {"yes": 0.45, "no": 0.55},
}
"""The chance of every action by context."""
CHOICES = [(context, action) for context, chances in POLICY.items() for action in chances]
CONTEXT_D = torch.tensor([list(POLICY).index(context) for context, _ in CHOICES])
LOGIT_D = torch.tensor([POLICY[context][action] for context, action in CHOICES], dtype=torch.float64).log()


@dataclass
class Output:
    """A context: the prompt, what the policy wrote, and what it read."""

    prompt: str
    link: Link = (0, None)
    parts: list[str] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def reads(self, text: str, earned: float) -> None:
        """The observation after a turn that earned so much."""
        self.parts.append(text)
        self.rewards.append(earned)


Turn = Callable[[Output], str]
Agent = Callable[[Turn], tuple[list[Output], float]]
"""A function of the policy that returns the outputs and the outcome."""


def forgetful(turn: Turn) -> tuple[list[Output], float]:
    """Reads a page, and may begin anew with a note that does not name it. It should say yes after the atlas alone."""
    first = Output("Q")
    page = turn(first)
    if page == "stop":
        return [first], 0.0
    right = {"tell": page == "atlas", "yes": page == "atlas", "no": page == "blog"}
    first.reads(" page ", 0.5 * right["yes"])
    if (said := turn(first)) == "tell":
        return [first], float(right[said])
    first.rewards.append(0.25 * right["no"])
    second = Output("One page was read")
    if (said := turn(second)) == "tell":
        return [first, second], float(right[said])
    if said == "more":
        second.reads(" page ", 0.5)
        return [first, second], float(right[turn(second)])
    second.rewards.append(0.0)
    third = Output("Two resets")
    return [first, second, third], float(right[turn(third)])


def delegating(turn: Turn) -> tuple[list[Output], float]:
    """Asks a sub-agent, which may reset its context, and reads its report: yes or no, without the page."""
    parent, helpers = Output("P"), [Output("Find it", (1, (0, 0)))]
    if turn(parent) == "stop":
        return [parent], 0.0
    page = turn(helpers[0])
    if page == "atlas":
        helpers[0].rewards.append(0.5)
        helpers.append(Output("One page was found", (1, (0, 0))))
    else:
        helpers[0].reads(" page ", 0.25)
    report = turn(helpers[-1])
    helpers[-1].rewards.append(0.5 * (report == "yes"))
    parent.reads(f" {report} ", 0.25)
    return [*helpers, parent], float((turn(parent) == report) == (page == "atlas"))


Outputs = list[tuple[Row, list[int], Link]]
"""(row, the choice of each of its turns, link)"""


@dataclass(frozen=True)
class Rollout:
    outputs: list[Output]
    outcome: float
    choices: list[int]
    """Its turns in the order of time."""
    rewards: list[float]
    """Of all turns but the last, in this order."""
    read: list[str]
    """What the policy reads before each turn and not before: a prompt, or an observation."""

    def as_returned(self) -> Outputs:
        """A row for each output, as agent loops return them."""
        return [_row(o.prompt, o.parts, o.choices, o.rewards, o.link) for o in self.outputs]

    def as_one(self) -> Outputs:
        """The rollout as one output, in which each later prompt is an observation."""
        first, *others = (CHOICES[choice][1] for choice in self.choices)
        later = zip(self.read[1:], others, strict=True)
        return [_row(self.read[0], [first, *sum(later, ())], self.choices, self.rewards)]


def _row(prompt: str, parts: list[str], choices: list[int], rewards: list[float], link: Link = (0, None)):
    record = RowRecord(states=[CHOICES[choice][0] for choice in choices])
    return Row(tuple(parts), prompt, record=record, turn_rewards=tuple(rewards)), choices, link


def every_rollout(agent: Agent) -> list[Rollout]:
    """Plays the agent until each choice that it comes to was made."""
    waiting: list[list[str]] = [[]]
    found = []
    while waiting:
        planned = waiting.pop()
        turns: list[tuple[Output, int]] = []
        read: list[str] = []

        def turn(output, planned=planned, turns=turns, read=read) -> str:
            context = output.prompt + "".join(output.parts)
            if len(turns) == len(planned):
                first, *others = POLICY[context]
                waiting.extend([*planned, other] for other in others)
                planned.append(first)
            action = planned[len(turns)]
            read.append(output.parts[-1] if output.parts else output.prompt)
            turns.append((output, len(output.choices)))
            output.choices.append(CHOICES.index((context, action)))
            output.parts.append(action)
            return action

        outputs, outcome = agent(turn)
        choices = [output.choices[n] for output, n in turns]
        rewards = [output.rewards[n] for output, n in turns[:-1]]
        found.append(Rollout(outputs, outcome, choices, rewards, read))
    return found
