"""Tests that are themselves the program that a fixture runs: in a child process, or with two loaders."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

GIVEN = {
    "DataLoader",
    "ledger",
}  # parameters that the fixture itself gives to its programs, by position


def run_by(
    fixture: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test that `fixture` runs, with these options of it; the test's own fixtures travel with it."""

    def decorate(program: Callable[..., Any]) -> Callable[..., None]:
        own = [
            one
            for one in inspect.signature(program).parameters.values()
            if one.name not in GIVEN
        ]

        @functools.wraps(program)
        def test(**values: Any) -> None:
            run = values.pop(fixture)
            run(functools.partial(program, **values), **options)

        runner = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([runner, *own])  # type: ignore[attr-defined]
        return test

    return decorate
