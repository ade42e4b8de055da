"""Damaged shards: samples before the damage are delivered, the damage is reported, other shards are read whole.

The ledger: of every shard, what was delivered is counted against what was written; a shard that is short of samples is
named by exactly one error, with member and offset.
"""

import collections
import gzip
import io
import tarfile
import urllib.parse

import numpy as np
import obstore
import pytest
from obstore.store import from_url

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.watching import drain, once_each, text_of

SAMPLES = 20
CLOSING = 5.0  # seconds; obstore closes idle connections on threads of its own, some time after their store is gone
BLOCK = 512
MEMBER = 2 * BLOCK  # a header, and a content that fills one block
SAMPLE = 2 * MEMBER


def shard(number):
    """A tar of 20 samples of two members, each of one block: sample `n` begins at ``n * SAMPLE``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for sample in range(SAMPLES):
            for field in ("txt", "cls"):
                info = tarfile.TarInfo(f"{number}-{sample:02}.{field}")
                info.size = BLOCK
                tar.addfile(info, io.BytesIO(str(number * SAMPLES + sample).encode().ljust(BLOCK)))
    return stream.getvalue()


def without(data, start, stop):
    return data[:start] + data[stop:]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


AT = 7 * SAMPLE  # where sample 7 begins
# What is done to the shard in the middle, how many of its samples come whole, and what the error says. A sample is
# complete when the next one starts: nothing shows that sample 6, before a cut, has no further member.
DAMAGE = {
    "cut at a sample's border": (lambda tar: tar[:AT], 6, "TruncatedShardError", "1-06.cls", AT),
    "cut within a sample": (lambda tar: tar[: AT + MEMBER], 7, "TruncatedShardError", "1-07.txt", AT + MEMBER),
    "end blocks missing": (
        lambda tar: tar[: SAMPLES * SAMPLE],
        19,
        "TruncatedShardError",
        "1-19.cls",
        SAMPLES * SAMPLE,
    ),
    "cut inside a header": (lambda tar: tar[: AT + 100], 6, "TruncatedShardError", "1-06.cls", AT + 100),
    "flipped bit in a name": (lambda tar: flipped(tar, AT), 6, "ShardError", "1-06.cls", AT),
    "flipped bit in a size": (lambda tar: flipped(tar, AT + 130), 6, "ShardError", "1-06.cls", AT),
    "cut in mid-data": (lambda tar: tar[: AT + BLOCK + 10], 6, "TruncatedShardError", "1-07.txt", AT + BLOCK + 10),
    "empty": (lambda tar: b"", 0, "TruncatedShardError", None, 0),
    "a member missing": (lambda tar: without(tar, AT + MEMBER, AT + SAMPLE), 7, "ShardError", "1-07.txt", AT),
    "a member twice": (
        lambda tar: tar[: AT + MEMBER] + tar[AT : AT + MEMBER] + tar[AT + MEMBER :],
        7,
        "ShardError",
        "1-07.txt",
        AT + MEMBER,
    ),
    "a sample twice": (
        lambda tar: tar[: AT + SAMPLE] + tar[AT - SAMPLE :],
        7,
        "ShardError",
        "1-06.txt",
        AT + SAMPLE,
    ),
}


OBJECTS = {f"{number}.tar": shard(number) for number in range(3)}


def number_of(sample):
    return int(sample["txt"])


@pytest.fixture(scope="module")
def damaged():
    """A server with the three shards under the name of each damage, the one in the middle damaged."""
    objects = {f"{name}/{key}": data for name in DAMAGE for key, data in OBJECTS.items()}
    for name, (spoil, *_) in DAMAGE.items():
        objects[f"{name}/1.tar"] = spoil(OBJECTS["1.tar"])
    with ObjectServer(objects) as server:
        yield server


def check(urls, whole, kind, member, offset, **options):
    """Two epochs over three shards, of which the one in the middle is damaged."""
    dataset = hr.TarDataset(urls, shards_in_parallel=2, chunk_bytes=1000)
    with hr.DataLoader(dataset, transform=number_of, **options) as loader:
        delivered, errors = drain(loader)
        delivered_again, errors_again = drain(loader)
        skipped = loader.stats().skipped
    assert delivered == once_each(range(20 + whole), range(40, 60)), delivered
    assert delivered_again == delivered
    assert len(errors + errors_again) + len(skipped) == 2, (errors, skipped)
    for record in skipped:
        assert record.error == kind, record
        for part in (f"shard {urls[1]}", member or "", str(offset or "")):
            assert part in record.message, record
    for error in errors + errors_again:
        assert type(error).__name__ == kind, repr(error)
        assert isinstance(error, hr.errors.ShardError)
        assert (error.shard, error.member, error.offset) == (urls[1], member, offset), text_of(error)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tar_is_one_error_and_never_a_short_epoch(case, damaged, damage):
    urls = [f"{damaged.http_url}/{urllib.parse.quote(damage)}/{name}" for name in OBJECTS]

    def program() -> None:
        # A raised error costs its batch; with batches of one it costs one sample.
        check(urls, *DAMAGE[damage][1:], on_error="raise", batch_size=1)
        check(urls, *DAMAGE[damage][1:], on_error="skip", batch_size=4)
        if damage == "cut at a sample's border":
            check(urls, *DAMAGE[damage][1:], on_error="skip", batch_size=4, num_workers=1, placement="process")

    case(program, within=CLOSING)


def test_flipped_bit_in_compressed_data_is_an_error(case):
    packed = bytearray(gzip.compress(OBJECTS["1.tar"], compresslevel=0))
    packed[packed.index(b"27".ljust(BLOCK))] ^= (
        8  # stored, not deflated: only gzip's checksum, after the last sample, shows it
    )
    names = ["0.tar", "1.tar.gz", "2.tar"]
    with ObjectServer({**OBJECTS, "1.tar.gz": bytes(packed)}) as server:
        url = server.http_url

        def program() -> None:
            dataset = hr.TarDataset([f"{url}/{name}" for name in names], shards_in_parallel=2)
            with hr.DataLoader(dataset, batch_size=1, transform=lambda sample: sample["__key__"]) as loader:
                batches, errors = iter(loader), []
                delivered = collections.Counter()
                while True:
                    try:
                        delivered.update(next(batches))
                    except StopIteration:
                        break
                    except hr.errors.ShardError as error:
                        errors.append(error)
            (error,) = errors
            assert "gzip" in str(error), text_of(error)
            assert error.shard.endswith("1.tar.gz"), text_of(error)
            wanted = {f"{number}-{sample:02}" for number in (0, 2) for sample in range(20)}
            assert wanted <= delivered.keys(), delivered
            assert max(delivered.values()) == 1, delivered

        case(program, within=CLOSING)


@pytest.mark.parametrize("always", [True, False])
def test_flipped_bits_in_plain_data_are_found_by_the_index(case, always):
    """The index has a checksum of each member; transient damage is read again, permanent damage is a sample's error."""
    with ObjectServer(OBJECTS) as server:
        store = hr.Store(server.url, options=server.store_options)
        case(lambda: hr.TarDataset.index(list(OBJECTS), store=store, save=True), within=CLOSING)
        server.misbehave(Fault("flip", key="1.tar", times=None if always else 1, at=3))

        def program() -> None:
            dataset = hr.TarDataset.index(list(OBJECTS), store=store)
            with hr.DataLoader(dataset, batch_size=4, transform=number_of, on_error="skip") as loader:
                delivered, errors = drain(loader)
                skipped = loader.stats().skipped
            assert not errors
            if not always:
                assert delivered == once_each(range(60))
                assert not skipped
            else:  # the samples of a shard are read together, and the bit is in the first of them
                (failure,) = skipped
                assert delivered == once_each(range(20), range(21, 60))
                assert (failure.index, failure.key) == (20, "1.tar/1-00"), failure
                assert "1-00.txt" in failure.message, failure
                assert "checksum" in failure.message, failure

        case(program, within=CLOSING)
        assert any(seen.fault == "flip" for seen in server.seen())


@pytest.mark.parametrize("spoil", ["cut", "of another shard", "beyond its shard"])
def test_corrupt_index_is_replaced(case, spoil):
    with ObjectServer(OBJECTS) as server:
        store = hr.Store(server.url, options=server.store_options)
        case(lambda: hr.TarDataset.index(list(OBJECTS), store=store, save=True), within=CLOSING)
        url, options = server.url, dict(server.store_options)

        def program() -> None:
            backend = from_url(url, **options)
            good = bytes(obstore.get(backend, "1.tar.index.npz").bytes())
            if spoil == "cut":
                bad = good[: len(good) // 2]
            elif spoil == "of another shard":
                bad = bytes(obstore.get(backend, "0.tar.index.npz").bytes())
            else:
                with np.load(io.BytesIO(good)) as arrays:
                    changed = dict(arrays)
                changed["offsets"] = changed["offsets"] + (1 << 40)
                np.savez(stream := io.BytesIO(), **changed)
                bad = stream.getvalue()
            obstore.put(backend, "1.tar.index.npz", bad)
            dataset = hr.TarDataset.index(list(OBJECTS), store=store, save=True)
            with hr.DataLoader(dataset, batch_size=4, transform=number_of) as loader:
                delivered, errors = drain(loader)
            assert not errors, (delivered, errors)
            assert delivered == once_each(range(60)), (delivered, errors)
            if spoil != "of another shard":
                stored = bytes(obstore.get(backend, "1.tar.index.npz").bytes())
                assert len(stored) == len(good), "it was not stored again"

        case(program, within=CLOSING)
