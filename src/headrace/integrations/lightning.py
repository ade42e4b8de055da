"""Integration with Lightning.

A callback keeps the position of headrace loaders in checkpoints, and gives the number of the epoch
to the loaders. Lightning finds the callback by an entry point, so a program only imports headrace.

The callback is needed for three reasons:

- The Trainer gives the number of the epoch only to samplers, and only after `iter()`.
- The Trainer drops the states of loaders from a checkpoint at the end of an epoch.
- With a loader of unknown length, the Trainer holds a batch not yet trained on.

The callback reads the Trainer's counts from public attributes of loops, and from the checkpoint.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from headrace._core.consumer.control import trainers
from headrace._core.consumer.epoch import BatchIterator
from headrace._core.order.state import LoaderState, states_from_dict, states_to_dict
from headrace._core.ranks.rankinfo import has_process_group
from headrace._core.streams.kinds import signature_of
from headrace._core.streams.resumable import State
from headrace._core.torchcompat.private import tree_leaves
from headrace.loader import DataLoader

__all__ = ["callbacks", "pytorch_lightning_callbacks"]

_COUNTS = ("ready", "started", "processed", "completed")


class _Begun(NamedTuple):
    """An iteration of a training loader."""

    batches: int = 0  # batches of earlier iterations in this epoch
    ready: int = -1  # Lightning's count of all ready batches at the start of the iteration


# Warnings point to this module, because programs often ignore the warnings of Lightning's modules.
class _Positions:
    """Methods of the callback.

    A subclass also inherits from Lightning's `Callback`.

    Attributes:
        package: name of the Lightning package.
        trainer: the running Trainer, or None.
        checkpoint: the continued checkpoint, until the end of the continued epoch.
        begun: the latest iteration of each training loader.
        before_step: states of loaders before the running step, if steps take batches themselves.
        raised: amount by which Lightning's batch counts are too high until the first step. With
            raised counts, Lightning finds the end of the epoch.
    """

    package: str
    trainer: Any = None
    checkpoint: dict[str, Any] | None = None
    begun: dict[Any, _Begun]
    before_step: dict[Any, LoaderState]
    raised = 0

    def __reduce__(self) -> tuple[Any, ...]:  # Lightning pickles callbacks for spawned processes
        return _callback, (self.package,)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.trainer, self.begun, self.before_step = trainer, {}, {}
        trainers.append(self)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.trainer = self.checkpoint = None
        trainers[:] = [each for each in trainers if each is not self]

    on_exception = teardown

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        if _steps_take_batches(trainer):
            counts = vars(trainer.fit_loop.epoch_loop.batch_progress.current)
            counts.update((name, counts[name] - self.raised) for name in _COUNTS)
            self.raised = 0
            loaders = tree_leaves(trainer.train_dataloader)
            self.before_step = {
                each: self._position(each) for each in loaders if isinstance(each, DataLoader)
            }

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self.checkpoint, self.begun = None, {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if states := saved.get("combined_loader"):
            now = trainer.fit_loop.epoch_loop.batch_progress.current
            kept = self.before_step if now.started > now.processed else {}
            trained = None if _steps_take_batches(trainer) else now.processed
            pairs = zip(_stateful(trainer.train_dataloader), states, strict=True)
            saved["combined_loader"] = [
                self._state(each, trained, kept) if isinstance(each, DataLoader) else state
                for each, state in pairs
            ]

    def _position(self, loader: DataLoader[Any], trained: int | None = None) -> LoaderState:
        """Return the state after `trained` batches of the epoch.

        Without `trained`, return the state after all fetched batches.
        """
        position = loader._control.position
        # The call of `next()` that ended the epoch counts too.
        over = position.progress is not None and position.progress.over
        state = position.states(loader, int(over))[0]
        if trained is None:
            return state
        untrained = self.begun.get(loader, _Begun()).batches + state.steps - trained
        return position.states(loader, min(max(untrained, 0), state.steps) + over)[0]

    def _state(
        self, loader: DataLoader[Any], trained: int | None, kept: Mapping[Any, LoaderState]
    ) -> State:
        """Return the state of all ranks.

        A state in `kept` replaces the position of the loader.
        """
        control, position = loader._control, loader._control.position
        if position.resumed:
            return states_to_dict(position.resumed)
        state = kept.get(loader) or self._position(loader, trained)
        # During the handling of an error, other ranks do not take part in a collective call.
        if (
            not has_process_group()
            or not position.is_of_rank(loader)
            or sys.exception() is not None
        ):
            return states_to_dict((state,))
        gathered: list[Any] = [None] * torch.distributed.get_world_size(control.group)
        torch.distributed.all_gather_object(gathered, state, control.group)
        return states_to_dict(gathered)

    def begins(self, loader: DataLoader[Any]) -> bool:
        """Let an iteration begin at the Trainer's position.

        Returns:
            Whether the Trainer needs an empty iteration first.
        """
        trainer, control, position = self.trainer, loader._control, loader._control.position
        if not (trainer.training and loader in tree_leaves(trainer.train_dataloader)):
            evaluated = (
                trainer.val_dataloaders,
                trainer.test_dataloaders,
                trainer.predict_dataloaders,
            )
            if loader in tree_leaves(evaluated):
                control.set_epoch(loader, trainer.current_epoch)
            return False
        ready = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        over = position.progress is not None and position.progress.over
        begun = self.begun.get(loader, _Begun())
        earlier = position.states(loader, 1)[0].steps if over and begun.ready >= 0 else 0
        self.begun[loader] = _Begun(begun.batches + earlier, ready)
        if begun.ready < 0 and self.checkpoint is not None and "loops" in self.checkpoint:
            return self._continue(loader, self.checkpoint["loops"]["fit_loop"])
        if position.progress is None and not position.next_epoch:
            control.set_epoch(loader, trainer.current_epoch)
        # Lightning calls `iter()` again without training in between: stay in the epoch.
        elif ready == begun.ready and not over:
            control.set_epoch(loader, position.next_epoch - 1)
        return False

    def _continue(self, loader: DataLoader[Any], saved: dict[str, Any]) -> bool:
        """Let an iteration begin at the position of a checkpoint.

        Returns:
            Whether the Trainer needs an empty iteration first.
        """
        trainer, control, position = self.trainer, loader._control, loader._control.position
        epoch, batches = saved["epoch_progress"], saved["epoch_loop.batch_progress"]
        begun, total = epoch["total"], batches["total"]
        ended = epoch["current"]["ready"] == epoch["current"]["processed"]
        # Saved in `on_train_batch_end`.
        in_batch = total["ready"] == total["processed"] == total["completed"] + 1
        in_epoch = begun["started"] == begun["processed"] + 1
        counted = in_batch and in_epoch and batches["is_last_batch"]
        steps = trained = batches["current"]["completed"] + in_batch
        states = saved["state_dict"].get("combined_loader")
        pairs = (
            list(zip(_stateful(trainer.train_dataloader), states, strict=True)) if states else []
        )
        if pairs and not position.resumed:
            loader.load_state_dict(next(state for each, state in pairs if each is loader))
        # The longest loader has not restarted in this epoch, so the longest loader has the number
        # of batches.
        if pairs and _steps_take_batches(trainer):
            known = [
                states_from_dict(state)[0] for each, state in pairs if isinstance(each, DataLoader)
            ]
            trained = max(state.steps for state in known)
        if not position.resumed:
            if trained and not (states or counted or ended):
                warnings.warn(
                    f"the checkpoint was saved after batch {trained} of an epoch, and has no state "
                    "of this loader: its first samples come again, its last ones do not",
                    UserWarning,
                    stacklevel=1,
                )
            control.set_epoch(loader, epoch["current"]["processed"] + counted)
            return False
        if counted or ended:  # no batch of the saved epoch is left to read
            position.resumed = tuple(each._replace(over=True) for each in position.resumed)
        with control.ranked() as rank:
            left, more = position.batches_left(loader, rank), trained - steps
            self.raised += 0 if counted or ended else more  # counts restart in the next epoch
            # The number of ranks or the batch size may have changed. Lightning ends a continued
            # epoch by the count of batches.
            if left is not None and len(tree_leaves(trainer.train_dataloader)) == 1:
                more += len(loader) - left - trained
            for each in (
                batches["current"],
                vars(trainer.fit_loop.epoch_loop.batch_progress.current),
            ):
                each.update((name, each[name] + more) for name in _COUNTS)
            if counted or (ended and trainer.max_steps == -1):
                list(control.begin(BatchIterator, loader, rank, late_epoch=True))
        # With several loaders, an epoch ends after each loader has ended once. Lightning does not
        # save which loaders have ended.
        return left != 0 and any(
            state.steps < trained and not state.over for state in position.resumed
        )


def _stateful(loaders: Any) -> list[Any]:
    found = tree_leaves(loaders)
    return [
        each for each in found if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ]


def _steps_take_batches(trainer: Any) -> bool:
    """Whether training steps take batches from an iterator themselves."""
    return "dataloader_iter" in signature_of(trainer.lightning_module.training_step).parameters


def callbacks(package: str = "lightning.pytorch") -> list[Any]:
    """Return the callback for Lightning's entry point.

    Args:
        package: name of the Lightning package.

    Returns:
        A list with the callback.
    """
    return [_callback(package)]


def _callback(package: str) -> Any:
    return type(
        "Positions", (_Positions, importlib.import_module(package).Callback), {"package": package}
    )()


pytorch_lightning_callbacks = functools.partial(callbacks, "pytorch_lightning")
