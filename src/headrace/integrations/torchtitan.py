"""Integration with torchtitan.

The module does not import torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace._base.text import dataset_repr
from headrace.errors import StateError
from headrace.loader import DataLoader

__all__ = ["HeadraceDataLoader"]


class HeadraceDataLoader:
    """A headrace loader as a torchtitan `BaseDataLoader`.

    For torchtitan 0.3.0; docs/trainers.md says how the main branch differs.

    Write a subclass of `HeadraceDataLoader` and `BaseDataLoader`, in this order. A single iterator
    goes through all epochs of the loader. Your `collate_fn` makes a batch as torchtitan's trainer
    expects: a dict of inputs, and the labels.

    Any number of data-parallel ranks can continue a map-style dataset, if the position is equal on
    all ranks (`ElasticSampler`, `BlockShuffleSampler`, or in order). Otherwise, the number of
    data-parallel ranks must stay the same.

    Args:
        loader: the loader. The loader gives this data-parallel rank its own samples.
        dp_rank: the data-parallel rank from torchtitan.
        dp_world_size: number of data-parallel ranks.
        epochs: number of epochs; None for no end.

    Attributes:
        loader: the loader.

    Example:
        >>> from torchtitan.components.dataloader import BaseDataLoader     # doctest: +SKIP
        >>> class Tokens(HeadraceDataLoader, BaseDataLoader):               # doctest: +SKIP
        ...     @dataclass(kw_only=True, slots=True)
        ...     class Config(BaseDataLoader.Config):
        ...         url: str
        ...
        ...     def __init__(
        ...         self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **others
        ...     ):
        ...         dataset = hr.TokenDataset(config.url, seq_len=seq_len + 1, stride=seq_len)
        ...         sampler = hr.ElasticSampler(dataset, rank=dp_rank, world_size=dp_world_size)
        ...         loader = hr.DataLoader(
        ...             dataset, local_batch_size, sampler=sampler, collate_fn=inputs_and_labels
        ...         )
        ...         super().__init__(loader, dp_rank=dp_rank, dp_world_size=dp_world_size)
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        dp_rank: int,
        dp_world_size: int,
        epochs: int | None = None,
    ) -> None:
        self.loader = loader
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._epochs = epochs
        self._restored = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of all remaining epochs.

        Raises:
            ValueError: an epoch has no batch.
        """
        while (
            self._epochs is None
            or self.loader._control.position.states(self.loader, 0)[0].epoch
            < self._epochs
        ):
            may_be_over, self._restored = self._restored, False
            empty = True
            for batch in self.loader:
                empty = False
                yield batch
            if empty and not may_be_over:
                raise ValueError(
                    f"an epoch has no batch on data-parallel rank {self._dp_rank} of "
                    f"{self._dp_world_size}, so that training would wait for ever: "
                    f"{dataset_repr(self.loader.dataset)}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch.

        See `headrace.DataLoader.state_dict`.
        """
        state = self.loader.state_dict()
        if not self.loader._control.position.is_of_rank(self.loader):
            return state
        return {self._key(): state, "dp_world_size": self._dp_world_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        An empty state has no effect, as torchtitan expects.

        Args:
            state_dict: a result of `state_dict`.

        Raises:
            StateError: the state does not fit the loader or the number of data-parallel ranks, or
                another torchtitan dataloader saved the state.
        """
        if not state_dict:
            return
        state = state_dict
        if self.loader._control.position.is_of_rank(self.loader):
            saved = state_dict.get("dp_world_size")
            if saved != self._dp_world_size:
                raise StateError(
                    f"the state was saved by {saved} data-parallel ranks, and there are "
                    f"{self._dp_world_size} now: "
                    f"each rank of {dataset_repr(self.loader.dataset)} reads other samples. "
                    "Use as many as before; or shards with an index, which any number of ranks "
                    "can continue"
                )
            state = state_dict[self._key()]
        self.loader.load_state_dict(state)
        self._restored = True

    def close(self) -> None:
        """End the loader's iteration, workers and engine."""
        self.loader.close()

    def _key(self) -> str:
        return f"dp_rank_{self._dp_rank}"
