"""Dense retrieval over a JSONL corpus."""

import sys

from typer import Typer

from verl_credit_retriever.commands.check import check
from verl_credit_retriever.commands.index import index
from verl_credit_retriever.commands.serve import deploy, serve, undeploy

app = Typer(
    help=__doc__,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=sys.exit,
)
app.command(help="encode a corpus and write an index")(index)
app.command(help="answer POST /retrieve and POST /v1/search")(serve)
app.command(help="answer the same on a running Ray cluster: the index in shards, each with replicas")(deploy)
app.command(help="take the deployment away again")(undeploy)
app.command(help="compare what is served with exact search")(check)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `check` reports a problem, 2 a wrong argument or input (one line says which), 4 the port
    is in use.
    """
    try:
        app(arguments, prog_name="verl-credit-retriever")
    except SystemExit as end:
        return end.code or 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
