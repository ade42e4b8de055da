"""`headrace pack SRC DST`: pack small objects or shards into shards."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from headrace.datasets.lines import LinesDataset
from headrace.datasets.objects import ObjectDataset
from headrace.datasets.parquet import ParquetDataset
from headrace.datasets.tar import TarDataset
from headrace.packing import pack

__all__ = ["function_of", "run"]


def run(arguments: argparse.Namespace) -> bool:
    """Pack the source and print the totals.

    Args:
        arguments: parsed arguments of the command.

    Returns:
        True.
    """
    packed = pack(
        _dataset(arguments.source),
        arguments.destination,
        format=arguments.format,
        shard_size=arguments.shard_size,
        num_workers=arguments.num_workers,
        transform=None
        if arguments.transform is None
        else function_of(arguments.transform, "--transform"),
    )
    print(f"{packed.shards:,} shards, {packed.samples:,} samples, {packed.nbytes:,} bytes")
    return True


def _dataset(source: str) -> Any:
    for kind in (TarDataset, LinesDataset):
        if source.endswith(kind.suffixes):
            return kind(source, shards_in_parallel=1)  # keeps the order of the shards
    return (
        ParquetDataset(source)
        if source.endswith(ParquetDataset._suffixes)
        else ObjectDataset(source)
    )


def function_of(name: str, option: str) -> Any:
    """Import the function named by an option.

    Args:
        name: name of the function, as ``module:function``.
        option: name of the option, for the error message.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option} {name}: {error}; write module:function") from error
