"""A listing that is kept in a manifest: listed once, and read from then on."""

from __future__ import annotations

from headrace._core.manifest.index_file import PathOrUrl, find_index
from headrace._core.manifest.parsing import Origin, format_of, parse_manifest
from headrace._core.manifest.serialization import serialize_manifest
from headrace._core.store.catalog import Catalog
from headrace._core.store.client import StoreClient
from headrace._core.store.redaction import redact_url


class ListingCache:
    """Where the listing of a store is kept. Its methods wait.

    Args:
        place: the manifest's path or URL.
        client: of the store.
        suffix: how the listed keys end; None where they may end anyhow.

    Raises:
        ValueError: the name does not say which format it is, or names no store.
    """

    def __init__(self, place: PathOrUrl, client: StoreClient, suffix: str | tuple[str, ...] | None) -> None:
        self._file = find_index(place, client)
        self._format = format_of(self._file.name, None)
        self._origin = Origin.of(redact_url(client.url), suffix)
        self._url = client.url

    def read(self) -> Catalog | None:
        """What is kept; None where nothing is yet.

        Raises:
            ManifestError: it is of another listing, or damaged.
            OSError: it cannot be read.
        """
        try:
            data = self._file.read()
        except FileNotFoundError:
            return None
        catalog, found = parse_manifest(data, self._file.name, self._format, self._url)
        self._origin.check(found, self._file.name)
        # A listing has no labels; those of a manifest of a dataset that had some are not asked for here.
        return Catalog(catalog.keys, catalog.sizes, catalog.etags)

    def write(self, catalog: Catalog) -> None:
        """Keep a listing.

        Raises:
            OSError: it cannot be written.
        """
        self._file.write(serialize_manifest(catalog, self._file.name, self._format, self._origin))
