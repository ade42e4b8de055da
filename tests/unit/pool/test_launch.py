"""Workers of a `multiprocessing` context: their end is seen, and replacements of dead workers work."""

import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading

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


class DiesOnce(Dataset):
    """Indices. The process that reads index 2 first is killed."""

    def __init__(self, marker):
        self.marker = marker

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def loader_with_a_fork(dataset):
    return hr.DataLoader(
        dataset,
        None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


def test_replacement_of_a_worker_destroys_no_thread_local_object_of_the_consumer(
    tmp_path,
):
    # A fork destroys these objects of all other threads. PyAV keeps a scaler, which waits in a fork
    # for ever: for threads that the fork lacks.
    class Scaler:
        owner = os.getpid()

        def __del__(self):
            if os.getpid() != self.owner:
                os._exit(1)

    local = threading.local()
    local.scaler = Scaler()
    with loader_with_a_fork(DiesOnce(tmp_path / "died")) as loader:
        assert list(loader) == [0, 1, 2, 3]


def test_replacement_of_a_worker_waits_for_an_import_of_the_consumer(
    tmp_path, monkeypatch
):
    # A fork of another thread would hold the lock of the half imported module for ever.
    class Imports(DiesOnce):
        def __getitem__(self, index):
            index = super().__getitem__(index)
            return importlib.import_module("slow_module").VALUE if index == 2 else index

    class Death(logging.Handler):
        seen = threading.Event()

        def emit(self, record):
            self.seen.set()

    (tmp_path / "slow_module.py").write_text("import logging\nlogging.slow()\nVALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging, "slow", Death.seen.wait, raising=False)
    logging.getLogger("headrace").addHandler(death := Death())
    try:
        with loader_with_a_fork(Imports(tmp_path / "died")) as loader:
            batches = iter(loader)
            assert next(batches) == 0
            importlib.import_module("slow_module")
            assert list(batches) == [1, 7, 3]
    finally:
        logging.getLogger("headrace").removeHandler(death)
        sys.modules.pop("slow_module", None)


def test_dead_worker_is_replaced_though_another_iterator_of_the_loader_does_not_wait(
    tmp_path,
):
    with loader_with_a_fork(DiesOnce(tmp_path / "died")) as loader:
        first, second = iter(loader), iter(loader)
        assert list(first) == [0, 1, 2, 3]
        assert list(second) == [0, 1, 2, 3]


def test_dead_worker_is_replaced_in_the_next_epoch_if_the_consumer_has_left(tmp_path):
    died = tmp_path / "died"
    with loader_with_a_fork(DiesOnce(died)) as loader:
        for index in loader:
            assert index == 0
            break
        assert list(loader) == [0, 1, 2, 3]
    assert died.exists()


def test_iterator_without_workers_goes_on_in_a_fork():
    def read_rest():
        assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5]]

    batches = iter(hr.DataLoader(range(6), 2))
    next(batches)
    run_in_fork(read_rest)
    read_rest()
