"""Copy what a campaign's report reads out of its runs: `python evidence/campaigns/keep.py RUNS KEPT`.

`verl-credit campaign report KEPT` makes the report again. `verl-credit campaign run FILE --dir COPY_OF_KEPT` goes on with
the runs that are missing: what is done is told by these files.
"""

import sys
from pathlib import Path

from verl_credit.campaign.record import CONDITION, RECORD, read_record
from verl_credit.run.files import EVENTS, VALIDATION

if __name__ == "__main__":
    source, kept = (Path(argument).resolve() for argument in sys.argv[1:])
    read_record(source)  # or it is no campaign's folder
    files = [
        source / RECORD,
        *(path for name in (CONDITION, EVENTS, VALIDATION) for path in source.rglob(name)),
    ]
    for path in files:
        target = kept / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace(f"{source.parent}/", ""))  # no paths of the machine
    print(f"{len(files)} files in {kept}")
