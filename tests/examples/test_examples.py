"""Every example runs as a user would run it: as a script, in an interpreter of its own, without a word of complaint."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forks import Forks

# in tests/integrations, whose environment has their packages
ELSEWHERE = ("29_trainers", "30_ray_cluster")
FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ELSEWHERE)
INITDB = ("initdb", *map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")))
IMPORT = "from headrace import DataLoader\n"
ON_RANKS = "two_processes"
TORCH_PROGRAMS = [
    path
    for path in EXAMPLES
    if IMPORT in path.read_text() and not path.stem.endswith(ON_RANKS)
]


# torchrun warns where it has to set the first; plt.show() without a screen, by another backend than
# the second.
ALONE = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "template"}


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    """What a program has printed; it must have ended well, and have printed nothing to stderr."""
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


Run = Callable[[Path], str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a program, and give what it prints."""
    with Forks(
        FORK_SERVER_IMPORTS="torch._dynamo", **ALONE
    ) as forks:  # the first optimizer imports it
        yield lambda path: said_by(forks.run_file(path))


@pytest.fixture(scope="module")
def printed_by(run: Run) -> Run:
    """The same, but each example runs once, for all tests that look at what it prints."""
    return functools.cache(run)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, printed_by: Run) -> None:
    if example.stem == "21_postgres_rows" and not any(map(shutil.which, INITDB)):
        pytest.skip("needs Debian's postgresql")
    assert printed_by(example)


@pytest.mark.parametrize("example", TORCH_PROGRAMS, ids=lambda path: path.stem)
def test_with_the_import_of_torchs_loader_it_is_the_same_program_and_prints_the_same(
    example: Path, tmp_path: Path, run: Run, printed_by: Run
) -> None:
    program = tmp_path / example.name
    program.write_text(
        example.read_text().replace(IMPORT, "from torch.utils.data import DataLoader\n")
    )
    assert run(program) == printed_by(example)


def test_the_example_of_two_processes_starts_torchrun_for_itself(printed_by: Run) -> None:
    (example,) = (path for path in EXAMPLES if path.stem.endswith(ON_RANKS))
    printed = printed_by(example)
    assert printed.count("0 in common") == 5
    assert "identical to the last bit" in printed
