"""Copy what a campaign's report reads out of its runs: `python evidence/campaigns/keep.py RUNS KEPT`.

A metric that is measured in training is kept alone, without the others of its file.

`verl-credit campaign report KEPT` makes the report again, and `verl-credit campaign run FILE --dir COPY_OF_KEPT` goes on
with the runs that are missing: these files say what is done. raw.tar.xz holds such folders (evidence/archive.py).
"""

import json
import sys
from pathlib import Path

from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, read_json_lines
from verl_credit.study.campaign.record import CONDITION, RECORD, read_record

if __name__ == "__main__":
    source, kept = (Path(argument).resolve() for argument in sys.argv[1:])
    metric = read_record(source).campaign.metric  # or it is no campaign's folder
    names = (CONDITION, EVENTS, VALIDATION) if metric.held_out else (CONDITION, EVENTS, VALIDATION, METRICS)
    files = [source / RECORD, *(path for name in names for path in source.rglob(name))]
    for path in files:
        target = kept / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == METRICS:
            rows = [{key: row[key] for key in ("step", metric.name)} for row in read_json_lines(path)]
            target.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            target.write_text(path.read_text().replace(f"{source.parent}/", ""))  # no paths of the machine
    print(f"{len(files)} files in {kept}")
