"""Streams made of several streams: concatenated, or mixed by weight."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace._core.interface.fetch_plan import ConcatComposition
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.operators import Concat, Mix, Stop
from headrace._core.interface.order import FollowsEpoch
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.text import dataset_repr


class _MultiStream(FollowsEpoch, AsyncIterableDataset[object]):
    sources: Sequence[object]

    def __init__(self, datasets: Sequence[object]) -> None:
        self.sources = tuple(datasets)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for source in self.sources:
            propagate_epoch(source, epoch)


class ConcatenatedStreams(ConcatComposition, _MultiStream):
    """Streams one after the other; made by `headrace.concat`, and of torch's `ChainDataset`."""

    same_by_lanes = True

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    def __aiter__(self) -> AsyncIterator[object]:
        return Concat(self.sources, numbered=self.numbered)


class MixedStreams(_MultiStream):
    """Samples drawn from several streams by weight; made by `headrace.mix`."""

    def __init__(self, datasets: Sequence[object], weights: Sequence[float], seed: int, stop: Stop) -> None:
        super().__init__(datasets)
        self._weights = tuple(weights)
        self._seed = seed
        self._stop = stop

    def __repr__(self) -> str:
        datasets = ", ".join(map(dataset_repr, self.sources))
        return f"mix([{datasets}], {list(self._weights)}, seed={self._seed}, stop={self._stop!r})"

    def __aiter__(self) -> AsyncIterator[object]:
        return Mix(self.sources, self._weights, self._order_for(self._seed), self._stop)
