"""A program on several ranks, in forks of one interpreter."""

import contextlib
import json
import os

from tests.rendezvous import Rendezvous


def outputs_of(forks, program, environments):
    """What each rank prints, a JSON value; each rank has an environment."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(forks.start_file(program, **each))
            for each in environments
        ]
        printed = [process.communicate() for process in processes]
    assert all(text for text, _ in printed), printed
    return [json.loads(text) for text, _ in printed]


def outputs(forks, program, ranks, **environment):
    """The same of ranks that meet at a TCP store, as those of torchrun do."""
    meeting = Rendezvous(ranks)
    return outputs_of(
        forks,
        program,
        [
            {"RANK": str(rank), **meeting.variables, **environment}
            for rank in range(ranks)
        ],
    )


def answer(value):
    """Print what a rank returns, and end the rank: the ordinary way out now and then aborts in gloo's threads."""
    print(json.dumps(value), flush=True)
    os._exit(0)
