"""`verl-credit lineage render` writes KNOWLEDGE.md from the trials of a folder."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from verl_credit.cli.command import PLAIN, ends
from verl_credit.errors import printable
from verl_credit.records.lineage import LineageStore
from verl_credit.records.run.files import write_text

lineage = Typer(help="the trials of a folder, as `train` writes them down", **PLAIN)
refusals = ends("lineage --dir {folder}", OSError, to="stderr")
Store = Annotated[Path, Option("--dir", help="folder of the trials (results.tsv)")]
Lower = Annotated[bool, Option("--lower-is-better", help="a smaller core_metric is better")]
Out = Annotated[Path | None, Option(help="the file; none: KNOWLEDGE.md in the folder")]
STORE = Path("runs/lineage")


@lineage.command(help="write KNOWLEDGE.md, to be read before the next trial")
@refusals
def render(
    folder: Store = STORE,
    out: Out = None,
    specialist: Annotated[str, Option("--for", help="who reads it")] = "verl-credit",
    lower_is_better: Lower = False,
) -> None:
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    text = _open(folder, lower_is_better).render_prompt(specialist, session_timestamp=now)
    print(write_text(out or folder / "KNOWLEDGE.md", text))


def _open(folder: Path, lower_is_better: bool = False) -> LineageStore:
    """Opens a store and names its damaged lines."""
    store = LineageStore(folder, lower_is_better=lower_is_better)
    if not store.path.exists():
        raise FileNotFoundError(f"{store.path} is not there; --dir names the folder of a table of trials")
    for one in store.damaged():
        print(f"not read: {printable(one)}", file=sys.stderr)
    return store
