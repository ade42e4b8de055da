"""A program on several ranks that meet at a TCP store, as those of torchrun do."""

import contextlib
import json

from tests.rendezvous import Rendezvous

TIMEOUT = 120  # seconds; a rank that waits for another for ever


def outputs(forks, program, ranks, **environment):
    """What each rank prints, a JSON value."""
    meeting = Rendezvous(ranks)
    common = {**meeting.variables, **environment}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(forks.start_file(program, RANK=str(rank), **common)) for rank in range(ranks)]
        printed = [process.communicate(TIMEOUT) for process in processes]
    assert all(text for text, _ in printed), printed
    return [json.loads(text) for text, _ in printed]
