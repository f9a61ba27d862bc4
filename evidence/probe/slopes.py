"""Is the change of entropy linear in the learning rate? The slope of log |ΔH| on log η at several checkpoints.

    python evidence/probe/slopes.py --out runs/probe_slopes RUN/checkpoints/global_step_5 RUN/checkpoints/global_step_15 ...

At each checkpoint one update is made from 4 prompts of new rollouts, and its effect is measured on 128 other prompts, as
lab.py does on 804. Rollouts are kept in OUT/RUN-STEP and are not made again. Writes OUT/slopes.json; a checkpoint that is
in it is skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from lab import DECADES, ETAS, UPDATE, one_update, slope

from verl_credit.commands.probe_rollouts import collect, saved_step
from verl_credit.probe.policy import moved, observe
from verl_credit.probe.settings import EstimatorSettings
from verl_credit.probe.truth import entropy_change
from verl_credit.run.tables import ROLLOUTS, table_path

POOL, MICRO = 128, 8
RATE = ETAS.index(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "slopes.json"
    rows = json.loads(results.read_text()) if results.exists() else []
    for checkpoint in args.checkpoints:
        run = checkpoint.resolve().parents[1]
        name = f"{run.parent.name}/{run.name}, {checkpoint.name.removeprefix('global_')}"
        if all(row["checkpoint"] != name for row in rows):
            folder = args.out / f"{run.parent.name}-{run.name}-{checkpoint.name}"
            rows.append({"checkpoint": name, **measure(saved_step(checkpoint), folder)})
            results.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


def measure(saved, folder: Path) -> dict:
    begun = time.time()
    path = table_path(folder, ROLLOUTS, saved.step + 1)
    if not path.exists():
        collect(saved.folder, folder, prompts=POOL + UPDATE)
    made = one_update(saved, path, MICRO)
    pool, unit = made.pool, EstimatorSettings().estimand
    before = observe(made.policy, len(pool), MICRO)
    afters = [
        observe(made.policy, len(pool), MICRO, moved(made.policy.parameters, made.v, factor * made.lr))
        for factor in ETAS
    ]
    at_rate = entropy_change(before, afters[RATE], pool.written_B_T, pool.group_B, unit)
    return {
        "rollouts": len(pool),
        "tokens": int(pool.written_B_T.sum()),
        "change": at_rate.change,
        "se": at_rate.se,
        "ess": at_rate.ess,
        "slopes": {name: slope(pool, before, afters, made.lr, etas) for name, etas in DECADES.items()},
        "seconds": time.time() - begun,
    }


if __name__ == "__main__":
    main()
