"""Parquet files that are damaged or change: every row is delivered once or reported, and the error says where.

The ledger: of three files with five row groups of 20 rows, what was delivered is counted against what was written, and
each row group that is missing is named by exactly one error.
"""

import io

import pyarrow
import pyarrow.parquet
import pytest

import headrace as hr
from object_server import ObjectServer
from tests.faults.watching import drain, once_each, text_of

CLOSING = 5.0  # seconds; obstore closes idle connections on threads of its own, some time after their store is gone


def file(number):
    stream = io.BytesIO()
    ids = range(number * 100, number * 100 + 100)
    table = pyarrow.table({"id": ids, "text": [f"row {i}" for i in ids]})
    pyarrow.parquet.write_table(table, stream, row_group_size=20, write_page_checksum=True)
    return stream.getvalue()


OBJECTS = {f"{number}.parquet": file(number) for number in range(3)}
CHUNK = pyarrow.parquet.ParquetFile(io.BytesIO(OBJECTS["1.parquet"])).metadata.row_group(3).column(1)
START = CHUNK.dictionary_page_offset or CHUNK.data_page_offset
STOP = START + CHUNK.total_compressed_size


def flipped(at):
    data = bytearray(OBJECTS["1.parquet"])
    data[at] ^= 8
    return bytes(data)


# Within one column of one row group of the file in the middle.
DAMAGE = {
    "last": flipped(STOP - 1),
    "header": flipped(START),
    "zeros": OBJECTS["1.parquet"][:START] + bytes(STOP - START) + OBJECTS["1.parquet"][STOP:],
    "other": OBJECTS["1.parquet"][:START] + OBJECTS["1.parquet"][4 : 4 + STOP - START] + OBJECTS["1.parquet"][STOP:],
}


@pytest.fixture(scope="module")
def server():
    objects = {f"{name}/{key}": data for name in DAMAGE for key, data in OBJECTS.items()}
    with ObjectServer(objects | {f"{name}/1.parquet": data for name, data in DAMAGE.items()}) as server:
        yield server


def check(dataset, shard, **options):
    """One epoch over three files, of which the one in the middle is damaged."""
    with hr.DataLoader(dataset, transform=lambda row: row["id"], **options) as loader:
        delivered, errors = drain(loader)
        skipped = loader.stats().skipped
    assert delivered == once_each(range(160), range(180, 300)), delivered
    if options["on_error"] == "skip":
        (record,) = skipped
        assert record.error.endswith("ShardError"), record
        assert f"shard {shard}, member 'row group 3'" in record.message, record
    else:
        (error,) = errors
        assert isinstance(error, hr.errors.ShardError), repr(error)
        assert (error.shard, error.member) == (shard, "row group 3"), text_of(error)


def test_damaged_row_group_is_one_error_and_never_a_short_epoch(case, server):
    stores = {name: hr.Store(f"{server.url}/{name}", options=server.store_options) for name in DAMAGE}

    def program() -> None:
        for name, store in stores.items():
            dataset, shard = hr.ParquetDataset(list(OBJECTS), store=store), f"{store.url}/1.parquet"
            check(dataset, shard, on_error="raise", batch_size=1)
            if name == "zeros":
                check(dataset, shard, on_error="skip", batch_size=8)
                check(dataset, shard, on_error="skip", batch_size=8, num_workers=1, placement="process")

    case(program, within=CLOSING)
