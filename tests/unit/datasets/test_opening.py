"""`on_error="skip"` of constructors leaves out broken files, with one warning that counts them."""

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace._shards.discovery import open_each
from headrace.errors import ObjectNotFoundError, ShardError, StoreError
from tests.unit.datasets.formats import video_file


def numbers(path, begin):
    np.save(path, np.arange(begin, begin + 10))


def table(write):
    return lambda path, begin: write(pa.table({"x": range(begin, begin + 10)}), path)


DATASETS = {
    ".npy": (numbers, hr.ArrayDataset),
    ".parquet": (
        table(pq.write_table),
        lambda *args, **more: hr.ParquetDataset(*args, format="arrow", **more),
    ),
    ".feather": (
        table(pa.feather.write_feather),
        lambda *args, **more: hr.ArrowDataset(*args, format="arrow", **more),
    ),
    "tokens.npy": (
        numbers,
        lambda *args, **more: hr.TokenDataset(*args, seq_len=10, **more),
    ),
    ".mp4": (
        lambda path, begin: path.write_bytes(video_file(20 + begin, audio=0)),
        lambda *args, **more: hr.VideoDataset(*args, frames=10, **more),
    ),
}


def samples(dataset):
    return [repr(getattr(sample, "data", sample)) for sample in dataset]


@pytest.mark.parametrize("ending", DATASETS)
def test_broken_files_are_left_out_and_counted_once(tmp_path, ending):
    write, dataset = DATASETS[ending]
    paths = [tmp_path / f"{number}{ending}" for number in range(4)]
    for number, path in enumerate(paths):
        write(path, 10 * number)
    expected = samples(dataset([paths[0], paths[3]]))
    paths[1].write_bytes(paths[1].read_bytes()[:-7])
    paths[2].write_bytes(b"<html>")
    with pytest.raises(ShardError, match=rf"1{ending}|2{ending}"):
        dataset(tmp_path)
    with pytest.warns(
        UserWarning, match=rf"2 of 4 files cannot be opened.*1{ending}"
    ) as caught:
        assert samples(dataset(tmp_path, on_error="skip")) == expected
    (warning,) = caught
    assert warning.filename == __file__
    paths[1].unlink()
    with pytest.warns(UserWarning, match="2 of 4 files cannot be opened"):
        assert samples(dataset(paths, on_error="skip")) == expected
    with pytest.raises(ObjectNotFoundError):
        dataset(paths[1:2], on_error="skip")
    with pytest.raises(ValueError, match="on_error='ignore' must be"):
        dataset(paths[:1], on_error="ignore")


def test_failed_request_is_an_error_on_every_rank():
    async def fail(source):
        raise StoreError("no answer") if source else ShardError("broken")

    with pytest.raises(StoreError, match="no answer"):
        open_each([0, 1], fail, on_error="skip")
