"""Contracts and whole epochs of every dataset on every type of store: S3, Azure, GCS, HTTP, files."""

import collections
import gzip
import json

import numpy as np
import pytest

from headrace import (
    DataLoader,
    FileDataset,
    LinesDataset,
    ObjectDataset,
    TarDataset,
    TokenDataset,
)
from headrace.errors import NotPicklableError, StoreError
from headrace.testing import DatasetContract, StreamContract
from tests.contract.places import PLACES, files
from tests.unit.shards.tars import shard

# of boto3 and moto themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# What is written into a URL in more than one way: each place has to find it under the name it has.
ODD_KEYS = (
    "a b.bin",
    "deep/er/c+d.bin",
    "50%.bin",
    "%2B.bin",
    "ü.bin",
    "q&a=1.bin",
    "tilde~(1)'.bin",
    "h#sh.bin",
)
PHOTOS = {f"{i:02}.bin": bytes([i]) * 100 * i for i in range(6)} | {
    key: key.encode() for key in ODD_KEYS
}
LARGE = bytes(range(251)) * 70_000  # 17.6 MB, which is more than one request
TARS = {
    f"tars/{number}.tar": shard(
        [f"{number}-{i}" for i in range(count)],
        txt=lambda key: f"text of {key}".encode(),
        cls=lambda key: b"1",
    )
    for number, count in enumerate((7, 5, 8))
}
SAMPLES = [
    f"{number}-{i}" for number, count in enumerate((7, 5, 8)) for i in range(count)
]
ROWS = [{"row": i, "text": "é" * i} for i in range(40)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
TOKENS = np.arange(1000, dtype=np.uint16)
OBJECTS = {
    **{f"photos/{key}": data for key, data in PHOTOS.items()},
    "large/one.bin": LARGE,
    **TARS,
    "packed/0.tar.gz": gzip.compress(TARS["tars/0.tar"]),
    "lines/a.jsonl": b"".join(LINES[:25]),
    "lines/b.jsonl.gz": gzip.compress(b"".join(LINES[25:])),
    "tokens/0.bin": TOKENS[:600].tobytes(),
    "tokens/1.bin": TOKENS[600:].tobytes(),
}


@pytest.fixture(scope="module", params=PLACES, ids=lambda make: make.__name__)
def place(request, tmp_path_factory):
    with request.param(OBJECTS, tmp_path_factory.mktemp(request.param.__name__)) as place:
        yield place


def at(place, name):
    """A shard's URL, or its key in a ready store."""
    return name if "backend" in place.options else f"{place.url}/{name}"


def photos(place):
    if "backend" in place.options:
        return ObjectDataset(place.store(), suffix=".bin", labels=len)
    return ObjectDataset(
        place.store("photos"), labels=len, keys=None if place.lists else sorted(PHOTOS)
    )


class At:
    """One of the stores."""

    @pytest.fixture(autouse=True)
    def _at(self, place):
        self.place = place

    def copied(self, test):
        """Datasets over this process's memory cannot be pickled, which is an error; all others can."""
        if self.place.travels:
            test()
        else:
            with pytest.raises(NotPicklableError):
                test()


class Map(At, DatasetContract):
    def test_pickled_copy_gives_same_samples(self):
        self.copied(super().test_pickled_copy_gives_same_samples)


class Stream(At, StreamContract):
    def test_pickled_copy_gives_same_stream(self):
        self.copied(super().test_pickled_copy_gives_same_stream)


class TestObjectDataset(Map):
    def make_dataset(self):
        return photos(self.place)


class TestIndexedTarDataset(Map):
    def make_dataset(self):
        return TarDataset.index(
            at(self.place, "tars/{0..2}.tar"), store=self.place.store()
        )


class TestWindowDataset(Map):
    def make_dataset(self):
        return TokenDataset(
            at(self.place, "tokens/{0..1}.bin"),
            seq_len=50,
            stride=49,
            store=self.place.store(),
        )


class TestTarDataset(Stream):
    def make_dataset(self):
        return TarDataset(
            at(self.place, "tars/{0..2}.tar"), chunk_bytes=3000, store=self.place.store()
        )


class TestLinesDataset(Stream):
    def make_dataset(self):
        shards = [at(self.place, "lines/a.jsonl"), at(self.place, "lines/b.jsonl.gz")]
        return LinesDataset(shards, chunk_bytes=500, store=self.place.store())


class TestFileDataset(DatasetContract):
    @pytest.fixture(autouse=True)
    def _at(self, tmp_path):
        self.folder = tmp_path
        with files(OBJECTS, tmp_path):
            yield

    def make_dataset(self):
        return FileDataset(self.folder / "photos", labels=len)

    def test_epoch_delivers_every_file_once(self):
        assert epoch(self.make_dataset()) == PHOTOS


# Whole epochs


def epoch(dataset, **more):
    """The samples of an epoch by key; each must be delivered once."""
    with DataLoader(dataset, batch_size=4, collate_fn=list, **more) as loader:
        samples = [
            (sample.key, bytes(sample.data)) for batch in loader for sample in batch
        ]
    assert len(dict(samples)) == len(samples), "a sample came twice"
    return dict(samples)


@pytest.fixture(params=["thread", "process"])
def engine(request, place):
    """Each placement in which the objects can be read."""
    if request.param == "process" and not place.travels:
        return {"placement": "thread"}
    return {"placement": request.param, "num_workers": int(request.param == "process")}


def test_epoch_delivers_every_object_once_for_any_key(place, engine):
    came = {
        key.removeprefix("photos/"): data
        for key, data in epoch(photos(place), shuffle=True, **engine).items()
    }
    assert {key: came[key] for key in PHOTOS} == PHOTOS


def test_epoch_of_a_tar_stream_delivers_every_sample_once(place, engine):
    shards = [at(place, "tars/{1..2}.tar"), at(place, "packed/0.tar.gz")]
    dataset = TarDataset(shards, shuffle=True, seed=1, store=place.store())
    with DataLoader(
        dataset, batch_size=4, transform=lambda sample: sample["txt"].decode(), **engine
    ) as loader:
        came = collections.Counter(text for batch in loader for text in batch)
    assert came == collections.Counter(f"text of {key}" for key in SAMPLES)


def test_large_object_is_read_whole_in_parts(place):
    if not place.lists:  # the first part tells the size
        dataset = ObjectDataset(place.store("large"), keys=["one.bin"])
    elif "backend" in place.options:
        dataset = ObjectDataset(place.store(), suffix="one.bin")
    else:
        dataset = ObjectDataset(place.store("large"))
    assert bytes(dataset[0].data) == LARGE


def test_glob_finds_shards_or_reports_that_the_store_cannot_list(place):
    if place.lists:
        dataset = TarDataset(at(place, "tars/*.tar"), store=place.store())
        assert len(dataset.shards) == 3
        assert sorted(sample["__key__"] for sample in dataset) == sorted(SAMPLES)
        windows = TokenDataset(at(place, "tokens/*.bin"), seq_len=50, store=place.store())
        assert windows[0].tolist() == TOKENS[:50].tolist()
        return
    with pytest.raises(StoreError, match="cannot list"):
        TarDataset(at(place, "tars/*.tar"), store=place.store())
