"""The file of DALI's wds2idx is used if it describes a shard exactly; else the shard is read."""

import io
import tarfile
import warnings

import pytest

import headrace as hr
from headrace.errors import TruncatedShardError
from tests.unit.shards import tars

# Written by wds2idx of DALI for the archive of `FILES`, and for the same in pax with times in
# fractions of seconds, as WebDataset's writer makes them: the offsets are wrong then.
FILES = [
    (f"{'long/' * 30 * (number == 2)}{number:03}.{field}", b"x" * (700 * number + 3))
    for number in range(4)
    for field in ("jpg", "CLS")
]
IDX = """v1.2 4
jpg 512 3 000.jpg CLS 1536 3 000.CLS
jpg 2560 703 001.jpg CLS 4096 703 001.CLS
jpg 5632 1403 {0}002.jpg CLS 7680 1403 {0}002.CLS
jpg 9728 2103 003.jpg CLS 12800 2103 003.CLS
""".format("long/" * 30)
PAX_IDX = """v1.2 4
jpg 2560 3 000.jpg CLS 4608 3 000.CLS
jpg 6656 703 001.jpg CLS 9216 703 001.CLS
jpg 11776 1403 {0}002.jpg CLS 14848 1403 {0}002.CLS
jpg 17920 2103 003.jpg CLS 20992 2103 003.CLS
""".format("long/" * 30)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def archive(*files):
    return tars.members(*files, format=tarfile.USTAR_FORMAT)


def written(folder, idx, data=None):
    folder.mkdir()
    data = archive(*FILES) if data is None else data
    (folder / "a.tar").write_bytes(data)
    (folder / "a.idx").write_text(idx)
    return folder


def requests(monkeypatch):
    """The ranges that are read of shards."""
    ranges, read = [], hr.Store.read

    def noted(self, key, start, stop, **options):
        ranges.append((start, stop))
        return read(self, key, start, stop, **options)

    monkeypatch.setattr(hr.Store, "read", noted)
    return ranges


def test_an_index_is_made_of_the_file_and_the_last_sample(tmp_path, monkeypatch):
    folder = written(tmp_path / "shards", IDX)
    ranges = requests(monkeypatch)
    with warnings.catch_warnings(action="error"):
        dataset = hr.TarDataset.index(folder / "*.tar", save=True)
    assert ranges == [(9216, 20480)]
    whole = list(hr.TarDataset(folder))
    assert list(dataset) == whole
    made = (folder / "headrace.index").read_bytes()
    (folder / "a.idx").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (folder / "headrace.index").unlink()
    assert list(hr.TarDataset.index(folder, save=True)) == whole
    assert (folder / "headrace.index").read_bytes() == made


WRONG = {
    "another version": IDX.replace("v1.2", "v1.1"),
    "no samples": "v1.2 0\n",
    "cut": IDX[: IDX.index("jpg 9728")],
    "cut with its count": "v1.2 3" + IDX[len("v1.2 4") : IDX.index("jpg 9728")],
    "cut in a line": IDX[:-9],
    "a page": "<html></html>",
    "another offset": IDX.replace("5632", "6144"),
    "another size": IDX.replace(" 703 001.jpg", " 503 001.jpg"),
    "a negative size": IDX.replace("9728 2103", "9728 -1"),
    "no number": IDX.replace("5632", "x"),
    "other fields": IDX.replace("001.CLS", "001.txt"),
    "a key again": IDX.replace("001.", "000."),
    "two keys in a line": IDX.replace("001.CLS", "009.CLS"),
    "no extension": IDX.replace("001.CLS", "001"),
    "an unsafe name": IDX.replace("000.", "../000."),
    "another last key": IDX.replace("003.", "004."),
    "no text": "\udcff",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_not_exact_is_not_used(tmp_path, case):
    folder = written(tmp_path / "shards", "")
    (folder / "a.idx").write_bytes(WRONG[case].encode(errors="surrogateescape"))
    with pytest.warns(
        RuntimeWarning, match=r"a\.tar is read whole, and its \.idx file is not used"
    ):
        dataset = hr.TarDataset.index(folder)
    assert list(dataset) == list(hr.TarDataset(folder))


def in_pax():
    """The same files with times in fractions of seconds, and so with extended headers."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in FILES:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("idx", "data", "says"),
    [
        (PAX_IDX, in_pax(), "the bytes from 0 to 2560 are not one header"),
        (IDX, archive(*FILES) + bytes(2 << 20), "samples end at byte 15,360"),
        (IDX, archive(*FILES[::-1]), "the checksum of a header is wrong"),
        (
            IDX,
            archive(*FILES[:6], ("004.jpg", b"x" * 2103), ("004.CLS", b"x" * 2103)),
            "'004'",
        ),
    ],
)
def test_a_file_of_another_archive_is_not_used(tmp_path, idx, data, says):
    folder = written(tmp_path / "shards", idx, data)
    with pytest.warns(RuntimeWarning, match=f"is not used: .*{says}"):
        dataset = hr.TarDataset.index(folder)
    assert list(dataset) == list(hr.TarDataset(folder))


def test_a_truncated_shard_is_an_error(tmp_path):
    data = archive(*FILES)
    folder = written(tmp_path / "shards", IDX, data[:15000])
    with pytest.warns(RuntimeWarning, match="is not used"), pytest.raises(TruncatedShardError):
        hr.TarDataset.index(folder)
