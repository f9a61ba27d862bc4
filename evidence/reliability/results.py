"""Where results lie: in the folder that RELIABILITY names (`make reliability` says build/reliability), else with the published."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("RELIABILITY") or Path(__file__).parent).resolve()
FOLDER.mkdir(parents=True, exist_ok=True)
