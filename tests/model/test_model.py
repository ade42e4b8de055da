"""Random programs give what the reference gives, and the reference gives what torch gives."""

import os
import random
import time

import pytest

from tests.model import programs, run

SEED = int(
    os.environ.get("HEADRACE_MODEL_SEED", random.SystemRandom().randrange(1 << 32))
)
SECONDS = 14  # of each test below: with the comparison with torch 90 s in all


def compare(part, *, processes):
    """Compare as many programs as fit into the time."""
    until = time.monotonic() + SECONDS
    seed = SEED + part * 100_000
    while time.monotonic() < until:
        case = run.program(seed, processes=processes)
        if programs.difference(case) is not None:
            pytest.fail(
                f"HEADRACE_MODEL_SEED={SEED}, program {seed}:\n{run.report(case, 40)}",
                pytrace=False,
            )
        seed += 1
    print(
        f"HEADRACE_MODEL_SEED={SEED}: {seed - SEED - part * 100_000} programs, processes={processes}"
    )


@pytest.mark.parametrize("part", range(3))
def test_programs_in_one_process_give_what_the_reference_gives(part):
    compare(part, processes=False)


@pytest.mark.parametrize("part", range(3))
def test_programs_with_processes_give_what_the_reference_gives(part):
    compare(part, processes=True)


def test_the_reference_gives_what_torch_gives():
    """Of programs without features of headrace."""
    compared = 0
    for seed in range(SEED, SEED + 400):
        case = programs.of_torch_alone(run.program(seed, processes=False))
        source = programs.source_of(case)
        expected, given = programs.of_torch(source)[0], programs.of_reference(source)[0]
        assert given == expected, programs.paste(case)
        compared += len(expected) > 0
    assert compared > 200
