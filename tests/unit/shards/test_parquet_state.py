"""A Parquet stream continues from a saved row or table; only the current row group is read again."""

import asyncio
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import StateError
from object_server import ObjectServer
from tests.faults.watching import wait_until
from tests.unit.shards.resuming import in_memory, restored, resumes_at_every_position, state_after, states
from tests.unit.streams.reading import outcomes


def written(first, count, group):
    stream = io.BytesIO()
    ids = range(first, first + count)
    table = pa.table({"id": ids, "text": [f"row {i}" * 20 for i in ids]})
    pq.write_table(table, stream, row_group_size=group, write_page_checksum=True, compression="none")
    return stream.getvalue()


OBJECTS = {"0.parquet": written(0, 11, 4), "1.parquet": written(100, 3, 5), "2.parquet": written(200, 8, 2)}


def damaged():
    """The second row group of the first file has a flipped bit."""
    data = bytearray(OBJECTS["0.parquet"])
    data[data.index(b"row 5row 5")] ^= 1
    return {**OBJECTS, "0.parquet": bytes(data)}


@pytest.mark.parametrize("prefetch", [(1, 1 << 20), (4, 800)])
@pytest.mark.parametrize("options", [{}, {"format": "arrow"}, {"format": "arrow", "table_rows": 3}], ids=str)
@pytest.mark.parametrize("make", [lambda: OBJECTS, damaged], ids=["whole", "damaged"])
def test_stream_continues_at_every_position(make, options, prefetch):
    objects = make()
    store, ahead = in_memory(objects), dict(zip(("prefetch_row_groups", "prefetch_bytes"), prefetch, strict=True))
    resumes_at_every_position(lambda: hr.ParquetDataset(list(objects), store=store, shuffle=True, **ahead, **options))


async def test_blocks_of_rows_are_left_out_whole():
    store = in_memory({"0.parquet": written(0, 5000, 5000)})
    dataset = hr.ParquetDataset(["0.parquet"], columns=["id"], store=store)
    for position in (1, 1023, 1024, 1025, 3000, 4999, 5000):
        state = await state_after(dataset, position)
        rows = await outcomes(await restored(dataset, json.dumps(state)))
        assert [row["id"] for row in rows] == list(range(position, 5000))


async def test_restore_reads_the_current_row_group_again_and_those_ahead_of_it():
    with ObjectServer(OBJECTS) as server:
        store = hr.Store(server.url, options=server.store_options)
        dataset = hr.ParquetDataset(list(OBJECTS), store=store, prefetch_row_groups=1)

        found, dumps = await states(dataset)
        before = server.requests()["GET"]
        iterator = await restored(dataset, dumps[12])
        assert await outcomes(iterator, 2) == found[12:14]
        await asyncio.to_thread(wait_until, lambda: server.requests()["GET"] - before >= 2)
        await iterator.aclose()
        assert server.requests()["GET"] - before == 2


def test_file_that_has_changed_is_an_error_that_names_it():
    state = asyncio.run(state_after(hr.ParquetDataset(list(OBJECTS), store=in_memory(OBJECTS)), 12))
    same_rows = in_memory({**OBJECTS, "1.parquet": written(500, 3, 5)})
    same_rows.backend().put("1.parquet", written(700, 3, 5))
    with pytest.raises(StateError, match=r"1\.parquet has changed since the state was saved"):
        aiter(hr.ParquetDataset(list(OBJECTS), store=same_rows)).load_state_dict(state)


def test_other_row_groups_are_an_error():
    state = asyncio.run(state_after(hr.ParquetDataset(list(OBJECTS), store=in_memory(OBJECTS)), 2))
    other = in_memory({**OBJECTS, "1.parquet": written(100, 4, 5)})
    with pytest.raises(StateError, match=r"list of row groups .* was '8 \(\w+\)', and is '8 \(\w+\)'"):
        aiter(hr.ParquetDataset(list(OBJECTS), store=other)).load_state_dict(state)
    with pytest.raises(StateError, match="format was 'rows', and is 'arrow'"):
        aiter(hr.ParquetDataset(list(OBJECTS), store=in_memory(OBJECTS), format="arrow")).load_state_dict(state)
