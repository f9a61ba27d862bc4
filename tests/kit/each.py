"""Many small cases in one test: pytest takes 2 ms of CPU for a test, more than such a case computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps

import pytest


def each(names: str, cases: Iterable) -> Callable:
    """`pytest.mark.parametrize`, but all cases are one test, which has to be a function of them alone. An error says of
    which case it is."""
    argument_names = [name.strip() for name in names.split(",")]
    cases = list(cases)
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        assert list(inspect.signature(test).parameters) == argument_names, (
            "fixtures would be shared by the cases"
        )

        @wraps(test)
        def all_cases():
            for case in cases:
                try:
                    test(*(case if len(argument_names) > 1 else (case,)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{names}: {case!r:.1500}")
                    raise

        all_cases.__signature__ = inspect.Signature()
        return all_cases

    return decorate
