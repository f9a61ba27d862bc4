"""Options of commands: each is declared once, in the annotation of a dataclass field or of a parameter."""

import os
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Annotated, get_origin

from typer import Option


def number(text: str, *names: str, parser: Callable = int):
    """An option that takes an integer, or what `parser` reads; `names` replace the one of the field."""
    return Option(*names, parser=parser, help=text)


def takes(*declared: type, only: tuple[str, ...] = ()) -> Callable:
    """Give a command the annotated fields of these dataclasses as options; it gets their values as `**values`.

    A parameter that the command declares itself replaces the field of its name. `only` chooses among the fields.
    """

    def add(command: Callable) -> Callable:
        own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        fields = [
            field.replace(kind=Parameter.KEYWORD_ONLY)
            for settings in declared
            for field in signature(settings).parameters.values()
            if get_origin(field.annotation) is Annotated and field.name not in names
            if not only or field.name in only
        ]
        command.__signature__ = Signature([*own, *fields])
        command.__annotations__ = {p.name: p.annotation for p in (*own, *fields)}
        return command

    return add


def _threads(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text}; at least 1")
    # This is set before NumPy is imported: its matrix products, the exact backend, read it then and never again.
    os.environ["OMP_NUM_THREADS"] = text
    return int(text)


Threads = Annotated[int | None, number("CPU threads; default: what torch takes", parser=_threads)]
Device = Annotated[str, Option(help="torch device of the encoder")]
