"""The helper process's order of forks; what is forked is real, and ends at once for want of a boot message."""

import functools
import os
import select
import socket

import pytest

from headrace._core.pool import zygote
from tests.forks import Forks


class Helper:
    """A helper process that is forked from this one."""

    def __init__(self, deadline):
        zygote.LATER_DEADLINE = deadline
        self.control, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self.control.close()
            zygote._serve(theirs)
            os._exit(0)
        theirs.close()

    def request(self, kind):
        """Request a fork; returns the reading end of its status pipe, and the fork's end of its control socket."""
        status, status_of_fork = os.pipe()
        connection = [socket.socketpair() for _ in range(2)]
        records = os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)
        extra = socket.socketpair()
        sockets = (pair[1].fileno() for pair in connection)
        socket.send_fds(self.control, [kind], [status_of_fork, *sockets, *records, *(end.fileno() for end in extra)])
        for descriptor in (status_of_fork, *records):
            os.close(descriptor)
        extra[0].close()
        return status, extra[1]

    def close(self):
        self.control.close()
        assert os.waitpid(self.pid, 0)[1] == 0


def pid_from(status):
    return zygote.EXIT_STATUS.unpack(os.read(status, zygote.EXIT_STATUS.size))[0]


def has_something(status):
    return bool(select.select([status], [], [], 0)[0])


@pytest.fixture(scope="module")
def run():
    with Forks() as forks:
        yield functools.partial(forks.run, timeout=60)


def succeeded(done):
    assert done.returncode == 0, done.stderr


def test_process_that_was_requested_for_later_is_forked_when_another_is_ready(run):
    def program():
        helper = Helper(deadline=3600.0)
        first, control = helper.request(zygote.FORK_WITH_CONTROL)
        later, _ = helper.request(zygote.FORK_LATER)
        after, _ = helper.request(zygote.FORK_WITH_CONTROL)
        assert pid_from(first) > 0
        assert pid_from(after) > 0
        assert not has_something(later), "requests are answered in order, and this one not yet"
        control.send(zygote.READY)
        assert pid_from(later) > 0
        helper.close()

    succeeded(run(program))


def test_process_that_was_requested_for_later_is_forked_after_a_time_if_none_is_ready(run):
    def program():
        helper = Helper(deadline=0.0)
        later, _ = helper.request(zygote.FORK_LATER)
        assert pid_from(later) > 0
        helper.close()

    succeeded(run(program))


def test_process_that_was_requested_for_later_is_not_forked_once_its_requester_has_ended(run):
    def program():
        helper = Helper(deadline=3600.0)
        later, _ = helper.request(zygote.FORK_LATER)
        helper.close()
        assert os.read(later, zygote.EXIT_STATUS.size) == b"", "closed, without a pid"

    succeeded(run(program))
