"""Without an optional package, the error names the extra to install."""

import sys

import pytest

import headrace as hr
from headrace.errors import MissingExtraError
from tests.unit.datasets.formats import files_in
from tests.unit.shards.resuming import in_memory

ZSTD = ["backports", "backports.zstd", "compression", "compression.zstd"]


@pytest.mark.parametrize(
    ("packages", "extra", "make"),
    [
        (["pyarrow.parquet"], "parquet", lambda: hr.ParquetDataset("x.parquet")),
        (
            ["pyarrow.parquet"],
            "parquet",
            lambda: hr.LitDataset(in_memory(files_in("litdata/arrow"))),
        ),
        (ZSTD, "zstd", lambda: list(hr.TarDataset(in_memory({"a.tar.zst": b""})))),
        (["google_crc32c"], "tfrecord", lambda: hr.TFRecordDataset("x.tfrecord")),
        (["PIL.Image"], "image", hr.decode.image),
        (["av"], "video", hr.decode.video),
        (["soundfile"], "audio", hr.decode.audio),
    ],
)
def test_missing_package_is_named_with_its_extra(monkeypatch, packages, extra, make):
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'headrace\[{extra}\]'"):
        make()
