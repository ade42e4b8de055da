"""A listing cached in a manifest."""

from __future__ import annotations

from headrace._core.manifest.parsing import Origin, format_of, parse_manifest
from headrace._core.manifest.serialization import serialize_manifest
from headrace._core.manifest.table_file import PathOrUrl, find_table
from headrace._core.store.catalog import Catalog
from headrace._core.store.client import StoreClient
from headrace._core.store.redaction import redact_url


class ListingCache:
    """The listing of a store, cached in a manifest. Its methods block.

    Raises:
        ValueError: the name has no known format, or names no store.
    """

    def __init__(self, file: PathOrUrl, client: StoreClient, suffix: str | tuple[str, ...] | None) -> None:
        self._file = find_table(file, client)
        self._format = format_of(self._file.name, None)
        self._origin = Origin.of(redact_url(client.url), suffix)
        self._url = client.url

    def read(self) -> Catalog | None:
        """The cached listing, or None.

        Raises:
            ManifestError: it is of another listing, or corrupt.
            OSError: it cannot be read.
        """
        try:
            data = self._file.read()
        except FileNotFoundError:
            return None
        catalog, found = parse_manifest(data, self._file.name, self._format, self._url)
        self._origin.check(found, self._file.name)
        # A listing has no labels: those of a manifest of a labelled dataset are ignored.
        return Catalog(catalog.keys, catalog.sizes, catalog.etags)

    def write(self, catalog: Catalog) -> None:
        """Cache a listing; raises `OSError` if it cannot be written."""
        self._file.write(serialize_manifest(catalog, self._file.name, self._format, self._origin))
