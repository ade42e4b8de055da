"""The helper thread of an engine without workers."""

import pytest

from headrace._engine.executors import ThreadExecutor
from headrace._ranks.rankinfo import RankInfo


async def test_error_outside_of_user_code_is_raised_and_the_thread_goes_on():
    executor = ThreadExecutor(RankInfo(0, 1, "the test"), deferred=False)
    executor.open()

    def fail(raw):
        raise OSError("too many open files")

    with pytest.raises(OSError, match="too many open files"):
        await executor.assemble(None, fail)
    assert await executor.assemble(None, lambda raw: "a batch") == "a batch"
    await executor.close(10.0)
