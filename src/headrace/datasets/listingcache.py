"""A listing that is kept in a manifest: listed once, and read from then on."""

from __future__ import annotations

import asyncio

from headrace.datasets.catalog import Catalog
from headrace.datasets.indexfile import IndexFile
from headrace.datasets.listing import list_objects
from headrace.datasets.manifests import Origin, format_of, read_manifest
from headrace.datasets.manifestwriting import manifest_bytes
from headrace.io.reader import StoreReader
from headrace.io.urls import redact_url

__all__ = ["list_or_read"]


async def list_or_read(reader: StoreReader, suffix: str | tuple[str, ...] | None, file: IndexFile) -> Catalog:
    """What a store's listing gives, from a manifest of it where there is one; else the manifest is written.

    Args:
        reader: of the store.
        suffix: how the keys end that are wanted; None for all.
        file: where the manifest is, or will be.

    Raises:
        ManifestError: it is of another listing, or damaged.
        StoreError: the store refused, failed, or cannot list.
        OSError: the manifest cannot be read or written.
    """
    format = format_of(file.name, None)
    origin = Origin.of(redact_url(reader.url), suffix)
    try:
        data = await file.read()
    except FileNotFoundError:
        catalog = await list_objects(reader, suffix)
        await file.write(await asyncio.to_thread(manifest_bytes, catalog, file.name, format, origin))
        return catalog
    catalog, found = await asyncio.to_thread(read_manifest, data, file.name, format, reader.url)
    origin.check(found, file.name)
    # A listing has no labels; those of a manifest that was written by hand are not asked for here.
    return Catalog(catalog.keys, catalog.sizes, catalog.etags)
