"""One string in place of several names would be read as the names of its letters: it is refused."""

import pytest

import headrace as hr

CALLS = [
    lambda folder: hr.TarDataset(folder, fields="ab"),
    lambda folder: hr.ParquetDataset(folder, columns="ab"),
    lambda folder: hr.ArrowDataset(folder, columns="ab"),
]


@pytest.mark.parametrize("call", CALLS)
def test_one_string_is_not_several_names(call, tmp_path):
    for ending in ("tar", "parquet", "arrow"):
        (tmp_path / f"0.{ending}").write_bytes(b"")
    with pytest.raises(TypeError, match="must be several names, not one str"):
        call(tmp_path)
