"""`headrace index URL`: build the index of shards."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from headrace._base.cgroup import usable_cores
from headrace._shards.discovery import Shard, find_shards
from headrace._shards.indexing import (
    PARALLEL_BUILDS,
    Indexing,
    beside,
    build_index,
    build_parts,
    place_of,
    with_heads,
)
from headrace._streams.blocking import background_loop
from headrace.datasets.lines import LinesDataset
from headrace.datasets.sharded import ShardedStream
from headrace.datasets.tar import TarDataset
from headrace.datasets.tfrecord import TFRecordDataset
from headrace.loader import DataLoader

_FORMATS: dict[str, type[ShardedStream[Any]]] = {
    "tar": TarDataset,
    "lines": LinesDataset,
    "tfrecord": TFRecordDataset,
}


def run(arguments: argparse.Namespace) -> bool:
    """Build the index, or a part of the index.

    Args:
        arguments: parsed arguments of the command. `part` is a tuple: number of the part, from 1,
            and number of parts.

    Returns:
        True.
    """
    loop = background_loop()
    stream = _find(arguments.url, arguments.format)
    shards = loop.run(with_heads(stream._parts))
    stream._parts = ()  # the decoders are pickled without the shards
    length = (
        None if arguments.length is None else _function_of(arguments.length, "--length")
    )
    indexing = Indexing(stream.index_decoder, length)
    place = (
        beside(shards) if arguments.output is None else place_of(arguments.output, None)
    )
    if place is None:
        raise ValueError("no folder has all shards: give --output")
    number, count = arguments.part or (1, 1)
    _build(
        shards[number - 1 :: count],
        indexing,
        place,
        max(1, arguments.processes or int(usable_cores())),
    )
    if arguments.part is not None:
        print(f"{place.name}: part {number} of {count} is complete")
        return True
    index = loop.run(build_index(shards, indexing, place))
    print(
        f"{place.name}: {len(index):,} shards, {index.counts.sum():,} samples, "
        f"{memoryview(index.data).nbytes:,} bytes"
    )
    return True


def _find(url: str, format: str | None) -> ShardedStream[Any]:
    """Return the stream of the shards.

    Without a format, the endings of the shards' names decide.
    """
    if format is None:
        suffixes = tuple(ending for kind in _FORMATS.values() for ending in kind.suffixes)
        keys = [shard.key.lower() for shard in find_shards(url, suffixes=suffixes)]
        kinds = [
            name
            for name, kind in _FORMATS.items()
            if any(key.endswith(kind.suffixes) for key in keys)
        ]
        if len(kinds) != 1:
            what = " and ".join(kinds) or "no known ending"
            raise ValueError(f"{url} has shards of {what}: give --format")
        (format,) = kinds
    return _FORMATS[format](url)


def _build(
    shards: Sequence[Shard], indexing: Indexing, place: Shard, processes: int
) -> None:
    """Build the index parts of shards in several processes.

    Each process reads several shards at once.
    """
    size = min(PARALLEL_BUILDS, -(-len(shards) // processes) or 1)
    num_workers = min(processes, -(-len(shards) // size)) if processes > 1 else 0
    loader = DataLoader(
        shards,
        size,
        num_workers=num_workers,
        collate_fn=functools.partial(_build_parts, indexing, place),
        # This process has used obstore, and obstore does not work after a fork.
        multiprocessing_context="spawn" if num_workers else None,
    )
    with loader, tqdm(total=len(shards), unit="shard", desc="index", disable=None) as bar:
        for count in loader:
            bar.update(count)


def _build_parts(indexing: Indexing, place: Shard, shards: list[Shard]) -> int:
    background_loop().run(build_parts(shards, indexing, place))
    return len(shards)


def _function_of(name: str, option: str) -> Any:
    """Import the function named by an option, as ``module:function``."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option} {name}: {error}; write module:function") from error
