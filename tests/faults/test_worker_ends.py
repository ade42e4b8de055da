"""Workers end as torch's do: they finish the sample that they read, and what they have printed is written."""

import os
import threading

import pytest
from torch.utils.data import Dataset

import headrace as hr
from tests.faults.watching import Numbers


def show(index):
    print("sample", index)
    return index


@pytest.mark.parametrize("kind", ["torch dataset", "process"])
def test_output_of_workers_is_written_where_it_is_buffered(script, kind):
    def program():
        os.environ.pop("PYTHONUNBUFFERED", None)
        dataset, options = (list(range(4)), {}) if kind == "torch dataset" else (Numbers(4), {"placement": kind})
        loader = hr.DataLoader(dataset, 2, num_workers=1, transform=show, **options)
        with loader:
            assert len(list(loader)) == 2

    assert sorted(script(program).stdout.splitlines()) == [f"sample {index}" for index in range(4)]


class Writing(Dataset[int]):
    """Each sample is a file in two halves; the second is written after the FIFO was opened for writing."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with open(self.folder / f"{index}.part", "wb", buffering=0) as file:
            file.write(b"a" * 100)
            if index:
                with open(self.folder / "go on") as fifo:
                    fifo.read()
            file.write(b"b" * 100)
        return index


def test_sample_that_a_worker_reads_is_finished_when_the_epoch_is_left(tmp_path):
    os.mkfifo(tmp_path / "go on")
    batches = iter(loader := hr.DataLoader(Writing(tmp_path), batch_size=1, num_workers=1))
    assert next(batches).tolist() == [0]
    closing, closed = threading.Event(), threading.Event()

    def let_the_worker_go_on():
        closing.wait()
        while not closed.is_set():
            with open(tmp_path / "go on", "w"):  # blocks until a sample has opened it
                pass

    writer = threading.Thread(target=let_the_worker_go_on, daemon=True)
    writer.start()
    closing.set()
    loader.close()
    closed.set()
    with open(os.open(tmp_path / "go on", os.O_RDONLY | os.O_NONBLOCK)):
        writer.join()
    assert {file.stat().st_size for file in tmp_path.glob("*.part")} == {200}
