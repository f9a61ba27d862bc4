"""Where results and runs lie. RELIABILITY is a folder for both (`make reliability`: build/reliability), so that nothing of
another commit is in it. Where it is not set, results lie where `make evidence-raw` unpacks those published, and runs in
runs/reliability.
"""

import os
from pathlib import Path

OWN = os.environ.get("RELIABILITY")
FOLDER = Path(OWN or Path(__file__).resolve().parents[2] / "build" / "evidence" / "reliability").resolve()
RUNS = FOLDER / "runs" if OWN else Path("runs/reliability").resolve()
FOLDER.mkdir(parents=True, exist_ok=True)
