"""`ObjectDataset` against moto's S3 server, filled by itself and by boto3."""

import gzip

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from headrace._core.store.store import Store
from headrace.datasets.lines import LinesDataset
from headrace.datasets.objects import ObjectDataset
from headrace.errors import EmptyListingError, ObjectNotFoundError
from tests.contract.places import moto_bucket

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of boto3 and moto themselves

COUNT = 1010  # more than a page of a listing


def body_of(i):
    return b"%d " % i * (i % 50 + 1)


@pytest.fixture(scope="module")
def s3():
    """A bucket with more objects than fit one page, and its store options."""
    with moto_bucket("photos") as (client, options):
        bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]  # 10 s faster than by requests
        for i in range(COUNT):
            bucket.put_object("photos", f"train/{i % 7}/{i:05}.bin", body_of(i))
        client.put_object(Bucket="photos", Key="other.txt", Body=b"")
        yield client, options


@pytest.fixture(scope="module")
def photos(s3):
    return ObjectDataset(Store("s3://photos/train", options=s3[1]), suffix=".bin", labels=lambda key: int(key[0]))


def test_listing_of_several_pages_is_complete_and_sorted(photos):
    assert tuple(photos.keys) == tuple(sorted(f"{i % 7}/{i:05}.bin" for i in range(COUNT)))


def test_empty_prefix_and_missing_bucket_are_different_errors(s3):
    with pytest.raises(EmptyListingError, match="s3://photos/nothing"):
        ObjectDataset(Store("s3://photos/nothing", options=s3[1]))
    with pytest.raises(ObjectNotFoundError, match="NoSuchBucket"):
        ObjectDataset(Store("s3://no-such-bucket", options=s3[1]))


def test_object_with_content_encoding_is_not_decompressed(s3):
    client, options = s3
    packed = gzip.compress(b"a" * 10_000)
    client.put_object(Bucket="photos", Key="packed/a.gz", Body=packed, ContentEncoding="gzip")
    client.put_object(Bucket="photos", Key="packed/a.jsonl.gz", Body=gzip.compress(b"1\n2\n"), ContentEncoding="gzip")
    dataset = ObjectDataset(Store("s3://photos/packed", options=options), suffix="a.gz")
    assert bytes(dataset[0].data) == packed
    assert list(LinesDataset("s3://photos/packed/a.jsonl.gz", store=Store("s3://photos", options=options))) == [1, 2]
