"""What is the same for the datasets of all formats, against files of the original writers: see `formats.py`."""

import collections
import functools
import itertools
import json
import pickle
import shutil

import pytest

import headrace as hr
from headrace.errors import ObjectChangedError
from tests.unit.datasets.formats import FORMATS, plain
from tests.unit.shards.resuming import in_folder, resumes_at_every_position

COLLATE = {"batch_size": 3, "collate_fn": lambda samples: [*map(plain, samples)]}


def wanted(name):
    return [*map(plain, FORMATS[name].samples)]


def counted(samples):
    return collections.Counter(map(repr, samples))


def read(loader, batches=None):
    with loader:
        taken = itertools.chain.from_iterable(itertools.islice(loader, batches))
        return list(taken), json.loads(json.dumps(loader.state_dict()))


@pytest.fixture
def store(request, tmp_path):
    """A folder with the files of the format that the test is about."""
    files = FORMATS[request.node.callspec.params["name"]].files
    return hr.Store(in_folder(tmp_path / "files", files))


@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_by_its_index(name, store):
    dataset, samples = FORMATS[name].open(store), wanted(name)
    assert len(dataset) == len(samples)
    assert [plain(dataset[index]) for index in range(len(samples))] == samples
    assert [plain(dataset[index]) for index in range(-len(samples), 0)] == samples
    assert [*map(plain, dataset.__getitems__([*range(len(samples))]))] == samples
    for index in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            dataset[index]


def test_workers_read_every_format(tmp_path):
    datasets = []
    for name in FORMATS:
        store = hr.Store(in_folder(tmp_path / name, FORMATS[name].files))
        datasets.append(FORMATS[name].open(store))
    every, _ = read(hr.DataLoader(hr.concat(datasets), num_workers=1, **COLLATE))
    assert every == [sample for name in FORMATS for sample in wanted(name)]


@pytest.mark.parametrize("name", FORMATS)
def test_loader_shuffles_and_continues(name, store):
    def loader():
        return hr.DataLoader(FORMATS[name].open(store), shuffle=True, seed=3, **COLLATE)

    every, _ = read(loader())
    assert counted(every) == counted(wanted(name))
    assert every != wanted(name)
    first, state = read(loader(), 2)
    continued = loader()
    continued.load_state_dict(state)
    assert first + read(continued)[0] == every


@pytest.mark.parametrize("name", FORMATS)
def test_cached_samples_need_no_store(name, store, tmp_path):
    dataset = FORMATS[name].open(store)
    if not hasattr(dataset, "cache"):
        pytest.skip("the format has no cache")
    cached = dataset.cache(tmp_path / "cache")
    every, _ = read(hr.DataLoader(cached, **COLLATE))
    shutil.rmtree(tmp_path / "files")
    assert plain(cached[0]) == every[0]
    with pytest.raises(IndexError):
        cached[len(every)]
    assert read(hr.DataLoader(cached, **COLLATE))[0] == every == wanted(name)


def test_pickled_dataset_opens_without_a_request_and_reads_the_same_version(
    tmp_path, serve
):
    server = serve(
        {
            f"{name}/{key}": data
            for name in FORMATS
            for key, data in FORMATS[name].files.items()
        }
    )
    for name in FORMATS:
        first = FORMATS[name].open(server.store(name))
        pickled = pickle.dumps(first)
        before = server.requests()
        second = pickle.loads(pickled)
        assert server.requests() == before, name
        for dataset in (first, second):
            assert [*map(plain, dataset.__getitems__(range(len(dataset))))] == wanted(
                name
            )
    pickled = pickle.dumps(FORMATS["tar index"].open(server.store("tar index")))
    server.put("tar index/0.tar", FORMATS["tar index"].files["2.tar"])
    with pytest.raises(ObjectChangedError, match=r"0\.tar"):
        pickle.loads(pickled)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_stream_has_all_samples_and_continues_at_every_position(name, store):
    def stream(**options):
        return FORMATS[name].open(store).stream(**options).map(plain)

    if not hasattr(FORMATS[name].open(store), "stream"):
        pytest.skip("the format has no stream")
    assert resumes_at_every_position(stream) == wanted(name)
    shuffled = resumes_at_every_position(functools.partial(stream, shuffle=True, seed=1))
    assert counted(shuffled) == counted(wanted(name))
