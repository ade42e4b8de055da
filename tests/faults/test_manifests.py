"""Lists of objects that are damaged, or made to do harm: an error that names the line, and no request anywhere."""

import gzip

import pytest

from headrace._core.store.store import Store
from headrace.datasets.objects import ObjectDataset
from headrace.testing import ObjectServer

CLOSING = 5.0  # seconds; obstore closes idle connections on threads of its own, some time after their store is gone
NAMES = ["m.csv", "m.csv.gz", "m.jsonl", "m.parquet"]


@pytest.fixture
def server():
    objects = {f"train/{i:03}": b"%d" % i for i in range(50)}
    with ObjectServer({**objects, "secret": b"secret"}) as server:
        yield server


@pytest.fixture
def written(server, tmp_path):
    """A good manifest, its bytes, and the number of requests that it took."""

    def write(name):
        dataset = ObjectDataset(
            Store(server.url + "/train", options=server.store_options), labels=lambda key: f"l{key}"
        )
        dataset.write_manifest(tmp_path / name)
        server.misbehave()  # counts from here
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    "key", ["../secret", "a/../../secret", "..\\secret", "/etc/hostname", "https://evil.example/a"]
)
def test_an_index_that_points_outside_its_prefix_is_refused_with_the_line_and_nothing_is_asked_for(
    case, server, tmp_path, key
):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "train").mkdir()
    server.misbehave()
    case(
        """
        import json, pathlib, pyarrow, pyarrow.parquet
        folder = pathlib.Path(folder)
        (folder / "m.csv").write_text(f"key,label\\n001,a\\n{key},b\\n")
        (folder / "m.jsonl").write_text(json.dumps({"key": "001"}) + "\\n" + json.dumps({"key": key}))
        pyarrow.parquet.write_table(pyarrow.table({"key": ["001", key]}), folder / "m.parquet")
        for url, options in places:
            for name, make, line in (
                ("m.csv", hr.ObjectDataset.from_csv, 3),
                ("m.csv", hr.ObjectDataset.from_manifest, 3),
                ("m.jsonl", hr.ObjectDataset.from_manifest, 2),
                ("m.parquet", hr.ObjectDataset.from_manifest, 2),
            ):
                try:
                    make(hr.Store(url, options=options), folder / name)
                except hr.ManifestError as error:
                    assert (error.line, error.column, error.source) == (line, "key", str(folder / name)), error
                else:
                    raise AssertionError(f"{name} was taken at {url}")
        """,
        within=CLOSING,
        key=key,
        folder=str(tmp_path),
        places=[
            ((tmp_path / "train").as_uri(), {}),
            (f"{server.http_url}/train", {}),
            (f"{server.url}/train", server.store_options),
        ],
    )
    assert server.seen() == server.seen("HEAD") == server.seen("LIST") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_is_cut_anywhere_is_an_error_and_never_a_shorter_dataset(case, server, written, name):
    path = written(name)
    case(
        """
        import pathlib
        path = pathlib.Path(path)
        whole = path.read_bytes()
        last = len(whole.rstrip())  # an end of line at the end says nothing
        for at in range(0, last, max(1, last // 150)):
            path.write_bytes(whole[:at])
            try:
                dataset = hr.ObjectDataset.from_manifest(hr.Store(url + "/train", options=options), path)
            except hr.ManifestError as error:
                assert str(path) in str(error)
            else:
                raise AssertionError(f"cut at {at} of {len(whole)}: {dataset}")
        """,
        within=CLOSING,
        path=str(path),
        url=server.url,
        options=server.store_options,
    )


@pytest.mark.parametrize("name", ["m.csv.gz", "m.parquet"])
def test_a_flipped_bit_in_a_manifest_with_checksums_is_an_error_or_changes_nothing(case, server, written, name):
    path = written(name)
    case(
        """
        import pathlib
        path = pathlib.Path(path)
        whole = path.read_bytes()
        told = lambda: [(key, label) for key, label in zip(dataset.keys, dataset._labels)]
        dataset = hr.ObjectDataset.from_manifest(hr.Store(url + "/train", options=options), path)
        wanted, errors = told(), 0
        for at in range(0, len(whole), max(1, len(whole) // 150)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            path.write_bytes(damaged)
            try:
                dataset = hr.ObjectDataset.from_manifest(hr.Store(url + "/train", options=options), path)
            except hr.ManifestError as error:
                errors += 1
                assert str(path) in str(error)
            else:
                assert told() == wanted, at
        assert errors > 50, errors
        """,
        within=CLOSING,
        path=str(path),
        url=server.url,
        options=server.store_options,
    )


def test_a_manifest_without_checksums_that_names_what_is_not_there_is_a_sample_that_fails(case, server, written):
    path = written("m.csv")
    path.write_text(path.read_text().replace("\n007,", "\n07x,"))
    case(
        """
        dataset = hr.ObjectDataset.from_manifest(hr.Store(url + "/train", options=options), path)
        with hr.DataLoader(dataset, batch_size=10, transform=lambda sample: sample.label, on_error="skip") as loader:
            labels = [label for batch in loader for label in batch]
            (failure,) = loader.stats().skipped
        assert len(labels) == 49
        assert failure.key == "07x" and failure.error == "ObjectNotFoundError", failure
        """,
        within=CLOSING,
        path=str(path),
        url=server.url,
        options=server.store_options,
    )


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.jsonl.gz"])
def test_a_packed_bomb_is_an_error_before_it_fills_memory(case, tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(bytes(256 << 20)))
    case(
        """
        import tracemalloc
        tracemalloc.start()
        try:
            hr.ObjectDataset.from_manifest("s3://bucket", path)
        except hr.ManifestError as error:
            assert "longer than" in str(error), error
        else:
            raise AssertionError("it was taken")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 96 << 20, peak
        """,
        path=str(tmp_path / name),
    )


def test_a_manifest_whose_writer_is_killed_is_the_old_one(case, server, written):
    path = written("m.jsonl")
    before = path.read_bytes()
    case(
        """
        pid = os.fork()
        if not pid:
            try:
                from headrace._core.manifest.index_file import IndexFile
                import pathlib
                os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # written, and not yet in its place
                IndexFile(path, path=pathlib.Path(path))._replace(b"x" * 1000)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        """,
        path=str(path),
    )
    assert path.read_bytes() == before
