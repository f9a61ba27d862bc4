"""The group that the report opens with: every turn's credit beside GRPO's."""

import re

from verl_credit.records.report.text import Scale, signed

GIST = 60
_QUERY = re.compile(r'"query":\s*\[?\s*"(.*?)"', re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKS = re.compile(r"<think>.*?</think>|<[^<>]*>", re.DOTALL)


def gist(text: str) -> str:
    """What a turn asks or answers, in one line; all of it but its thoughts and marks where neither is found."""
    found = _QUERY.search(text) or _ANSWER.search(text)
    line = " ".join((found[1] if found else _MARKS.sub(" ", text)).split())
    return line if len(line) <= GIST else f"{line[: GIST - 1]}\N{HORIZONTAL ELLIPSIS}"


def opening(group: dict, scale: Scale) -> dict:
    """The lens's ``group`` as the template reads it. Bars are in percent of their width, with 0 in the middle.

    A difference is one from ``factor`` times GRPO's credit: another standard deviation is none."""
    ours, grpo, rollouts = group["advantage"], group["grpo"], group["rollouts"]
    pairs = {(r, k): (ours[r][k], grpo[r][k]) for r in range(len(rollouts)) for k in range(len(ours[r]))}
    reach = max(scale.limit, *(abs(value) for pair in pairs.values() for value in pair))
    apart = {at: abs(credit - group["factor"] * theirs) for at, (credit, theirs) in pairs.items()}
    most = max(apart, key=apart.__getitem__)
    counts = scale.counts(apart[most])

    def turn(r: int, k: int) -> dict:
        credit, theirs = pairs[r, k]
        written = zip(rollouts[r]["text"], rollouts[r]["turn"], strict=True)
        width = 50 * abs(credit) / reach
        return {
            "gist": gist("".join(piece for piece, at in written if at == k)),
            "reward": rollouts[r]["turns"][k]["reward"],
            "ours": signed(credit),
            "grpo": signed(theirs),
            "sign": ("more" if credit > 0 else "less") if scale.counts(credit) else "noise",
            "left": 50 - width if credit < 0 else 50,
            "width": width,
            "mark": 50 + 50 * theirs / reach,
            "most": counts and (r, k) == most,
        }

    rows = [[turn(r, k) for k in range(len(ours[r]))] for r in range(len(rollouts))]
    row, column = most
    name = "the answer" if column == len(rows[row]) - 1 else f"turn {column + 1}"
    return {
        "turns": max(map(len, rows)) - 1,
        "rows": list(zip(rollouts, rows, strict=True)),
        "right": sum(rollout["right"] for rollout in rollouts),
        "most": f"rollout {row + 1}, {name}" if counts else "",
        "scaled": signed(group["factor"] * pairs[most][1]) if scale.counts(1.0 - group["factor"]) else "",
        "at": rows[row][column],
    }
