"""Base classes for datasets of your own format.

The page docs/your-own-dataset.md describes how to use the classes. The ready datasets are in
`headrace`.
"""

from __future__ import annotations

from headrace._shards.discovery import Shard, find_shards, map_shards
from headrace._shards.reading import BadRecord, Decoder
from headrace.datasets.cached import RangedShards
from headrace.datasets.sharded import ShardedStream, StreamOptions

__all__ = [
    "BadRecord", "Decoder", "RangedShards", "Shard", "ShardedStream", "StreamOptions",
    "find_shards", "map_shards",
]  # fmt: skip
