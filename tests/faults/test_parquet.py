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
    "a bit in the last page": flipped(STOP - 1),
    "a bit in the first page's header": flipped(START),
    "zeros": OBJECTS["1.parquet"][:START] + bytes(STOP - START) + OBJECTS["1.parquet"][STOP:],
    "another column's bytes": OBJECTS["1.parquet"][:START]
    + OBJECTS["1.parquet"][4 : 4 + STOP - START]
    + OBJECTS["1.parquet"][STOP:],
}


def check(case, server, **options):
    """One epoch over three files, of which the one in the middle is damaged."""
    url = server.url
    store = hr.Store(url, options=server.store_options)

    def program() -> None:
        dataset = hr.ParquetDataset(list(OBJECTS), store=store)
        with hr.DataLoader(dataset, transform=lambda row: row["id"], **options) as loader:
            delivered, errors = drain(loader)
            skipped = loader.stats().skipped
        assert delivered == once_each(range(160), range(180, 300)), delivered
        if options["on_error"] == "skip":
            (record,) = skipped
            assert record.error.endswith("ShardError"), record
            assert f"shard {url}/1.parquet, member 'row group 3'" in record.message, record
        else:
            (error,) = errors
            assert isinstance(error, hr.errors.ShardError), repr(error)
            assert (error.shard, error.member) == (f"{url}/1.parquet", "row group 3"), text_of(error)

    case(program, within=CLOSING)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_damaged_row_group_is_one_error_and_never_a_short_epoch(case, damage, on_error):
    with ObjectServer({**OBJECTS, "1.parquet": DAMAGE[damage]}) as server:
        check(case, server, on_error=on_error, batch_size=1 if on_error == "raise" else 8)


def test_damaged_row_group_is_one_error_with_placement_process(case):
    with ObjectServer({**OBJECTS, "1.parquet": DAMAGE["zeros"]}) as server:
        check(case, server, on_error="skip", batch_size=8, num_workers=1, placement="process")
