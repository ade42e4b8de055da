"""A listing by directories gives what one from end to end gives, and costs hardly more requests."""

import contextlib
import random

import obstore
import pytest
from obstore.store import from_url

from headrace._store.retry_policy import RetryPolicy
from headrace._store.store import Store
from headrace.datasets.lines import LinesDataset
from headrace.datasets.objects import ObjectDataset
from headrace.errors import StoreError, StoreUnreachableError
from object_server import Fault, ObjectServer
from tests.answers import answering
from tests.servers import store_of

PAGE = 1000


def classes(count, size):
    return [f"class{i:03}/{j:05}.jpg" for i in range(count) for j in range(size)]


def awkward(seed):
    """A tree of random depth and width, whose names sort otherwise as names than as paths."""
    chance = random.Random(seed)
    parts = ["a", "a-b", "a.b", "a b", "a!", "b", "é", "日本", "\U0001f600", "z%20", "Z"]
    keys = set()
    for _ in range(400):
        directory = "/".join(chance.choices(parts, k=chance.randrange(4)))
        keys.update(
            f"{directory}/{i}" if directory else str(i)
            for i in range(chance.choice([1, 3, 10, 60]))
        )
    return sorted(keys)


SHAPES = {
    "flat": ([f"{i:05}.jpg" for i in range(5500)], 6),
    "classes": (classes(100, 60), 6 + 2 + 3),
    "small directories": (classes(64, 100), 7 + 2),
    "a directory for each object": ([f"{i:05}/image.jpg" for i in range(4000)], 8 + 1),
    "a directory before many objects": (
        classes(1, 1500) + [f"z{i:05}" for i in range(5500)],
        7 + 7 + 2,
    ),
    "awkward names": (awkward(1), None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_key_comes_once_and_in_order_with_its_size_and_tag(shape):
    keys, most = SHAPES[shape]
    with ObjectServer({f"data/{key}": b"%d" % i for i, key in enumerate(keys)}) as server:
        dataset = ObjectDataset(store_of(server, "data"))
        requests = server.requests()["LIST"]
        assert dataset.keys == tuple(sorted(keys))
        flat = obstore.list(
            from_url(server.url + "/data", **server.store_options), chunk_size=100_000
        ).collect()
        assert [(entry["size"], entry["e_tag"]) for entry in flat] == [
            (dataset._catalog.sizes[i], dataset._catalog.etags[i])
            for i in range(len(keys))
        ]
        assert len(flat) == len(keys)
    assert requests >= -(-len(keys) // PAGE)
    assert most is None or requests <= most


def test_markers_of_folders_are_left_out_and_empty_objects_are_not():
    keys = (
        "",
        "a",
        "cats/",
        "cats",
        "cats/1.jpg",
        "cats/empty",
        "cats-2",
        "dogs/deep/2.jpg",
    )
    with ObjectServer(
        {f"train/{key}": b"jpeg" if key.endswith(".jpg") else b"" for key in keys}
    ) as server:
        dataset = ObjectDataset(store_of(server, "train"))
        assert list(dataset.keys) == [
            "a",
            "cats-2",
            "cats/1.jpg",
            "cats/empty",
            "dogs/deep/2.jpg",
        ]
        assert [bytes(dataset[index].data) for index in range(5)] == [
            b"",
            b"",
            b"jpeg",
            b"",
            b"jpeg",
        ]


@pytest.mark.parametrize("other", ["/b.txt", "b.txt/"])
def test_keys_that_differ_by_a_slash_at_an_end_are_an_error_and_the_marker_of_a_folder_is_not(
    other,
):
    with ObjectServer({"b.txt": b"one!", other: b"two!"}) as server:
        store = store_of(server)
        for dataset in (ObjectDataset, LinesDataset):
            with pytest.raises(
                StoreError,
                match=r"two objects are listed as 'b\.txt': .* differ by a slash",
            ):
                dataset(store)
    with ObjectServer({"b.txt": b"one!", other: b""}) as server:
        assert bytes(ObjectDataset(store_of(server))[0].data) == b"one!"


def test_pages_of_several_parts_are_asked_for_at_once():
    with ObjectServer(dict.fromkeys(classes(64, 300), b""), latency=0.5) as server:
        assert len(ObjectDataset(store_of(server))) == 64 * 300
        assert 4 < server.max_concurrent <= 16


def test_a_suffix_or_a_glob_chooses_in_every_part():
    keys = classes(20, 200) + [key + ".txt" for key in classes(20, 200)]
    chosen = sorted(key for key in keys if key.endswith(".txt"))
    with ObjectServer(dict.fromkeys(keys, b"")) as server:
        store = store_of(server)
        for suffix in (".txt", (".txt", ".gif")):
            assert ObjectDataset(store, suffix=suffix).keys == tuple(chosen)
        assert LinesDataset("**/*.txt", store=store).shards == tuple(
            f"{server.url}/{key}" for key in chosen
        )


@pytest.mark.parametrize(
    "fault",
    [Fault("status", method="LIST", share=0.3), Fault("repeat", method="LIST")],
    ids=["fails now and then", "keys out of order"],
)
def test_a_store_that_misbehaves_is_listed_whole(fault):
    keys = classes(64, 100)
    with ObjectServer(dict.fromkeys(keys, b"")) as server:
        server.misbehave(fault)
        policy = RetryPolicy(max_attempts=20, initial_backoff=0.001)
        assert ObjectDataset(store_of(server, retry=policy)).keys == tuple(keys)


def test_a_store_that_fails_for_good_is_one_error():
    with ObjectServer(dict.fromkeys(classes(64, 100), b"")) as server:
        server.misbehave(Fault("status", method="LIST", skip=4, status=403))
        with pytest.raises(StoreError, match=r"listing: .*credentials"):
            ObjectDataset(store_of(server))


@contextlib.contextmanager
def endless(keys, *, name="endpoint"):
    """Options of a store that answers every listing with the same page, and the token of one that follows."""
    more = "<Size>1</Size><LastModified>2020-01-01T00:00:00Z</LastModified>"
    page = "".join(f"<Contents><Key>{key}</Key>{more}</Contents>" for key in keys)
    page = f"<ListBucketResult><NextContinuationToken>n</NextContinuationToken>{page}</ListBucketResult>"
    with answering(lambda request: request.send(200, page.encode())) as url:
        yield {"skip_signature": True, name: url}


SEVERAL = [f"{place}{number:03}" for place in "ab" for number in range(600)]


@pytest.mark.parametrize("keys", [["a"] * 500, SEVERAL, SEVERAL[:1000], ["b", "a"] * 250])
@pytest.mark.parametrize(
    ("url", "name"), [("s3://c", "endpoint"), ("gs://c", "base_url")]
)
def test_a_continuation_token_that_repeats_is_an_error(url, name, keys):
    with (
        endless(keys, name=name) as options,
        pytest.raises(StoreError, match=r"no end: .*, and so this key: '[ab]"),
    ):
        ObjectDataset(Store(url, options=options))


@pytest.mark.parametrize(("place", "keys"), [("", []), ("*.txt", ["a.txt"])])
def test_pages_without_end_that_the_client_reads_by_itself_are_an_error(place, keys):
    with (
        endless(keys) as options,
        pytest.raises(StoreUnreachableError, match="no end of a listing, came within"),
    ):
        LinesDataset(
            place,
            store=Store(
                "s3://c", options=options, timeout=0.3, retry=RetryPolicy(deadline=0.3)
            ),
        )
