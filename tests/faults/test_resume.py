"""Jobs that SIGKILL ends at random, continued by other ranks, workers and batches, read each sample once.

Each run is one epoch. `HEADRACE_RESUME_RUNS` is the number of runs of each kind of dataset.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from tests.faults.conftest import SCRIPT_TIMEOUT, session_of
from tests.faults.programs import epochs
from tests.faults.programs.epochs import KINDS, Kind, N
from tests.forks import Forks, Program

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

RUNS = int(os.environ.get("HEADRACE_RESUME_RUNS", "0"))
KILLS = 3 if RUNS else 2
RANKS = 4  # at most
IN_PROCESS = 4 if RUNS else 12  # the weight of loaders without processes, which are the quickest


def fields_of(state: dict[str, Any]) -> dict[str, Any]:
    """The fields of a saved state."""
    (fields,) = state["state"]
    return fields  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    epochs.write_shards(folder)
    return folder


@pytest.mark.parametrize("number", range(RUNS or 1))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_restarted_jobs_give_each_sample_once(
    kind: str, number: int, forks: Forks, shards: Path, tmp_path: Path
) -> None:
    Epoch(kind, number, forks, shards, tmp_path).run()


class Epoch:
    """One epoch of a job, over several starts."""

    def __init__(self, name: str, number: int, forks: Forks, shards: Path, folder: Path) -> None:
        self.name = name
        self.kind: Kind = KINDS[name]
        # Whether the states of all ranks are merged into one, which any number of ranks can load.
        self.is_merged = not self.kind.global_cursor
        self.draw = random.Random(f"{name} {number}")
        self.forks = forks
        self.shards = shards
        self.folder = folder
        self.given: list[int] = []
        self.states: list[Any] = [None]  # of each rank
        self.story: list[object] = []

    def run(self) -> None:
        most = 1
        for start in range(KILLS + 1):
            ranks = self.number_of_ranks()
            most = max(most, ranks)
            options = self.options(ranks)
            kill_at = None if start == KILLS else self.draw.randrange(1, 2 + N // (4 * ranks * options["batch_size"]))
            self.story.append((ranks, options, kill_at))
            try:
                if self.start(str(start), ranks, options, kill_at):
                    break
            except BaseException as error:
                error.add_note(f"{self.name}: {self.story}")
                raise
        count, every = collections.Counter(self.given), collections.Counter(range(N))
        twice, missing = count - every, every - count
        again = min(self.kind.unequal, most - 1) + KILLS * most * self.kind.buffer
        assert twice.total() <= again, (twice, self.story)
        assert not missing, (missing, self.story)

    def number_of_ranks(self) -> int:
        if self.states[0] is not None and fields_of(self.states[0])["rank"] is not None and not self.is_merged:
            return len(self.states)  # batches out of order: only the same ranks can continue
        return self.draw.randint(1, RANKS)

    def options(self, ranks: int) -> dict[str, Any]:
        workers, placement = self.draw.choice(
            [(0, "thread")] * IN_PROCESS + [(0, "process"), (2, "process"), (2, "thread")]
        )
        return {
            "num_workers": workers,
            "placement": placement,
            # Of ranks that share an order, states of batches out of order could not be loaded by other ranks.
            "in_order": self.is_merged or ranks > 1 or self.draw.random() < 0.5,
            "batch_size": self.draw.choice([1, 2, 3, 5]),
        }

    def start(self, prefix: str, ranks: int, options: dict[str, Any], kill_at: int | None) -> bool:
        """Run the ranks until one has ended or been killed; returns whether all have ended the epoch."""
        states = self.states_to_load(ranks)
        with contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(self.start_rank(f"{prefix}-{rank}", rank, ranks, states[rank], options, kill_at))
                for rank in range(ranks)
            ]
            ended = [self.has_ended(program, kill_at) for program in running]
            for program in running:
                with contextlib.suppress(ProcessLookupError):
                    program.send_signal(signal.SIGKILL)
            for program in running:
                assert program.wait(SCRIPT_TIMEOUT) in (-signal.SIGKILL, 0), program.communicate(SCRIPT_TIMEOUT)
                for pid in session_of(program.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        saved = [self.saved_at(f"{prefix}-{rank}", kill_at) for rank in range(ranks)]
        self.states = [each["state"] for each in saved]
        self.given += [sample for each in saved for sample in each["given"]]
        return all(ended)

    def states_to_load(self, ranks: int) -> list[Any]:
        if self.states[0] is None:
            return [None] * ranks
        if self.kind.global_cursor and all(fields_of(state)["rank"] is None for state in self.states):
            return [self.draw.choice(self.states)] * ranks
        return [json.loads(json.dumps(hr.merge_states(self.states)))] * ranks if self.is_merged else self.states

    def start_rank(
        self, prefix: str, rank: int, ranks: int, state: Any, options: dict[str, Any], kill_at: int | None
    ) -> Program:
        last_step = 0 if kill_at is None else kill_at + self.draw.randrange(4)
        program = functools.partial(
            epochs.rank, self.name, self.shards, self.folder / prefix, state, options, last_step
        )
        variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        if not options["num_workers"] and options["placement"] == "thread":
            variables["OWN_ZYGOTE"] = "1"  # which it does not need
        return self.forks.start(program, **variables)

    def has_ended(self, program: Program, kill_at: int | None) -> bool:
        """Wait until a rank has saved its state at a step, or its epoch has ended before."""
        for line in program.stdout:
            if line == "end\n" or int(line) == kill_at:
                return line == "end\n"
        raise AssertionError(f"a rank failed:\n{program.communicate(SCRIPT_TIMEOUT)[1]}")

    def saved_at(self, prefix: str, kill_at: int | None) -> Any:
        """What a rank had saved at the step; what it was given later is rolled back."""
        steps = {int(path.stem.rpartition("-")[2]): path for path in self.folder.glob(f"{prefix}-*.json")}
        saved = json.loads(steps[min(kill_at or N, max(steps))].read_text())
        if self.kind.state_bytes and not fields_of(saved["state"])["delivered"]:
            assert len(json.dumps(saved["state"])) < self.kind.state_bytes, saved["state"]
        return saved
