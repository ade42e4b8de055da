"""Damaged shards: samples before the damage are delivered, the damage is reported, other shards are read whole.

The ledger: of every shard, what was delivered is counted against what was written; a shard that is
short of samples is named by exactly one error, with member and offset.
"""

import io
import urllib.parse

import pyarrow
import pyarrow.parquet
import pytest

import headrace as hr
from object_server import Fault, ObjectServer
from tests.faults.watching import drain, once_each, text_of
from tests.servers import store_of
from tests.unit.shards import tars

SAMPLES = 20
# seconds; obstore closes idle connections on threads of its own, some time after their store is
# gone
CLOSING = 5.0
BLOCK = 512
MEMBER = 2 * BLOCK  # a header, and a content that fills one block
SAMPLE = 2 * MEMBER


def shard(number):
    """A tar of 20 samples of two members, each of one block: sample `n` begins at ``n * SAMPLE``."""
    files = [
        (
            f"{number}-{sample:02}.{field}",
            str(number * SAMPLES + sample).encode().ljust(BLOCK),
        )
        for sample in range(SAMPLES)
        for field in ("txt", "cls")
    ]
    return tars.members(*files)


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


AT = 7 * SAMPLE  # where sample 7 begins
# What is done to the shard in the middle, how many of its samples come whole, and what the error
# says. A sample is complete when the next one starts: nothing shows that sample 6, before a cut,
# has no further member.
CUT, DAMAGED = "TruncatedShardError", "ShardError"
DAMAGE = {
    "cut at a sample's border": (lambda tar: tar[:AT], 6, CUT, "1-06.cls", AT),
    "cut inside a header": (lambda tar: tar[: AT + 100], 6, CUT, "1-06.cls", AT + 100),
    "flipped bit in a name": (lambda tar: flipped(tar, AT), 6, DAMAGED, "1-06.cls", AT),
    "cut in mid-data": (
        lambda tar: tar[: AT + BLOCK + 10],
        6,
        CUT,
        "1-07.txt",
        AT + BLOCK + 10,
    ),
    "empty": (lambda tar: b"", 0, CUT, None, 0),
    "a member missing": (
        lambda tar: tar[: AT + MEMBER] + tar[AT + SAMPLE :],
        7,
        DAMAGED,
        "1-07.txt",
        AT,
    ),
    "a member twice": (
        lambda tar: tar[: AT + MEMBER] + tar[AT:],
        7,
        DAMAGED,
        "1-07.txt",
        AT + MEMBER,
    ),
}


OBJECTS = {f"{number}.tar": shard(number) for number in range(3)}


def number_of(sample):
    return int(sample["txt"] if "txt" in sample else sample["id"])


@pytest.fixture(scope="module")
def damaged():
    """A server with the three shards under the name of each damage, the one in the middle damaged."""
    objects = {f"{name}/{key}": data for name in DAMAGE for key, data in OBJECTS.items()}
    for name, (spoil, *_) in DAMAGE.items():
        objects[f"{name}/1.tar"] = spoil(OBJECTS["1.tar"])
    with ObjectServer(objects) as server:
        yield server


def check(dataset, delivered, kind, shard, member, offset=None, lost=1, **options):
    """An epoch over three shards, of which the one in the middle is damaged, with so many errors."""
    with hr.DataLoader(dataset, transform=number_of, **options) as loader:
        first = drain(loader)
        skipped = loader.stats().skipped
        if options["on_error"] == "skip":
            assert drain(loader)[0] == first[0], "a second epoch differs"
    assert first[0] == delivered, first
    assert len((*first[1], *skipped)) == lost
    for failure in skipped:
        assert failure.type_name == kind, failure
        for part in (f"shard {shard}", member or "", str(offset or "")):
            assert part in failure.message, failure
    for failure in first[1]:
        assert type(failure).__name__ == kind, repr(failure)
        assert isinstance(failure, hr.errors.ShardError)
        assert (failure.shard, failure.member) == (shard, member), text_of(failure)
        assert offset in (None, failure.offset), text_of(failure)


def test_damaged_tar_is_one_error_and_never_a_short_epoch(case, damaged):
    shards = {
        name: [f"{damaged.http_url}/{urllib.parse.quote(name)}/{key}" for key in OBJECTS]
        for name in DAMAGE
    }
    expected = {name: (whole, *failure) for name, (_, whole, *failure) in DAMAGE.items()}

    def program() -> None:
        def check_tar(name, **options):
            whole, kind, member, offset = expected[name]
            dataset = hr.TarDataset(shards[name], shards_in_parallel=2, chunk_bytes=1000)
            # Of a member that is missing or twice, the next header is a place to go on from.
            after = (
                range(28, 40) if name in ("a member missing", "a member twice") else ()
            )
            delivered = once_each(range(20 + whole), after, range(40, 60))
            check(dataset, delivered, kind, shards[name][1], member, offset, **options)

        for (
            name
            # A raised error costs its batch; with batches of one it costs one sample.
        ) in shards:
            check_tar(name, on_error="raise", batch_size=1)
        check_tar("a member missing", on_error="skip", batch_size=4)
        check_tar(
            "cut at a sample's border",
            on_error="skip",
            batch_size=4,
            num_workers=1,
            placement="process",
        )

    case(program, within=CLOSING)


@pytest.mark.parametrize("always", [True, False])
def test_flipped_bits_in_headers_are_errors_of_an_indexed_sample(case, always):
    """Transient damage is read again, permanent damage is a sample's error."""
    with ObjectServer(OBJECTS) as server:
        store = store_of(server)
        hr.TarDataset.index(list(OBJECTS), store=store, save=True)
        server.misbehave(Fault("flip", key="1.tar", times=None if always else 1, at=3))

        def program() -> None:
            dataset = hr.TarDataset.index(list(OBJECTS), store=store)
            with hr.DataLoader(
                dataset, batch_size=4, transform=number_of, on_error="skip"
            ) as loader:
                delivered, errors = drain(loader)
                skipped = loader.stats().skipped
            assert not errors
            # The samples of a shard are read together, and the bit is in the first of them.
            assert delivered == once_each(range(20), range(21 if always else 20, 60))
            assert [(failure.index, failure.key) for failure in skipped] == [
                (20, "1.tar[0:2048]")
            ] * always
            for failure in skipped:
                assert "header" in failure.message, failure

        case(program, within=CLOSING)
        assert any(seen.fault == "flip" for seen in server.seen())


# Parquet: five row groups of 20 rows


def file(number):
    stream = io.BytesIO()
    ids = range(number * 100, number * 100 + 100)
    table = pyarrow.table({"id": ids, "text": [f"row {i}" for i in ids]})
    pyarrow.parquet.write_table(
        table, stream, row_group_size=20, write_page_checksum=True
    )
    return stream.getvalue()


FILES = {f"{number}.parquet": file(number) for number in range(3)}
FILE = FILES["1.parquet"]
CHUNK = pyarrow.parquet.ParquetFile(io.BytesIO(FILE)).metadata.row_group(3).column(1)
START = CHUNK.dictionary_page_offset or CHUNK.data_page_offset
STOP = START + CHUNK.total_compressed_size
FILE_DAMAGE = {  # within one column of one row group of the file in the middle
    "last": flipped(FILE, STOP - 1),
    "header": flipped(FILE, START),
    "zeros": FILE[:START] + bytes(STOP - START) + FILE[STOP:],
    "other": FILE[:START] + FILE[4 : 4 + STOP - START] + FILE[STOP:],
}


def test_damaged_row_group_is_an_error_of_its_rows_alone(case):
    objects = {
        f"{name}/{key}": data for name in FILE_DAMAGE for key, data in FILES.items()
    }
    with ObjectServer(
        objects | {f"{name}/1.parquet": data for name, data in FILE_DAMAGE.items()}
    ) as server:
        stores = {name: store_of(server, name) for name in FILE_DAMAGE}

        def program() -> None:
            def check_file(name, **options):
                store, delivered = stores[name], once_each(range(160), range(180, 300))
                dataset = hr.ParquetDataset(list(FILES), store=store)
                check(
                    dataset,
                    delivered,
                    "ShardError",
                    f"{store.url}/1.parquet",
                    "row group 3",
                    lost=20,
                    **options,
                )

            for name in stores:
                check_file(name, on_error="raise", batch_size=1)
            check_file("zeros", on_error="skip", batch_size=8)
            check_file(
                "zeros", on_error="skip", batch_size=8, num_workers=1, placement="process"
            )

        case(program, within=CLOSING)
