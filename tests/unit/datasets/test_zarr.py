"""`ZarrDataset` gives slices of the arrays that zarr-python writes; each chunk is fetched once for its neighbours."""

import contextlib
import json
import re
import warnings

import icechunk
import numcodecs
import numpy as np
import pytest
import torch
import zarr

import headrace as hr
from headrace.errors import HeadraceError, ObjectNotFoundError, ShardError
from headrace.testing import same

IMAGES = np.arange(100 * 3 * 4).reshape(100, 3, 4)
LAYOUTS = {
    "v3": {"chunks": (8, 3, 2)},
    "v2": {"chunks": (8, 3, 2), "zarr_format": 2, "order": "F"},
    "sharded": {"chunks": (4, 3, 4), "shards": (16, 3, 4)},
    "raw": {"chunks": (8, 3, 4), "compressors": None},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("zarr")
    for name, layout in LAYOUTS.items():
        group = zarr.open_group(
            root / name, mode="w", zarr_format=layout.get("zarr_format", 3)
        )
        layout = {key: value for key, value in layout.items() if key != "zarr_format"}
        group.create_array("images", shape=IMAGES.shape, dtype=">i4", **layout)[:] = (
            IMAGES
        )
        group.create_array("labels", shape=(100,), chunks=(50,), dtype="u2")[:] = (
            np.arange(100)
        )
        group.create_array("short", shape=(99,), chunks=(50,), dtype="f2")[:] = 1
    return root


def objects(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def server(root, serve):
    return serve(objects(root))


def opened(server, url, **options):
    return hr.ZarrDataset(url, store=server.store(), **options)


# Chunks or shards of images, and indexes of shards; chunks of labels.
@pytest.mark.parametrize(
    ("layout", "requests"), [("v3", 26 + 2), ("sharded", 25 + 7 + 2), ("raw", 15)]
)
@pytest.mark.parametrize("blocks_at_once", [None, 4])
def test_each_chunk_is_requested_once_for_neighbours(
    server, layout, requests, blocks_at_once
):
    dataset = opened(server, layout, arrays=["images", "labels"])
    sampler = blocks_at_once and hr.BlockShuffleSampler(
        dataset, block_size=8, blocks_at_once=4, seed=0
    )
    before = len(server.seen())
    with hr.DataLoader(dataset, 10, sampler=sampler) as loader:
        batches = list(loader)
    order = torch.cat([batch["labels"] for batch in batches])
    assert order.dtype == torch.uint16
    assert same(
        torch.cat([batch["images"] for batch in batches]).numpy(),
        IMAGES[order.numpy()].astype(np.int32),
    )
    assert sorted(order.tolist()) == [*range(100)]
    assert len(server.seen()) - before == loader.stats().requests.requests == requests


MAPS = np.arange(20 * 12 * 10, dtype=np.int32).reshape(20, 12, 10)
MAP_LAYOUTS = {
    "v3": {"chunks": (5, 3, 2)},
    "v2": {"chunks": (5, 3, 2), "zarr_format": 2, "order": "F"},
    "sharded": {"chunks": (5, 3, 2), "shards": (10, 6, 6)},
}


def windows_of(maps, y, x):
    """Windows in the order of `ZarrDataset`: of a slice one after the other, then the next slice."""
    rows, columns = maps.shape[1] // y, maps.shape[2] // x
    cut = maps[:, : rows * y, : columns * x].reshape(len(maps), rows, y, columns, x)
    return cut.swapaxes(2, 3).reshape(-1, y, x)


@pytest.mark.parametrize("layout", MAP_LAYOUTS)
@pytest.mark.parametrize(("y", "x"), [(3, 2), (6, 4), (12, 10), (9, 6)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_samples_are_slices_along_the_axis_or_windows_of_these(
    tmp_path, layout, y, x, axis
):
    options = {**MAP_LAYOUTS[layout], "shape": MAPS.shape, "dtype": MAPS.dtype}
    for name in ("chunks", "shards"):
        if name in options:
            options[name] = tuple(np.roll(options[name], axis).tolist())
    options["shape"] = tuple(np.roll(MAPS.shape, axis).tolist())
    # The axes 0, 1, 2 of MAPS are these axes.
    time, across, along = ((place + axis) % 3 for place in range(3))
    array = zarr.create_array(tmp_path / "x", **options)
    array[:] = np.moveaxis(MAPS, (0, 1, 2), (time, across, along))
    windows = {} if (y, x) == MAPS.shape[1:] else {across: y, along: x}
    dataset = hr.ZarrDataset(tmp_path / "x", axis=time - 3, windows=windows)
    wanted = windows_of(MAPS, y, x)
    if across > along:
        wanted = wanted.swapaxes(1, 2)
    assert dataset.block_size == 5 * (12 // y) * (10 // x)
    assert same(torch.stack([*dataset]).numpy(), wanted)


@pytest.mark.counts
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_chunk_of_windows_is_requested_once(tmp_path, serve, shuffle):
    group = zarr.open_group(tmp_path, mode="w")
    for name, chunks in {"wind": (5, 3, 2), "heat": (10, 6, 4)}.items():
        group.create_array(name, shape=MAPS.shape, chunks=chunks, dtype="i4")[:] = (
            MAPS + 1
        )
    server = serve(objects(tmp_path))
    dataset = opened(server, "", arrays=["wind", "heat"], windows={1: 6, 2: 4})
    assert len(dataset) == 20 * 2 * 2
    before = len(server.seen())
    assert same(dataset[3]["wind"].numpy(), MAPS[0, 6:12, 4:8] + 1)
    assert len(server.seen()) - before == 4 + 1, "only the chunks of the window"
    dataset = opened(server, "", arrays=["wind", "heat"], windows={1: 6, 2: 4})
    before = len(server.seen())
    with hr.DataLoader(dataset, 7, shuffle=shuffle, seed=0) as loader:
        batches = list(loader)
    found = torch.cat([batch["wind"] for batch in batches])
    assert same(found, torch.cat([batch["heat"] for batch in batches]))
    wanted = windows_of(MAPS, 6, 4) + 1
    assert same(
        found[found[:, 0, 0].argsort()].numpy(), wanted[wanted[:, 0, 0].argsort()]
    )
    assert same(found.numpy(), wanted) is not shuffle
    # The rest of the last axis is not read.
    assert len(server.seen()) - before == 4 * 4 * 4 + 2 * 2 * 2


@pytest.mark.parametrize(
    ("windows", "what"),
    [
        ({0: 5}, "of axes from 0 on, other than 0"),
        ({-1: 2}, "of axes from 0 on"),
        ({1: 4}, r"multiples of the chunks \(5, 3, 2\)"),
        ({1: 15}, r"within the shape \(20, 12, 10\)"),
        ({1: 0}, "must be"),
        ({1: -3}, "must be"),
    ],
)
def test_windows_that_do_not_fit_are_refused(tmp_path, windows, what):
    zarr.create_array(tmp_path, shape=MAPS.shape, chunks=(5, 3, 2), dtype="i4")
    with pytest.raises(ValueError, match=what):
        hr.ZarrDataset(tmp_path, windows=windows)
    with pytest.raises(IndexError):
        hr.ZarrDataset(tmp_path, windows={3: 2})


def test_arrays_with_other_windows_are_refused(tmp_path):
    group = zarr.open_group(tmp_path, mode="w")
    for name, width in {"a": 8, "b": 16}.items():
        group.create_array(name, shape=(4, width), chunks=(2, 4), dtype="i4")
    with pytest.raises(ValueError, match=r"as many windows.*\(4, 2\).*\(4, 4\)"):
        hr.ZarrDataset(tmp_path, arrays=["a", "b"], windows={1: 4})


def test_windows_of_maps_that_are_too_large_to_decode(tmp_path):
    side = 1 << 17
    zarr.create_array(tmp_path, shape=(2, side, side), chunks=(1, 2048, 2048), dtype="u1")
    with pytest.raises(ShardError, match="too much"):
        hr.ZarrDataset(tmp_path, missing="fill")
    dataset = hr.ZarrDataset(tmp_path, missing="fill", windows={1: 2048, 2: 2048})
    assert len(dataset) == 2 * 64 * 64
    assert dataset[-1].shape == (2048, 2048)


def test_kept_chunks_are_bounded(server):
    one = 8 * 3 * 4 * 4  # bytes of a block
    for cache_bytes, requests in ((one, 2 * 4), (2 * one, 4)):
        dataset = opened(server, "v3/images", cache_bytes=cache_bytes)
        before = len(server.seen())
        for index in (0, 8, 1, 9):  # of two blocks, each of two chunks
            assert same(dataset[index].numpy(), IMAGES[index].astype(np.int32))
        assert len(server.seen()) - before == requests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_chunk_is_an_error_unless_fill_values_are_asked_for(
    root, serve, layout
):
    files = objects(root)
    lost = min(key for key in files if re.fullmatch(rf"{layout}/images/.*\d", key))
    del files[lost]  # of the first samples
    server = serve(files)
    dataset = opened(server, f"{layout}/images")
    assert same(dataset[99].numpy(), IMAGES[99].astype(np.int32))
    with pytest.raises(ShardError, match=rf"no such chunk.*missing='fill'.*{lost}"):
        dataset[0]
    with hr.DataLoader(dataset, 2) as loader:
        batches, errors = iter(loader), []
        for _ in range(2):  # of one read
            with pytest.raises(ShardError) as error:
                next(batches)
            errors.append(
                [note for note in error.value.__notes__ if "stage fetch" in note]
            )
    assert [len(notes) for notes in errors] == [1, 1]
    assert (opened(server, f"{layout}/images", missing="fill")[0][:, :2] == 0).all()


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("axis", [0, 1])
def test_chunks_that_a_writer_left_out_of_a_shard_have_the_fill_value(
    tmp_path, location, axis
):
    codec = zarr.codecs.ShardingCodec(chunk_shape=(2, 2), index_location=location)
    path = str(tmp_path / "x")
    array = zarr.create_array(
        path, shape=(10, 4), chunks=(8, 4), dtype="i4", serializer=codec, compressors=None
    )
    array[:] = np.arange(1, 41).reshape(10, 4)
    array[2:4, 2:] = 0  # not written
    dataset = hr.ZarrDataset(path, axis=axis)
    assert same(torch.stack([*dataset]).numpy(), np.moveaxis(array[:], axis, 0))


@pytest.mark.parametrize(
    "codec", [numcodecs.Zstd(), numcodecs.Blosc(), numcodecs.LZ4()], ids=str
)
def test_a_chunk_that_unpacks_to_very_much_is_refused(tmp_path, codec):
    zarr.create_array(
        tmp_path / "x",
        shape=(4,),
        chunks=(4,),
        dtype="i4",
        zarr_format=2,
        compressors=codec,
    )[:] = 1
    packed = codec.encode(bytes(400 << 20))
    (tmp_path / "x/0").write_bytes(packed)
    with pytest.raises(
        ShardError,
        match=rf"is damaged: .*{len(packed):,} bytes are said to unpack to 419,430,400",
    ):
        hr.ZarrDataset(tmp_path / "x")[0]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_truncated_chunk_of_blosc_is_refused(tmp_path, zarr_format):
    module = numcodecs if zarr_format == 2 else zarr.codecs
    zarr.create_array(
        tmp_path / "x",
        shape=(4000,),
        chunks=(4000,),
        dtype="i8",
        zarr_format=zarr_format,
        compressors=module.Blosc() if zarr_format == 2 else module.BloscCodec(),
    )[:] = np.random.default_rng(0).integers(0, 1 << 62, 4000)
    chunk = tmp_path / "x" / ("0" if zarr_format == 2 else "c/0")
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(ShardError, match="this Blosc chunk is truncated"):
        hr.ZarrDataset(tmp_path / "x")[0]


def test_a_shard_that_was_overwritten_is_an_error(server, root):
    dataset = opened(server, "sharded/images")
    dataset[0]  # its index is kept
    key = "sharded/images/c/0/0/0"
    server.put(key, objects(root)["sharded/images/c/1/0/0"])
    with pytest.raises(HeadraceError, match="overwritten since"):
        dataset[5]


def test_format_3_needs_no_answer_for_keys_that_are_not_there(server):
    assert len(opened(server, "v3/images")) == 100
    assert [seen.key for seen in server.seen()] == ["v3/images/zarr.json"]


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"arrays": ["images", "short"]}, ValueError, r"same length.*100.*99"),
        ({"arrays": ["images", "labels"], "axis": 1}, IndexError, r"out of range"),
        ({"arrays": "none"}, ObjectNotFoundError, r"of a group, name arrays=.*v3/none"),
    ],
)
def test_what_cannot_be_read_is_refused(root, options, error, what):
    with pytest.raises(error, match=what):
        hr.ZarrDataset(root / "v3", **options)


def changed(tmp_path, **changes):
    """An array of format 2 with other metadata."""
    zarr.create_array(
        tmp_path / "x",
        shape=(4, 4),
        chunks=(2, 2),
        dtype="f4",
        zarr_format=2,
        overwrite=True,
    )[:] = 1
    metadata = tmp_path / "x" / ".zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"compressor": {"id": "pickle", "protocol": 5}}, "pickle"),
        (
            {
                "dtype": "|O",
                "filters": [{"id": "vlen-utf8"}],
                "compressor": {"id": "pickle"},
            },
            "would run its code",
        ),
        ({"chunks": [0, 2]}, "is not of a Zarr array"),
        ({"shape": [4, 1 << 40]}, "too much"),
        ({"shape": [10**30, 4]}, "is not of a Zarr array"),
        ({"chunks": [10**30, 2]}, "is damaged"),
    ],
)
def test_metadata_that_lie_or_would_run_code_are_refused(tmp_path, changes, what):
    with pytest.raises(ShardError, match=what):
        hr.ZarrDataset(changed(tmp_path, **changes)).__getitems__([0, 1])


def test_types_that_torch_lacks_stay_numpys(tmp_path):
    dates = np.arange(6).astype("M8[s]").reshape(3, 2)
    with warnings.catch_warnings(action="ignore"):  # zarr's, of such types
        zarr.create_array(tmp_path, data=dates, zarr_format=2)
    assert same(hr.ZarrDataset(tmp_path)[1], dates[1])


TEXTS = np.array([["a", ""], ["é", "longer than the reference to a string"], ["y", "z"]])


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", [str, "U8", "S8", "bytes"])
def test_strings_are_pythons(tmp_path, zarr_format, dtype):
    of_bytes = dtype in ("S8", "bytes")
    texts = np.char.encode(TEXTS, "utf-8").astype(object) if of_bytes else TEXTS
    with warnings.catch_warnings(action="ignore"):
        group = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
        type = zarr.dtype.VariableLengthBytes() if dtype == "bytes" else dtype
        for name, data in {"rows": texts, "single": texts[:, 1]}.items():
            chunks = (2, 1)[: data.ndim]
            group.create_array(name, shape=data.shape, chunks=chunks, dtype=type)[:] = (
                data
            )
        dataset = hr.ZarrDataset(tmp_path, arrays=["rows", "single"])
        wanted = zip(group["rows"][:].tolist(), group["single"][:].tolist(), strict=True)
    assert [*dataset] == [{"rows": row, "single": single} for row, single in wanted]
    with hr.DataLoader(dataset, 3, num_workers=1) as loader:
        (batch,) = loader
    assert batch["single"] == [each["single"] for each in dataset]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_damaged_strings_are_errors_or_strings(tmp_path, zarr_format):
    options = {"zarr_format": zarr_format, "compressors": None}
    zarr.create_array(tmp_path / "x", shape=(3, 2), chunks=(3, 2), dtype=str, **options)[
        :
    ] = TEXTS
    chunk = tmp_path / "x" / ("0.0" if zarr_format == 2 else "c/0/0")
    data = chunk.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(data[: random.integers(4, 2 * len(data))])
        # The first four bytes are the number of strings, for which numcodecs allocates memory.
        place = random.integers(4, max(5, len(damaged)))
        damaged[place : place + 1] = random.bytes(1)
        chunk.write_bytes(damaged)
        with contextlib.suppress(ShardError):
            rows = [*hr.ZarrDataset(tmp_path / "x")]
            assert all(type(text) is str for row in rows for text in row)


def test_attributes_that_change_the_values_cause_a_warning(tmp_path):
    zarr.create_array(tmp_path, shape=(4,), dtype="i2", attributes={"scale_factor": 0.1})[
        :
    ] = 7
    with pytest.warns(
        UserWarning, match="has scale_factor: samples are the values before"
    ):
        dataset = hr.ZarrDataset(tmp_path)
    assert dataset[0] == 7


@pytest.mark.parametrize("options", [{}, {"engines": 2}])
def test_a_store_of_icechunk_is_read_in_any_process(tmp_path, options):
    repository = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(tmp_path))
    )
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="x", shape=(100, 3), chunks=(8, 3), dtype="f4")[
        :80
    ] = np.ones((80, 3))
    session.commit("ones, and chunks that were never written")
    dataset = hr.ZarrDataset(repository.readonly_session("main").store, arrays="x")
    with hr.DataLoader(dataset, 10, shuffle=True, seed=0, **options) as loader:
        assert torch.cat(list(loader)).sum() == 240
