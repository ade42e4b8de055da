"""Training programs for the tests of integrations, run by one or several ranks."""

from __future__ import annotations

import contextlib
import functools
import mmap
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace._torchcompat import portable_collate
from tests.forks import Forks
from tests.rendezvous import Rendezvous


class Launcher:
    """Starts ranks as torchrun does, in forks of an interpreter that has imported a trainer; a context manager.

    Args:
        imports: names of the modules that it imports.
    """

    def __init__(self, *imports: str) -> None:
        self._forks = Forks(
            FORK_SERVER_IMPORTS=" ".join(
                ("tests.integrations.torchvision_ops", *imports)
            ),
            OMP_NUM_THREADS="1",
        )

    def run(
        self, program: Callable[..., Any], *arguments: Any, ranks: int = 1
    ) -> list[Any]:
        """Run a program in each rank; with one, no launcher's variables are set. Returns what each rank returned.

        Raises:
            AssertionError: a rank ended with an error, or was killed; with its output.
        """
        ended, results = self.run_to_end(program, *arguments, ranks=ranks)
        assert not any(status for status, _ in ended), "\n".join(
            output for _, output in ended
        )
        return results

    def run_to_end(
        self, program: Callable[..., Any], *arguments: Any, ranks: int = 1
    ) -> tuple[list[tuple[int, str]], list[Any]]:
        """As `run`, of a program that may be killed or fail: status and output of each rank, and what each returned."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            files = [Path(folder, f"rank{rank}") for rank in range(ranks)]
            meeting = Rendezvous(ranks)
            variables = launchers_variables(meeting, ranks)
            programs = [
                stack.enter_context(
                    self._forks.start(
                        functools.partial(_report, file, program, arguments), **each
                    )
                )
                for file, each in zip(files, variables, strict=True)
            ]
            outputs = ["".join(each.communicate()) for each in programs]
            ended = [
                (each.wait(), output)
                for each, output in zip(programs, outputs, strict=True)
            ]
            results = [
                pickle.loads(file.read_bytes()) if file.exists() else None
                for file in files
            ]
        return ended, results

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._forks.__exit__(*exc_info)


def launchers_variables(meeting: Rendezvous, ranks: int) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun sets it; empty for a single process."""
    if ranks == 1:
        return [{}]
    names = {
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    common = {**meeting.variables, **names}
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


def _report(file: Path, program: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # a byte that forks share: here with the programs before this one
    portable_collate._warned = mmap.mmap(-1, 1)
    result = program(*arguments)
    file.write_bytes(pickle.dumps(result))
