"""The epoch and the position of Lightning's loops, which Lightning does not pass to the loaders that it iterates over.

Its Trainer gives a number of the epoch to samplers alone, and only after `iter()`; it drops the loaders' states of a
checkpoint that was saved at the end of an epoch; where a
length is unknown, it holds a batch that it has not trained on.
The loop that calls a loader is found on the stack: Lightning is never imported, and without it nothing is looked for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from headrace._core.consumer.epoch import BatchIterator
from headrace._core.order.progress import EpochProgress
from headrace._core.order.state import LoaderState, states_to_dict
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.resumable import State
from headrace.errors import StateError

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")  # one library, published as one package and as two
_FITTING = ".loops.fit_loop"
_EVALUATING = (".loops.evaluation_loop", ".loops.prediction_loop")


class Request(NamedTuple):
    """A call of `iter(loader)` by Lightning.

    Attributes:
        epoch: the Trainer's number of the training epoch; None from Fabric, which has none.
        evaluates: whether it is for validation, test or prediction.
        prepares: whether loaders were just set up; the Trainer may ask again before it reads a batch.
        begins: whether the Trainer begins an epoch.
        state: the loader's state in the checkpoint that is resumed from, if Lightning leaves it out.
        skips_rest: whether the Trainer takes the checkpoint's epoch for complete, and the next iteration for the next
            epoch.
        reads_nothing: whether the Trainer ends the checkpoint's epoch once more, and reads nothing of it.
        trained: number of batches of the checkpoint's epoch that were trained on.
        has_states: whether Lightning has states of loaders that it has not restored.
        cycles: whether a loader that ends is begun again in the same epoch.
        counts: Lightning's counts of the checkpoint's batches, if they are of one loader.
    """

    epoch: int | None
    evaluates: bool = False
    prepares: bool = False
    begins: bool = False
    state: Mapping[str, Any] | None = None
    skips_rest: bool = False
    reads_nothing: bool = False
    trained: int = 0
    has_states: bool = False
    cycles: bool = False
    counts: Any = None

    def recount(self, batches: int, *, saved_ranks: int, ranks: int) -> None:
        """Set the number of batches that were trained on: another one, for another number of ranks or batch size.

        Lightning ends an epoch that it continues when that number and the batches it has read are the epoch's length.
        """
        if self.counts is not None:
            values = self.counts if isinstance(self.counts, dict) else vars(self.counts)
            for name in ("ready", "started", "processed", "completed"):
                values[name] += batches - self.trained
        elif self.trained and saved_ranks != ranks:
            _warn(
                f"the checkpoint was saved on {saved_ranks} ranks, after {self.trained} batches of an epoch, which on "
                f"{ranks} ranks are {batches}. With several loaders Lightning counts the batches of all by one number, "
                f"and may end this epoch too early or too late. Resume on {saved_ranks} ranks."
            )

    def warn_of_missing_state(self) -> None:
        """Warn that the epoch of a checkpoint is not continued."""
        _warn(
            f"the checkpoint was saved after batch {self.trained} of an epoch, and has no state of this loader: the "
            f"epoch's first samples come again, and its last ones do not. Resume from a checkpoint that was saved at "
            f"the end of an epoch, or with a headrace.DataLoader."
        )


def _warn(message: str) -> None:
    # Not with a line of Lightning's, whose warnings programs often ignore.
    warnings.warn(message, UserWarning, stacklevel=2)


class _Followed:
    """What a loader remembers of Lightning's requests."""

    prepared: int | None = None  # Lightning's number of the epoch for which it began the last iteration
    gave_end = False  # whether the iteration before the restored one was begun


def follow(loader: Any, rank: RankInfo, asked: Request) -> bool:
    """Let the next iteration begin where Lightning is; returns whether it must be given an empty one first.

    It ends an epoch when each of several loaders has ended once, and does not save which of them have.
    """
    control = loader._control
    followed: _Followed = loader.__dict__.setdefault("_followed", _Followed())
    if asked.state is not None and not control.resumed:
        loader.load_state_dict(asked.state)
    if control.resumed:
        if asked.skips_rest or asked.reads_nothing:
            control.resumed = tuple(map(_ended, control.resumed))
        left = control.batches_left(loader, rank)
        if left is not None and (before := len(loader) - left) != asked.trained:
            asked.recount(before, saved_ranks=control.resumed[0].ranks, ranks=rank.world_size)
        if asked.skips_rest:
            for _ in BatchIterator(control.begin(loader, rank, late_epoch=True), loader):
                raise AssertionError("an epoch that is over gave a batch")
        ended_once = any(state.batches < asked.trained and not state.over for state in control.resumed)
        followed.gave_end = asked.cycles and ended_once and not followed.gave_end
        return followed.gave_end
    if asked.trained and not (asked.has_states or asked.skips_rest or asked.reads_nothing):
        asked.warn_of_missing_state()
    is_new = control.progress is None and not control.next_epoch
    if asked.epoch is not None and (asked.evaluates or is_new):
        control.set_epoch(loader, asked.epoch)
    elif asked.begins and asked.epoch == followed.prepared:  # the iteration before was not read
        control.set_epoch(loader, control.next_epoch - 1)
    if asked.prepares or asked.begins:
        followed.prepared = asked.epoch if asked.prepares else None
    return False


def _ended(state: LoaderState) -> LoaderState:
    """The state of an epoch of which nothing more is to be read, no replacement of a lost batch either."""
    delivered, skipped, in_a_row, _, repeated = state.skipped
    return state._replace(over=True, skipped=(delivered, skipped, in_a_row, 0, repeated))


def saved_state(loader: Any, lag: int) -> State | None:
    """The state for a checkpoint of Lightning's: after the batches trained on, of all ranks; None for other callers."""
    control = loader._control
    progress: EpochProgress | None = control.progress
    saver = None if control.resumed else saving(loader, over=progress is not None and progress.over)
    if saver is None:
        return None
    if saver.in_epoch and progress is not None and lag == 0:
        lag = saver.lag + progress.over  # the call that ended an epoch counts as one
    state = control.state(loader, lag)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    # A collective call. While an error is handled, the state of this rank alone.
    if not distributed or not control.is_of_rank(loader) or sys.exception() is not None:
        return states_to_dict((state,))
    gathered: list[Any] = [None] * torch.distributed.get_world_size(control.group)
    torch.distributed.all_gather_object(gathered, state, control.group)
    return states_to_dict(gathered)


def request(loader: object) -> Request | None:
    """How Lightning asks for the iteration that begins now; None if the caller is another."""
    begins = False
    for module, frame in _frames():
        begins = begins or (module.endswith(".loops.training_epoch_loop") and frame.f_code.co_name == "on_run_start")
        caller: Any = frame.f_locals.get("self")
        if module.endswith(".wrappers") and getattr(caller, "_dataloader", None) is loader:
            return Request(None)
        if module.endswith(_EVALUATING) and _iterates(caller, loader):
            return Request(caller.trainer.fit_loop.epoch_progress.current.processed, evaluates=True)
        if module.endswith(_FITTING) and _iterates(caller, loader):
            prepares = frame.f_code.co_name == "setup_data"
            resumed = _resumed(caller, loader) if prepares else None
            return resumed or Request(caller.epoch_progress.current.processed, prepares=prepares, begins=begins)
    return None


def _iterates(loop: Any, loader: object) -> bool:
    combined = getattr(loop, "_combined_loader", None)
    return combined is not None and any(each is loader for each in combined.flattened)


def _resumed(fit_loop: Any, loader: object) -> Request | None:
    """The request of a fit loop that continues from a checkpoint; None if there is no checkpoint."""
    loaded = fit_loop.trainer._checkpoint_connector._loaded_checkpoint
    if loaded:  # not restored yet: a user's `configure_optimizers` asks for `estimated_stepping_batches`
        if "loops" not in loaded:
            return None
        saved = loaded["loops"]["fit_loop"]
        epochs, batches = saved["epoch_progress"], saved["epoch_loop.batch_progress"]
        states, counts = saved["state_dict"].get("combined_loader", []), batches["current"]
    elif fit_loop.is_resuming:
        epochs = fit_loop.epoch_progress.state_dict()
        batches = fit_loop.epoch_loop.batch_progress.state_dict()
        states = fit_loop._combined_loader_states_to_load  # emptied if Lightning has restored them
        counts = fit_loop.epoch_loop.batch_progress.current
    else:
        return None
    epoch, current = epochs["current"], batches["current"]
    ended = epoch["ready"] == epoch["started"] == epoch["processed"]
    in_epoch = _steps(epochs["total"]) == (0, 1, 0)
    saved_by_batch = _steps(batches["total"]) == (0, 0, 1)  # in `on_train_batch_end`
    counted = saved_by_batch and in_epoch and batches["is_last_batch"]
    by_steps = fit_loop.trainer.max_steps != -1
    return Request(
        epoch["processed"] + counted,
        state=_state_of(loader, fit_loop, states),
        skips_rest=counted or (ended and not by_steps),
        reads_nothing=ended and by_steps,
        trained=current["completed"] + saved_by_batch,
        has_states=bool(states),
        cycles=fit_loop._combined_loader._mode == "max_size_cycle",
        counts=counts if len(fit_loop._combined_loader.flattened) == 1 else None,
    )


def _steps(counts: Mapping[str, int]) -> tuple[int, int, int]:
    """How many were ready and not started, started and not processed, processed and not completed."""
    ready, started, processed, completed = (counts[name] for name in ("ready", "started", "processed", "completed"))
    return ready - started, started - processed, processed - completed


def _state_of(loader: object, fit_loop: Any, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    if not states:
        return None
    stateful = [each for each in fit_loop._combined_loader.flattened if _is_stateful(each)]
    if len(stateful) != len(states):
        raise StateError(f"the checkpoint has the states of {len(states)} loaders, and there are {len(stateful)} now")
    return next((state for each, state in zip(stateful, states, strict=True) if each is loader), None)


def _is_stateful(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class Saving(NamedTuple):
    """A call of `loader.state_dict()` by Lightning, for a checkpoint; every rank makes it.

    Attributes:
        lag: of the batches that the loader gave out, the number of those that were not trained on.
        in_epoch: whether a Trainer asks. It has not counted the epoch as complete, or restores none of it.
    """

    lag: int
    in_epoch: bool


def saving(loader: object, *, over: bool) -> Saving | None:
    """How Lightning asks for the state; None if the caller is another.

    Args:
        loader: the loader.
        over: whether the iteration has ended.
    """
    for module, frame in _frames():
        if module.endswith(_FITTING) and frame.f_code.co_name == "on_save_checkpoint":
            return Saving(_untrained(frame.f_locals["self"], loader, over), in_epoch=True)
        if module.endswith(".strategies.strategy") and frame.f_code.co_name == "_convert_stateful_objects_in_state":
            return Saving(0, in_epoch=False)
    return None


def _untrained(fit_loop: Any, loader: object, over: bool) -> int:
    """The loader's batches that the fetcher holds, and that which is being trained on."""
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    if fetcher is None:  # after `fit()`
        return 0
    progress = fit_loop.epoch_loop.batch_progress.current
    held = getattr(fetcher, "batches", None)
    if held is None:  # the user's `training_step` fetches
        return max(0, int(fetcher.fetched - progress.processed))
    in_training = int(progress.ready - progress.processed)
    if combined._mode != "max_size":
        return len(held) + in_training
    # None stands for a loader that has ended.
    place = next(number for number, each in enumerate(combined.flattened) if each is loader)
    leaves = [combined._spec.flatten_up_to(batch)[place] for batch, *_ in held]
    return sum(leaf is not None for leaf in leaves) + (0 if over else in_training)


def injects_sampler() -> bool:
    """Whether Lightning constructs a loader anew, with a sampler of its own for several ranks."""
    return any(
        module.endswith(".utilities.data") and frame.f_code.co_name == "_reinstantiate_wrapped_cls"
        for module, frame in _frames()
    )


def _frames() -> Iterator[tuple[str, FrameType]]:
    """The frames of Lightning's functions on the stack, the innermost first, with the names of their modules."""
    if sys.modules.keys().isdisjoint(_PACKAGES):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _PACKAGES:
            yield module, frame
        frame = frame.f_back
