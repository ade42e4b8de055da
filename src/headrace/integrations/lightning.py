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
from typing import Any, NamedTuple

import torch

from headrace._consumer.control import trainers
from headrace._consumer.epoch import BatchIterator
from headrace._order.state import states_to_dict
from headrace._ranks.rankinfo import has_process_group
from headrace._streams.kinds import signature_of
from headrace._streams.resumable import State
from headrace._torchcompat.private import tree_leaves
from headrace.loader import DataLoader

__all__ = ["callbacks", "pytorch_lightning_callbacks"]

_COUNTS = ("ready", "started", "processed", "completed")


class _Begun(NamedTuple):
    """An iteration of a training loader."""

    batches: int = 0  # batches of earlier iterations in this epoch
    # Lightning's count of all ready batches at the start of the iteration.
    ready: int = -1


# Warnings point to this module, because programs often ignore the warnings of Lightning's modules.
class _Positions:
    """Methods of the callback.

    A subclass also inherits from Lightning's `Callback`.

    Attributes:
        package: name of the Lightning package.
        trainer: the running Trainer, or None.
        checkpoint: the continued checkpoint, until the end of the continued epoch.
        begun: the latest iteration of each training loader.
    """

    package: str
    trainer: Any = None
    checkpoint: dict[str, Any] | None = None
    begun: dict[Any, _Begun]

    # Lightning pickles callbacks for spawned processes.
    def __reduce__(self) -> tuple[Any, ...]:
        return _callback, (self.package,)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.trainer, self.begun = trainer, {}
        trainers.append(self)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.trainer = self.checkpoint = None
        trainers[:] = [each for each in trainers if each is not self]

    on_exception = teardown

    def on_load_checkpoint(
        self, trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.checkpoint = checkpoint

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self.checkpoint, self.begun = None, {}

    def on_save_checkpoint(
        self, trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if states := saved.get("combined_loader"):
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.processed
            step = trainer.lightning_module.training_step
            if "dataloader_iter" in signature_of(step).parameters:
                # Lightning counts steps, and a step may take several batches.
                trained = None
            pairs = zip(_stateful(trainer.train_dataloader), states, strict=True)
            saved["combined_loader"] = [
                self._state(each, trained) if isinstance(each, DataLoader) else state
                for each, state in pairs
            ]

    def _state(self, loader: DataLoader[Any], trained: int | None) -> State:
        """Return the state of all ranks after `trained` batches of the epoch.

        Without `trained`, return the state after all fetched batches.
        """
        control, position = loader._control, loader._control.position
        if position.resumed:
            return states_to_dict(position.resumed)
        # The call of `next()` that ended the epoch counts too.
        over = position.progress is not None and position.progress.over
        state = position.states(loader, int(over))[0]
        if trained is None:
            warnings.warn(
                "training_step takes dataloader_iter: after a resume, Lightning's counts of "
                "batches may be wrong, an epoch of several loaders may end early, and batches of "
                "a step that failed do not come again",
                UserWarning,
                stacklevel=1,
            )
        else:
            untrained = self.begun.get(loader, _Begun()).batches + state.steps - trained
            state = position.states(loader, min(max(untrained, 0), state.steps) + over)[0]
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
        trainer, control, position = (
            self.trainer,
            loader._control,
            loader._control.position,
        )
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
        trainer, control, position = (
            self.trainer,
            loader._control,
            loader._control.position,
        )
        epoch, batches = saved["epoch_progress"], saved["epoch_loop.batch_progress"]
        begun, total = epoch["total"], batches["total"]
        ended = epoch["current"]["ready"] == epoch["current"]["processed"]
        # Saved in `on_train_batch_end`.
        in_batch = total["ready"] == total["processed"] == total["completed"] + 1
        in_epoch = begun["started"] == begun["processed"] + 1
        counted = in_batch and in_epoch and batches["is_last_batch"]
        trained = batches["current"]["completed"] + in_batch
        states = saved["state_dict"].get("combined_loader")
        pairs = (
            list(zip(_stateful(trainer.train_dataloader), states, strict=True))
            if states
            else []
        )
        if pairs and not position.resumed:
            loader.load_state_dict(next(state for each, state in pairs if each is loader))
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
            position.resumed = tuple(
                each._replace(over=True) for each in position.resumed
            )
        with control.ranked() as rank:
            left = position.batches_left(loader, rank)
            more = 0
            # The number of ranks or the batch size may have changed. Lightning ends a continued
            # epoch by the count of batches.
            if left is not None and len(tree_leaves(trainer.train_dataloader)) == 1:
                more = len(loader) - left - trained
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
        each
        for each in found
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ]


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
        "Positions",
        (_Positions, importlib.import_module(package).Callback),
        {"package": package},
    )()


pytorch_lightning_callbacks = functools.partial(callbacks, "pytorch_lightning")
