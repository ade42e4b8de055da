"""What is the same for the datasets of all formats, against files of the original writers: see `formats.py`."""

import collections
import itertools
import json
import shutil

import pytest

import headrace as hr
from headrace.errors import ObjectChangedError, ShardError
from object_server import ObjectServer
from tests.unit.datasets.formats import FORMATS, plain
from tests.unit.shards.resuming import resumes_at_every_position

MAP_STYLE = [name for name, format in FORMATS.items() if format.open is not None]
STREAMS = [
    name
    for name, format in FORMATS.items()
    if format.stream or hasattr(format.open, "stream") or format.open
]
COLLATE = {"batch_size": 3, "collate_fn": lambda samples: [*map(plain, samples)]}


def wanted(name):
    return [*map(plain, FORMATS[name].samples)]


def counted(samples):
    return collections.Counter(map(repr, samples))


def read(loader, batches=None):
    with loader:
        taken = itertools.chain.from_iterable(itertools.islice(loader, batches))
        return list(taken), json.loads(json.dumps(loader.state_dict()))


def write(folder, files):
    for key, data in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


@pytest.fixture
def store(request, tmp_path):
    """A folder with the files of the format that the test is about."""
    folder = tmp_path / "files"
    write(folder, FORMATS[request.node.callspec.params["name"]].files)
    return hr.Store(folder.as_uri())


@pytest.fixture
def stream(request, store):
    """Makes the stream of the format; skips the test of one that has none."""
    format = FORMATS[request.node.callspec.params["name"]]
    if format.stream is None and not hasattr(format.open(store), "stream"):
        pytest.skip("the format has no stream")
    return lambda **options: format.as_stream(store, **options)


@pytest.mark.parametrize("name", MAP_STYLE)
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
    for name in MAP_STYLE:
        write(tmp_path / name, FORMATS[name].files)
        datasets.append(FORMATS[name].open(hr.Store((tmp_path / name).as_uri())))
    every, _ = read(hr.DataLoader(hr.concat(datasets), num_workers=1, **COLLATE))
    assert every == [sample for name in MAP_STYLE for sample in wanted(name)]


@pytest.mark.parametrize("name", MAP_STYLE)
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


@pytest.mark.parametrize("name", MAP_STYLE)
def test_cached_samples_need_no_store(name, store, tmp_path):
    dataset = FORMATS[name].open(store)
    if not hasattr(dataset, "cache"):
        pytest.skip("the format has no cache")
    cached = dataset.cache(tmp_path / "cache")
    every, _ = read(hr.DataLoader(cached, **COLLATE))
    shutil.rmtree(tmp_path / "files")
    assert read(hr.DataLoader(cached, **COLLATE))[0] == every == wanted(name)


def test_second_start_makes_no_request(tmp_path):
    files = {
        f"{name}/{key}": data for name in MAP_STYLE for key, data in FORMATS[name].files.items()
    }
    with ObjectServer(files) as server:
        for name in MAP_STYLE:

            def opened(name=name):
                return FORMATS[name].open(
                    hr.Store(f"{server.url}/{name}", options=server.store_options)
                )

            for _ in range(
                2
            ):  # LitDataset asks for the other chunks what the first chunk that it reads decides
                first = hr.open_cached(tmp_path / name, opened)
            before = server.requests()
            second = hr.open_cached(tmp_path / name, opened)
            assert server.requests() == before, name
            for dataset in (first, second):
                assert [*map(plain, dataset.__getitems__(range(len(dataset))))] == wanted(name)


def test_file_of_answers_is_checked_and_objects_are_read_in_their_version(tmp_path):
    format, path = FORMATS["tar index"], tmp_path / "opened"
    with ObjectServer(dict(format.files)) as server:

        def opened():
            return format.open(hr.Store(server.url, options=server.store_options))

        hr.open_cached(path, opened)
        server.put("0.tar", format.files["2.tar"])
        with pytest.raises(ObjectChangedError, match=r"0\.tar"):
            hr.open_cached(path, opened)[0]
        data = path.read_bytes()
        for at in range(0, len(data), 97):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(
                ShardError, match=r"opened.*damaged one; delete it|damaged one; delete it.*opened"
            ):
                hr.open_cached(path, opened)
        path.write_bytes(b"")
        with pytest.raises(ShardError, match="damaged one"):
            hr.open_cached(path, opened)


@pytest.mark.parametrize("name", STREAMS)
def test_stream_has_all_samples_and_continues_at_every_position(name, stream):
    samples = wanted(name)
    assert resumes_at_every_position(lambda: stream(shards_in_parallel=1).map(plain)) == samples
    options = {
        "chunk_bytes": 500,
        "shuffle": True,
        "seed": 1,
        "buffer_size": 4,
        "shards_in_parallel": 2,
    }
    assert counted(resumes_at_every_position(lambda: stream(**options).map(plain))) == counted(
        samples
    )


@pytest.mark.parametrize("name", STREAMS)
def test_two_ranks_share_the_samples_of_a_stream(name, stream):
    ranks = [
        list(stream(seed=0, shuffle=True, shards_in_parallel=1, rank=rank, world_size=2).map(plain))
        for rank in range(2)
    ]
    left_out = counted(wanted(name)) - counted(ranks[0] + ranks[1])
    if FORMATS[name].stream is None:  # an index divides the samples evenly
        assert len(ranks[0]) == len(ranks[1])
        assert left_out.total() < 2
    else:
        assert not left_out
    assert not counted(ranks[0] + ranks[1]) - counted(wanted(name))
