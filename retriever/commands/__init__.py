"""The options that every command has."""

import os

from typer import Option


def _threads(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text}; at least 1")
    # Before NumPy is imported: its matrix products, the exact backend, read this then and never again.
    os.environ["OMP_NUM_THREADS"] = text
    return int(text)


DEVICE = Option("cpu", help="torch device of the encoder")
THREADS = Option(None, parser=_threads, help="CPU threads; default: what torch takes")
