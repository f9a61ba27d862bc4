"""What several measurements with --gradient say together: of every credit own cosine minus GRPO's on every policy.

    python evidence/fidelity/gradients_table.py gradients_seed_2.json MEASURED [MEASURED ...]
    python evidence/fidelity/gradients_table.py gradients_seed_2.json       # the table alone

MEASURED: folders of `verl-credit fidelity RUNS/grpo/seed-S-world-W --gradient --dir MEASURED`. Writes the named file beside
this one (a part of each `fidelity.json`) and prints the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from learning import policies_of

HERE = Path(__file__).parent
KEPT = ("own", "own_difference", "bias", "signal_to_noise")


def kept_of(name: str, policy: dict) -> dict:
    return {
        "policy": name,
        **{key: policy[key] for key in ("prompts", "turns", "contexts", "reliability", "integrity")},
        "pearson": {name: of.get("pearson") for name, of in policy["credits"].items()},
        "gradients": {name: {key: of.get(key) for key in KEPT} for name, of in policy["gradients"].items()},
    }


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [rounded(of) for of in value]
    return round(value, 4) if isinstance(value, float) else value


def table(policies: list[dict]) -> str:
    lines = [
        f"{len(policies)} policies: {'; '.join(policy['policy'] for policy in policies)}",
        "",
        "| credit | mean | above GRPO, beyond its interval | below, beyond | correlation with A* |",
        "|---|---|---|---|---|",
    ]
    for name in policies[0]["gradients"]:
        found = known(policy["gradients"][name]["own_difference"] for policy in policies)
        r = [one["value"] for one in known(policy["pearson"].get(name) for policy in policies)]
        if not found or not r or name.startswith("this run"):
            continue
        above, below = ([one for one in found if sign * one["value"] > 0] for sign in (1, -1))
        sure = sum(one["low"] > 0 for one in above), sum(one["high"] < 0 for one in below)
        lines.append(
            f"| {name} | {fmean(one['value'] for one in found):+.3f} | {len(above)}, {sure[0]} | {len(below)}, {sure[1]} | "
            f"{fmean(r):.2f} |"
        )
    return "\n".join(lines)


def known(found) -> list[dict]:
    return [one for one in found if one and one["value"] is not None]


def main() -> None:
    file, folders = HERE / sys.argv[1], [Path(folder) for folder in sys.argv[2:]]
    if folders:
        lines = ",\n".join(json.dumps(rounded(kept_of(*of))) for of in policies_of(folders).items())
        file.write_text(f'{{"policies": [\n{lines}\n]}}\n')
    print(table(json.loads(file.read_text())["policies"]))


if __name__ == "__main__":
    main()
