"""What a new process inherits and keeps: changes of it are seen."""

import os
import resource
import threading

import pytest

from headrace._core.pool.inherited import Inherited

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


def test_it_is_equal_as_long_as_nothing_changes():
    assert Inherited.here() == Inherited.here()


def set_variable():
    os.environ["HEADRACE_TEST_INHERITED"] = "1"
    return lambda: os.environ.pop("HEADRACE_TEST_INHERITED")


def set_umask():
    before = os.umask(0o027)
    return lambda: os.umask(before)


def set_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if soft != 1 else 0, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def set_cores():
    """Leave out a core, of this thread only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[1:])
    return lambda: os.sched_setaffinity(0, before)


@pytest.mark.parametrize("change", [set_variable, set_umask, set_limit, set_cores])
def test_a_change_is_seen_and_so_is_its_end(change):
    if change is set_cores and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core")
    seen = []

    def in_a_thread():
        before = Inherited.here()
        undo = change()
        seen.append(Inherited.here() != before)
        undo()
        seen.append(Inherited.here() == before)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == [True, True]
