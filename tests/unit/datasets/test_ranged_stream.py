"""The stream of a map-style dataset of ranges: few requests, and errors of single samples."""

import numpy as np
import pytest

import headrace as hr
from headrace.errors import ShardError, StoreError
from object_server import Fault
from tests.unit.shards.resuming import samples_and_errors

OBJECTS = {
    f"{n}.bin": np.arange(n * 1000, (n + 1) * 1000, dtype="<u2").tobytes()
    for n in range(3)
}


def opened(server, kind=hr.TokenDataset):
    return kind("*.bin", store=server.store(), seq_len=10)


def outcomes(stream):
    """The first token of each window, with errors in their places."""
    return [
        found if isinstance(found, Exception) else int(found[0])
        for found in samples_and_errors(stream)
    ]


@pytest.mark.counts
def test_shard_is_read_by_large_requests(server):
    dataset = opened(server)
    before = server.requests()["GET"]
    assert outcomes(dataset.stream()) == [*range(0, 3000, 10)]
    assert server.requests()["GET"] - before == 3


class Checked(hr.TokenDataset):
    def sample_of(self, index, data):
        if index in (7, 120):
            raise ShardError("a wrong checksum", shard=self.sample_key(index))
        return super().sample_of(index, data)


def test_corrupt_sample_ends_no_shard(server):
    found = outcomes(opened(server, Checked).stream())
    errors = [str(one) for one in found if isinstance(one, Exception)]
    assert errors == [
        f"a wrong checksum (shard {place})"
        for place in ("0.bin[140:160]", "1.bin[400:420]")
    ]
    assert [one for one in found if isinstance(one, int)] == [
        n for n in range(0, 3000, 10) if n not in (70, 1200)
    ]


def test_failed_requests_lose_the_samples_of_their_object_alone(server):
    dataset = opened(server)
    server.misbehave(Fault("status", status=403, key="*1.bin"))
    found = outcomes(dataset.stream())
    assert [one for one in found if isinstance(one, int)] == [
        *range(0, 1000, 10),
        *range(2000, 3000, 10),
    ]
    assert all(isinstance(one, StoreError) for one in found[100:200])


def test_dataset_with_a_fetch_of_its_own_has_no_stream(server):
    class Own(hr.TokenDataset):
        async def aget(self, index):
            return index

    with pytest.raises(TypeError, match="Own defines aget, which a stream does not call"):
        opened(server, Own).stream()
