"""Workers of a `multiprocessing` context: their end is seen also where another process has a part in it."""

import multiprocessing
import os
import signal

from torch.utils.data import Dataset

import headrace as hr
from headrace._pool.launch import _ContextProcess
from tests.faults.watching import run_in_fork


def test_end_of_a_worker_that_the_program_has_reaped_is_seen():
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    worker = _ContextProcess(process)
    assert not worker.ended()
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    assert worker.ended()
    assert worker.exit_code is None
    worker.release()


def test_end_of_a_worker_is_seen_though_a_fork_of_it_lives(tmp_path):
    fork = tmp_path / "fork"

    class Forks(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 2 and not fork.exists():
                if not (pid := os.fork()):
                    signal.pause()
                fork.write_text(str(pid))
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    try:
        with hr.DataLoader(Forks(), None, num_workers=1) as loader:
            assert list(loader) == [0, 1, 2, 3]
    finally:
        os.kill(int(fork.read_text()), signal.SIGKILL)


def test_iterator_without_workers_goes_on_in_a_fork():
    def read_rest():
        assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5]]

    batches = iter(hr.DataLoader(range(6), 2))
    next(batches)
    run_in_fork(read_rest)
    read_rest()
