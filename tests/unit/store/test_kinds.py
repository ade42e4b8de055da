"""Every kind of dataset reads its store by the same path: the same errors, retries and listings."""

import pickle

import numpy as np
import pyarrow
import pytest

import headrace as hr
from object_server import Fault, ObjectServer
from tests.servers import store_of
from tests.unit.shards import tars

KINDS = {
    "objects.bin": (b"some bytes", hr.ObjectDataset),
    "stream.tar": (tars.shard(map(str, range(5)), txt=str.encode), hr.TarDataset),
    "rows.parquet": (
        tars.parquet(pyarrow.table({"number": range(5)})),
        hr.ParquetDataset,
    ),
    "tokens.npy.bin": (
        np.arange(40, dtype="<u2").tobytes(),
        lambda store: hr.TokenDataset(store, seq_len=10),
    ),
}


def samples_of(dataset):
    """What is read of a copy, which has no row groups in memory."""
    return [*map(repr, pickle.loads(pickle.dumps(dataset)))]


def failure_of(dataset):
    with pytest.raises(hr.StoreError) as failed:
        samples_of(dataset)
    return failed.value


@pytest.mark.parametrize("key", KINDS)
def test_errors_and_retries_are_the_same_for_every_kind(key):
    data, make = KINDS[key]
    policy = hr.RetryPolicy(max_attempts=4, initial_backoff=0.001)
    with ObjectServer({f"data/{key}": data}) as server:
        dataset = make(store_of(server, "data", retry=policy))
        expected = samples_of(dataset)
        server.misbehave(Fault("status", status=503, times=2))
        assert samples_of(dataset) == expected
        server.misbehave(Fault("status", status=503))
        error = failure_of(dataset)
        assert (error.status, error.attempts, "throttled" in str(error)) == (503, 4, True)
        server.misbehave(Fault("shorten"))  # the body has the wrong length
        error = failure_of(dataset)
        assert (type(error), error.attempts, error.key) == (
            hr.errors.ObjectChangedError,
            3,
            key,
        )
        assert "were expected" in str(error)
        server.misbehave()
        server.put(f"data/{key}", data[:-1] + b"?")
        error = failure_of(dataset)
        assert (type(error), error.attempts, error.status) == (
            hr.errors.ObjectChangedError,
            1,
            None,
        )
