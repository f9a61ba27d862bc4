"""The `verl-credit` command."""

import os
import sys
from importlib import import_module
from importlib.metadata import version

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from verl_credit.cli.command import PLAIN
from verl_credit.cli.gone import gone_word

COMMANDS = {
    "train": ("train.train", "run a recipe on verl's trainer"),
    "twin": ("train.train", "train in the lab in one process, without Ray: a run's twin, in minutes"),
    "lab": ("prepare", "build the lab's world, policy, encoder and index"),
    "doorkey": ("prepare", "build the tasks and the policy of the recipe doorkey"),
    "real": ("prepare", "make the policy, the encoder and the files of the real_* recipes"),
    "prepare": ("prepare", "write verl's parquet files from a published question set"),
    "prepare env": ("prepare", "write verl's parquet files of an environment, a row for each seed"),
    "prepare check": ("prepare", "can the rows of a file train? and how the policy sees one"),
    "report": ("report", "write the report of a run or a campaign"),
    "evaluate": ("evaluate.evaluate", "a run's policy or a model on held-out questions, with its tools"),
    "evaluate compare": ("evaluate.evaluate", "the paired difference of two evaluations"),
    "probe": ("probe", "does a saved step's update change the entropy as first order says?"),
    "fidelity": ("fidelity.fidelity", "does each mode's credit agree with the true advantages of turns?"),
    "bench": ("bench", "what is a turn mode worth? exact bias, learning in exact worlds, own cosine"),
    "adopt": ("recipe.adopt", "make a recipe with turn credit of your launch of verl.trainer.main_ppo"),
    "run": ("run", "start a command that launches verl; its launches are adopted and train"),
    "explain": ("recipe.show", "show the pipeline that a recipe with overrides would run"),
    "doctor": ("recipe.doctor", "check this machine, and what a recipe asks of it"),
    "diff": ("recipe.show", "what differs between two runs or recipes"),
    "plan": ("recipe.plan", "predict memory, time and disk of a recipe; says whether it fits"),
    "check": ("check", "run the laws on an operator of yours, or on all of ours"),
    "modes": ("pages", "print docs/modes.md"),
    "keys": ("pages", "print docs/keys.md"),
    "lineage": ("lineage", "the trials of a folder, as `train` writes them down"),
    "campaign": ("campaign", "several conditions with several seeds, and what can be concluded from them"),
}
"""Each command's file and its line in --help. A function of the command's name has the options and does the work."""


class Commands(TyperGroup):
    """Imports a command's file when the command is called. A command's name may have two words: `prepare check`."""

    def resolve_command(self, ctx, args):
        two = " ".join(args[:2])
        name, _, rest = super().resolve_command(ctx, [two, *args[2:]] if two in COMMANDS else args)
        file, text = COMMANDS[name]
        function = getattr(import_module(f"{__name__}.{file}"), name.replace(" ", "_"))
        if isinstance(function, Typer):
            return name, get_group(function), rest
        command = Typer(**PLAIN)
        command.command(help=text)(function)
        return name, get_command(command), rest


# A command returns its exit code. A wrong command line ends with 2, Ctrl-C with 130.
app = Commands(
    name="verl-credit",
    help=__doc__,
    commands={name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()},
    rich_markup_mode=None,
    result_callback=sys.exit,
)


def main(argv: list[str] | None = None) -> int:
    line = sys.argv[1:] if argv is None else argv
    if line == ["--version"]:
        print(f"verl-credit {version('verl-credit')}")
        return 0
    if gone := gone_word(line):
        print(gone, file=sys.stderr)
        return 2
    # `python -m verl.trainer.main_ppo` finds an author's modules in the current folder, and so do Ray's workers.
    if argv is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        app(argv, prog_name="verl-credit")
    except SystemExit as end:
        return end.code or 0
