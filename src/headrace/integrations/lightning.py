"""Lightning's Trainer: a callback that keeps the position of headrace loaders in checkpoints, and passes on the epoch.

Lightning finds it by its entry point, so that a program only imports headrace. The Trainer gives a number of the epoch
to samplers alone, and only after `iter()`; it drops the states of loaders from a checkpoint that was saved at the end
of an epoch; and where a length is unknown it holds a batch that it has not trained on. What it counts is read from the
public attributes of its loops, and from the checkpoint.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from headrace._core.consumer.control import trainers
from headrace._core.consumer.epoch import BatchIterator
from headrace._core.order.state import LoaderState, states_to_dict
from headrace._core.streams.resumable import State
from headrace._core.torchcompat.private import tree_flatten
from headrace.errors import StateError
from headrace.loader import DataLoader

__all__ = ["callbacks", "pytorch_lightning_callbacks"]

_COUNTS = ("ready", "started", "processed", "completed")


class _Positions:
    """The methods of the callback; a subclass is one of Lightning's `Callback` too.

    Attributes:
        trainer: while it runs.
        checkpoint: the one that is continued, until its epoch is over.
        iterated: training loaders that were iterated over since a batch was last trained on.
        ended: those that were given an end. Several loaders end an epoch when each has ended once, and Lightning does
            not save which of them have.
        before: of loaders that are repeated within an epoch, the batches of their earlier iterations.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.checkpoint: dict[str, Any] | None = None
        self.iterated: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ended: weakref.WeakSet[Any] = weakref.WeakSet()
        self.before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.trainer = trainer
        trainers.append(self)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.trainer = self.checkpoint = None
        trainers[:] = [each for each in trainers if each is not self]

    on_exception = teardown

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.iterated.clear()

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self.checkpoint = None
        self.iterated.clear()
        self.before.clear()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        saved = _fit_loop(checkpoint).get("state_dict", {})
        if states := saved.get("combined_loader"):
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            pairs = zip(_stateful(trainer.train_dataloader), states, strict=True)
            saved["combined_loader"] = [self._state(each, trained) or state for each, state in pairs]

    def _state(self, loader: Any, trained: int) -> State | None:
        """The state after the batches that were trained on, of all ranks; None of a loader of another library."""
        if not isinstance(loader, DataLoader):
            return None
        control = loader._control
        if control.resumed:
            return states_to_dict(control.resumed)
        over = control.progress is not None and control.progress.over  # the call that ended it counts as one
        batches = control.states(loader, int(over))[0].batches
        untrained = max(self.before.get(loader, 0) + batches - trained, 0)
        state = control.states(loader, min(untrained, batches) + over)[0]
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        # A collective call. While an error is handled, the state of this rank alone.
        if not distributed or not control.is_of_rank(loader) or sys.exception() is not None:
            return states_to_dict((state,))
        gathered: list[Any] = [None] * torch.distributed.get_world_size(control.group)
        torch.distributed.all_gather_object(gathered, state, control.group)
        return states_to_dict(gathered)

    def begins(self, loader: DataLoader[Any]) -> bool:
        """Let an iteration begin where the Trainer is; returns whether it must be given an empty one first."""
        trainer, control = self.trainer, loader._control
        if not (trainer.training and loader in _flat(trainer.train_dataloader)):
            evaluated = (trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders)
            if any(loader is each for part in evaluated for each in _flat(part)):
                control.set_epoch(loader, trainer.current_epoch)
            return False
        first = loader not in self.before
        over = control.progress is not None and control.progress.over
        if over and not first:
            self.before[loader] += control.states(loader, 1)[0].batches
        again = loader in self.iterated  # and nothing was trained on since
        self.iterated.add(loader)
        if first:
            self.before[loader] = 0
            if self.checkpoint is not None and "loops" in self.checkpoint:
                return self._continue(loader, self.checkpoint)
        if loader in self.ended:
            self.ended.discard(loader)
        elif control.progress is None and not control.next_epoch:
            control.set_epoch(loader, trainer.current_epoch)
        elif again and not over:
            control.set_epoch(loader, control.next_epoch - 1)
        return False

    def _continue(self, loader: DataLoader[Any], checkpoint: dict[str, Any]) -> bool:
        """Let an iteration begin after the batches that a checkpoint was saved after."""
        trainer, control, saved = self.trainer, loader._control, _fit_loop(checkpoint)
        epoch, batches = saved["epoch_progress"], saved["epoch_loop.batch_progress"]
        states = saved["state_dict"].get("combined_loader", [])
        loaders = _stateful(trainer.train_dataloader)
        if states and len(states) != len(loaders):
            raise StateError(
                f"the checkpoint has the states of {len(states)} loaders, and there are {len(loaders)} now"
            )
        ended = len({epoch["current"][name] for name in _COUNTS[:3]}) == 1
        in_batch = _steps(batches["total"]) == (0, 0, 1)  # saved in `on_train_batch_end`
        counted = in_batch and _steps(epoch["total"]) == (0, 1, 0) and batches["is_last_batch"]
        by_steps = trainer.max_steps != -1
        trained = batches["current"]["completed"] + in_batch
        if states and not control.resumed:
            loader.load_state_dict(next(state for each, state in zip(loaders, states, strict=True) if each is loader))
        if not control.resumed:
            if trained and not states and not counted and not ended:
                _warn(
                    f"the checkpoint was saved after batch {trained} of an epoch, and has no state of this loader: the "
                    f"epoch's first samples come again, and its last ones do not. Resume from a checkpoint that was "
                    f"saved at the end of an epoch, or with a headrace.DataLoader."
                )
            control.set_epoch(loader, epoch["current"]["processed"] + counted)
            return False
        if counted or ended:
            control.resumed = tuple(map(_ended, control.resumed))
        with control.ranked() as rank:
            left = control.batches_left(loader, rank)
            if left is not None and (before := len(loader) - left) != trained:
                self._recount(before - trained, batches["current"], control.resumed[0].ranks, rank.world_size)
            if counted or (ended and not by_steps):
                for _ in control.begin(BatchIterator, loader, rank, late_epoch=True):
                    raise AssertionError("an epoch that is over gave a batch")
        if any(state.batches < trained and not state.over for state in control.resumed):
            self.ended.add(loader)
            return True
        return False

    def _recount(self, more: int, saved: dict[str, int], ranks_before: int, ranks: int) -> None:
        """Correct the number of batches trained on, for another number of ranks or batch size.

        Lightning ends an epoch that it continues when that number and the batches it has read are the epoch's length.
        """
        if len(_flat(self.trainer.train_dataloader)) == 1:
            now = self.trainer.fit_loop.epoch_loop.batch_progress.current
            for name in _COUNTS:
                saved[name] += more
                setattr(now, name, getattr(now, name) + more)
        elif ranks_before != ranks:
            _warn(
                f"the checkpoint was saved on {ranks_before} ranks, and there are {ranks}. With several loaders "
                f"Lightning counts the batches of all by one number, and may end this epoch too early or too late. "
                f"Resume on {ranks_before} ranks."
            )


def _fit_loop(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return found


def _flat(loaders: Any) -> list[Any]:
    return tree_flatten(loaders)[0]


def _stateful(loaders: Any) -> list[Any]:
    return [each for each in _flat(loaders) if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]


def _steps(counts: Mapping[str, int]) -> tuple[int, ...]:
    """How many were ready and not started, started and not processed, processed and not completed."""
    values = [counts[name] for name in _COUNTS]
    return tuple(before - after for before, after in itertools.pairwise(values))


def _ended(state: LoaderState) -> LoaderState:
    """The state of an epoch of which nothing more is to be read, no replacement of a lost batch either."""
    delivered, skipped, in_a_row, _, repeated = state.skipped
    return state._replace(over=True, skipped=(delivered, skipped, in_a_row, 0, repeated))


def _warn(message: str) -> None:
    # Not with a line of Lightning's, whose warnings programs often ignore.
    warnings.warn(message, UserWarning, stacklevel=2)


def callbacks() -> list[Any]:
    """The callback for `lightning.pytorch`: its entry point."""
    from lightning.pytorch import Callback

    return [type("Positions", (_Positions, Callback), {})()]


def pytorch_lightning_callbacks() -> list[Any]:
    """The callback for the package `pytorch_lightning`: its entry point."""
    from pytorch_lightning import Callback

    return [type("Positions", (_Positions, Callback), {})()]
