"""Every kind of dataset reads its store by the same path: the same errors, retries and listings."""

import io
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import headrace as hr
from object_server import Fault, ObjectServer

QUICK = hr.RetryPolicy(initial_backoff=0.001)


def tar_bytes():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for i in range(5):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 8
            archive.addfile(info, io.BytesIO(b"%08d" % i))
    return stream.getvalue()


def parquet_bytes():
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"number": list(range(5))}), stream)
    return stream.getvalue()


KINDS = {
    "objects": (b"some bytes", ".bin", lambda store: hr.ObjectDataset(store, suffix=".bin")),
    "tar": (tar_bytes(), ".tar", lambda store: hr.TarDataset("**/*.tar", store=store)),
    "parquet": (parquet_bytes(), ".parquet", lambda store: hr.ParquetDataset("**/*.parquet", store=store)),
    "windows": (
        np.arange(40, dtype="<u2").tobytes(),
        ".npy.bin",
        lambda store: hr.TokenDataset("**/*.bin", seq_len=10, store=store),
    ),
}


@pytest.fixture(scope="module")
def server():
    with ObjectServer() as server:
        yield server


class Kind:
    """One kind of dataset over one object, which is put anew for each test."""

    def __init__(self, server, name):
        server.misbehave()
        self.server = server
        self.data, self.suffix, self.make = KINDS[name]
        self.folder = name.replace(" ", "-")
        self.key = f"{self.folder}/data{self.suffix}"
        server.put(self.key, self.data)

    def dataset(self, **settings):
        store = hr.Store(
            f"{self.server.url}/{self.folder}", options=self.server.store_options, **{"retry": QUICK, **settings}
        )
        return self.make(store)


@pytest.fixture(params=KINDS)
def kind(request, server):
    return Kind(server, request.param)


def samples(dataset):
    """The samples, of map-style kinds and of streams."""
    return [repr(sample) for sample in dataset]


def failure_of(dataset):
    with pytest.raises(hr.StoreError) as failed:
        samples(dataset)
    return failed.value


def test_body_of_the_wrong_length_is_an_object_changed_error_after_three_attempts(kind):
    dataset = kind.dataset()
    kind.server.misbehave(Fault("shorten", key=kind.key))
    error = failure_of(dataset)
    assert type(error) is hr.errors.ObjectChangedError
    assert "were expected" in str(error)
    assert (error.attempts, error.key) == (3, kind.key.partition("/")[2])


def test_object_that_was_overwritten_by_one_of_the_same_length_is_an_object_changed_error(kind):
    dataset = kind.dataset()
    kind.server.put(kind.key, kind.data[:-1] + b"?")
    error = failure_of(dataset)
    assert type(error) is hr.errors.ObjectChangedError
    assert (error.attempts, error.status) == (1, 412)


def test_throttled_requests_are_retried_by_the_policy_of_the_store(kind):
    dataset = kind.dataset(retry=hr.RetryPolicy(max_attempts=3, initial_backoff=0.001))
    expected = samples(dataset)
    kind.server.misbehave(Fault("status", status=503, times=2))
    assert samples(dataset) == expected
    kind.server.misbehave(Fault("status", status=503))
    error = failure_of(dataset)
    assert (error.status, error.attempts) == (503, 3)
    assert "throttled" in str(error)
