"""`Store`: its arguments, keys within it, and datasets that share one."""

import pytest
from obstore.store import AzureStore, HTTPStore, MemoryStore, S3Store

import headrace as hr
from object_server import ObjectServer
from tests.answers import answering
from tests.servers import store_of


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"timeout": 0}, "timeout=0 "),
        ({"timeout": -1.5}, "timeout=-1.5 "),
        ({"backend": MemoryStore(), "options": {}}, "options="),
    ],
)
def test_invalid_arguments_are_refused_before_any_request(wrong, why):
    with pytest.raises(ValueError, match=why):
        hr.Store("s3://bucket", **wrong)


@pytest.mark.parametrize(
    ("url", "place", "key"),
    [
        ("s3://bucket", "a/b.tar", "a/b.tar"),
        ("s3://bucket/", "s3://bucket/a/b.tar", "a/b.tar"),
        ("s3://bucket/a", "s3://bucket/a/b c%20.tar", "b c%20.tar"),
        ("https://host/a", "https://host/a/b%20c.tar", "b c.tar"),
        ("/data", "/data/b c.tar", "b c.tar"),
    ],
)
def test_key_of_a_url_under_the_store_is_relative_to_it(url, place, key):
    assert hr.Store(url).key_of(place) == key


@pytest.mark.parametrize(
    "place", ["s3://other/a.tar", "s3://bucket2/a.tar", "https://bucket/a.tar"]
)
def test_key_of_a_url_elsewhere_is_refused(place):
    with pytest.raises(ValueError, match="not under the URL of store="):
        hr.Store("s3://bucket").key_of(place)


def test_https_url_of_a_bucket_is_a_bucket_and_not_a_web_server():
    with ObjectServer({f"a b/{i:04}": b"%d" % i for i in range(1500)}) as server:
        options = server.store_options
        del options["region"]  # the URL has it
        store = hr.Store(
            "https://s3.us-east-1.amazonaws.com/bucket/a%20b", options=options
        )
        dataset = hr.ObjectDataset(store)
        assert (len(dataset), bytes(dataset[1499].data), server.requests()["LIST"]) == (
            1500,
            b"1499",
            2,
        )
        assert store.key_of(f"{store.url}/c%20d") == "c d"


@pytest.mark.parametrize(
    ("url", "backend"),
    [
        ("https://bucket.s3.eu-west-1.amazonaws.com/a", S3Store),
        ("https://account.r2.cloudflarestorage.com/bucket/a", S3Store),
        ("https://account.blob.core.windows.net/files/a", AzureStore),
        ("https://onelake.dfs.fabric.microsoft.com/files/a", AzureStore),
        ("https://storage.googleapis.com/bucket/a", HTTPStore),
        ("https://amazonaws.com.host/a", HTTPStore),
    ],
)
def test_kind_of_an_https_url_is_that_of_the_store_that_is_opened_for_it(url, backend):
    store = hr.Store(url)
    assert store.traits.backend is type(store.backend()) is backend


def test_containers_of_one_azure_account_are_two_stores():
    first, other = (
        hr.Store(f"abfss://{name}@account.dfs.core.windows.net/data")
        for name in ("train", "val")
    )
    assert (first.url, first.store_id != other.store_id) == (
        "abfss://train@account.dfs.core.windows.net/data",
        True,
    )
    assert len(hr.TarDataset([first.name("0.tar"), other.name("0.tar")]).shards) == 2


def test_host_may_be_an_ipv6_address(tmp_path):
    def answer(request):
        key = request.path.partition("?")[0].rpartition("/")[2]
        request.send_object(f"{key}\n".encode()) if key.endswith(
            ".txt"
        ) else request.send(404, b"/k?sig=canary")

    with answering(answer, host="[::1]") as url:
        shards = hr.LinesDataset(f"{url}/d/{{0..1}}.txt")
        assert list(shards) == ["0.txt", "1.txt"]
        assert shards.shards == (f"{url}/d/0.txt", f"{url}/d/1.txt")
        objects = hr.ObjectDataset(
            hr.Store(url.replace("[", "me:canary@[")), keys=["0.txt", "other"]
        ).cache(tmp_path)
        assert [bytes(objects[0].data) for _ in range(2)] == [b"0.txt\n"] * 2
        with pytest.raises(hr.StoreError, match="not found") as caught:
            objects[1]
        assert "canary" not in f"{caught.value} {objects!r}"
        of_s3 = hr.Store("s3://bucket", options={"endpoint": url, "skip_signature": True})
        assert bytes(hr.ObjectDataset(of_s3, keys=["1.txt"])[0].data) == b"1.txt\n"


def test_datasets_of_one_store_share_one_client():
    with ObjectServer({"a": b"a", "b.txt": b"b\n"}) as server:
        store = store_of(server)
        objects, lines = (
            hr.ObjectDataset(store, keys=["a"]),
            hr.LinesDataset("b.txt", store=store),
        )
        assert bytes(objects[0].data) == b"a"
        assert list(lines) == ["b"]
        assert objects._store is lines._parts[0].store
