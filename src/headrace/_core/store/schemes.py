"""Traits of each kind of store, in one table: a new scheme is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import obstore.store
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, ObjectStore, S3Store


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What differs between kinds of stores.

    Attributes:
        schemes: the schemes of their URLs.
        backend: obstore's class for them, by which a ready store is recognised.
        open: opens one, given a URL and keyword options.
        remote: whether they are reached over HTTP, with time-outs, proxies and other options of an HTTP client.
        bucket: whether the root is a bucket, so that one store serves all its keys. Else each directory is a store.
        quoted: whether URLs have their keys percent-encoded.
        prefix: what environment variables, and long names of options, begin with; empty for none.
        endpoint_options: names of options that give the endpoint. The first group with a value is used.
        credential_options: names of options any of which settles the credentials; without one, the client asks services
            of the machine for them.
        single_host: whether all requests go to one host: always, if an endpoint and credentials are given, or never.
        aws_profiles: whether credentials may come from AWS profiles.
        suffix_ranges: whether the last bytes of an object can be requested without knowing its size.
        list_resumes: whether a listing can begin after a key.
        list_in_order: whether it then costs one page, and keys come sorted.
        unordered_suffix: the end of names of buckets that have no order all the same.
        may_list: whether all servers can list.
        shared: whether other processes find the same objects.
    """

    schemes: tuple[str, ...]
    backend: type[object]
    open: Callable[..., ObjectStore] = obstore.store.from_url
    remote: bool = True
    bucket: bool = True
    quoted: bool = False
    prefix: str = ""
    endpoint_options: tuple[tuple[str, ...], ...] = ()
    credential_options: tuple[str, ...] = ()
    single_host: Literal["always", "with endpoint", "never"] = "never"
    aws_profiles: bool = False
    suffix_ranges: bool = True
    list_resumes: bool = False
    list_in_order: bool = False
    unordered_suffix: str | None = None
    may_list: bool = True
    shared: bool = True


TRAITS = (
    StoreTraits(
        schemes=("s3", "s3a"),
        backend=S3Store,
        prefix="aws_",
        endpoint_options=(("endpoint_url_s3",), ("endpoint", "endpoint_url")),
        credential_options=("access_key_id", "skip_signature", "credential_provider"),
        single_host="with endpoint",
        aws_profiles=True,
        list_resumes=True,
        list_in_order=True,
        unordered_suffix="--x-s3",  # directory buckets
    ),
    StoreTraits(
        schemes=("gs",),
        backend=GCSStore,
        prefix="google_",
        endpoint_options=(("base_url",),),
        list_resumes=True,
        list_in_order=True,
    ),
    StoreTraits(
        schemes=("az", "adl", "azure", "abfs", "abfss"),
        backend=AzureStore,
        prefix="azure_",
        endpoint_options=(("endpoint", "storage_endpoint"),),
        suffix_ranges=False,
        list_resumes=True,  # by listing from the first page on, whatever key is asked for
    ),
    StoreTraits(
        schemes=("http", "https"),
        backend=HTTPStore,
        bucket=False,
        quoted=True,
        single_host="always",
        may_list=False,  # WebDAV only
    ),
    StoreTraits(schemes=("file",), backend=LocalStore, remote=False, bucket=False, quoted=True),
    StoreTraits(schemes=("memory",), backend=MemoryStore, remote=False, bucket=False, shared=False),
)
_BY_SCHEME = {scheme: traits for traits in TRAITS for scheme in traits.schemes}
_OTHER = StoreTraits(schemes=(), backend=object, bucket=False)


def traits_of(url: str, backend: ObjectStore | None = None) -> StoreTraits:
    """The traits of a store, by its backend if it is open, else by its URL.

    Example:
        >>> traits_of("s3://bucket/train").list_in_order, traits_of("https://host").may_list
        (True, False)
    """
    if backend is not None:
        return next((traits for traits in TRAITS if isinstance(backend, traits.backend)), _OTHER)
    return _BY_SCHEME.get(urlsplit(url).scheme, _OTHER)
