"""Base classes for datasets of your own format.

The page docs/your-own-dataset.md describes how to use the classes. The ready datasets are in
`headrace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace._core.shards.discovery import Shard as Shard
    from headrace._core.shards.discovery import find_shards as find_shards
    from headrace._core.shards.discovery import map_shards as map_shards
    from headrace._core.shards.reading import BadRecord as BadRecord
    from headrace._core.shards.reading import Decoder as Decoder
    from headrace.datasets.cached import RangedShards as RangedShards
    from headrace.datasets.sharded import ShardedStream as ShardedStream
    from headrace.datasets.sharded import StreamOptions as StreamOptions
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from headrace._core.shards import discovery, reading
        from headrace.datasets import cached, sharded

        return next(
            getattr(module, name)
            for module in (discovery, reading, cached, sharded)
            if hasattr(module, name)
        )


__all__ = [
    "BadRecord", "Decoder", "RangedShards", "Shard", "ShardedStream", "StreamOptions",
    "find_shards", "map_shards",
]  # fmt: skip
