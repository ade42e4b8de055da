"""Jobs that SIGKILL ends in mid-epoch, continued by other ranks where this is promised, read each sample once."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from tests.faults.programs import epochs
from tests.faults.programs.epochs import KINDS, N
from tests.faults.watching import session_of
from tests.forks import Forks

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

# Ranks, and the batches of each until SIGKILL; 0 for all.
STARTS = ((2, 4), (3, 2), (1, 0))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    epochs.write_shards(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in KINDS),
        *((name, {"num_workers": 2}) for name in ("elastic sampler", "lines")),
        ("tar, shuffled", {"placement": "process"}),
    ],
)
def test_killed_jobs_continue_with_each_sample_once(
    name: str, options: dict[str, Any], forks: Forks, shards: Path, tmp_path: Path
) -> None:
    kind, state, given = KINDS[name], None, collections.Counter[int]()
    for start, (ranks, killed_after) in enumerate(STARTS):
        ranks = ranks if kind.global_cursor else STARTS[0][0]
        paths = [tmp_path / f"{start}-{rank}.json" for rank in range(ranks)]
        with contextlib.ExitStack() as stack:
            programs = []
            for rank, path in enumerate(paths):
                program = functools.partial(
                    epochs.rank, name, shards, path, state, options, killed_after
                )
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                }
                programs.append(stack.enter_context(forks.start(program, **variables)))
            for program in programs:
                saved = program.stdout.readline()
                assert saved == "saved\n", program.communicate()[1]
            for program in programs:
                with contextlib.suppress(ProcessLookupError):
                    program.send_signal(signal.SIGKILL)
            for program in programs:
                assert program.wait() in (-signal.SIGKILL, 0), program.communicate()[1]
                for pid in session_of(program.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        read = [json.loads(path.read_text()) for path in paths]
        given.update(sample for each in read for sample in each["given"])
        states = [each["state"] for each in read]
        state = (
            states[0]
            if kind.global_cursor
            else json.loads(json.dumps(hr.merge_states(states)))
        )
        assert not kind.state_bytes or len(json.dumps(state)) < kind.state_bytes
    assert given == collections.Counter(range(N))
