"""Where results lie: in the folder RELIABILITY (`make reliability`: build/reliability), else with those published here."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("RELIABILITY") or Path(__file__).parent).resolve()
FOLDER.mkdir(parents=True, exist_ok=True)
