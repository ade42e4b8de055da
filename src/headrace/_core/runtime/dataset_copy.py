"""The copy of a loader's dataset that engines in other processes have, and whether it is still true."""

from __future__ import annotations

from headrace._core.engine.config import EngineConfig
from headrace._core.interface.kinds import propagate_epoch
from headrace._core.runtime.change_detection import Snapshot, held_functions
from headrace._core.transport.shared_pickle import fingerprint


class DatasetCopy:
    """What was copied: a dataset, and the configuration of the engines that read the copy.

    Args:
        config: as it was when the copy was made.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._seen = _Seen(config.dataset)

    def serves(self, config: EngineConfig) -> bool:
        """Whether the engines do what `config` asks for, with a copy of the dataset as it is now."""
        return self._config.same_engine(config) and self._seen == _Seen(config.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` here. Its copy gets the epoch with the next session, and stays valid."""
        same = self._seen == _Seen(self._config.dataset)
        propagate_epoch(self._config.dataset, epoch)
        if same:
            self._seen = _Seen(self._config.dataset)


class _Seen:
    """A fingerprint of a dataset and of the functions that it holds."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, dataset: object) -> None:
        self._snapshot = Snapshot(dataset)
        self._functions = [*map(fingerprint, held_functions(dataset))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        return self._snapshot.same_as(other._snapshot) and self._functions == other._functions
