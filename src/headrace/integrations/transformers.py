"""Hugging Face's `transformers.Trainer` with headrace's loaders."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint, has_length
from transformers.utils import is_datasets_available

from headrace._core.order.state import LoaderState
from headrace._core.streams.kinds import DatasetKind
from headrace.errors import StateError
from headrace.integrations._checkpoint import batches_left, save_state, saved_state
from headrace.integrations._gathering import GatheredBatches
from headrace.integrations._resumed_epoch import EpochBatches, ResumedEpoch
from headrace.integrations._transformers_orders import (
    Evaluated,
    check_arguments,
    check_divided,
    evaluation_order,
    seed_of,
    train_order,
)
from headrace.loader import DataLoader
from headrace.options import OPTIONS

if is_datasets_available():
    import datasets

__all__ = ["Trainer"]

# Methods of transformers.Trainer that are not public, with the arguments that are used here.
_METHODS = {
    "_get_dataloader": {"dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"},
    "_init_training_state": {"num_update_steps_per_epoch"},
    "_run_epoch": {
        *("epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch"),
        *("steps_trained_in_current_epoch", "epochs_trained"),
    },
    "_save_rng_state": {"output_dir"},
}
for _name, _arguments in _METHODS.items():
    _method = getattr(transformers.Trainer, _name, None)
    if _method is None or not _arguments <= inspect.signature(_method).parameters.keys():
        raise ImportError(
            f"headrace.integrations.transformers was written for transformers 5.23, and transformers "
            f"{transformers.__version__} has no such Trainer.{_name}. Install that version."
        )


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose loaders are headrace's.

    The loaders for training, evaluation and prediction are made from the training arguments and the datasets. A
    checkpoint has the loader's state (`headrace_loader.pth`, for each rank), and ``resume_from_checkpoint`` continues
    after the batch it was saved at, without reading those before.

    The order is that of a `headrace.ElasticSampler` with ``data_seed``, or else ``seed``. ``train_sampling_strategy``
    and samplers of your own (`_get_train_sampler`) are honoured. For other trainers put this class first:
    ``class MyTrainer(Trainer, transformers.Seq2SeqTrainer)``. To make a loader yourself, override
    `get_train_dataloader`; it must give each rank its part, and is saved and restored too.

    Args:
        args: as of `transformers.Trainer`.
        loader_options: headrace's own options of each loader (``transform``, ``concurrency``, ``placement``, ...).
            A dataset's `map` takes functions for this dataset alone.
        kwargs: as of `transformers.Trainer`.

    Raises:
        TypeError: `loader_options` has an option that is not headrace's own.
        ValueError: the training arguments have an option with which headrace's loaders cannot be used.

    Example:
        >>> trainer = Trainer(                                                            # doctest: +SKIP
        ...     model,
        ...     transformers.TrainingArguments("out", per_device_train_batch_size=32, dataloader_num_workers=4),
        ...     train_dataset=hr.ObjectDataset("s3://bucket/images/"),
        ...     loader_options={"transform": decode},
        ... )
        >>> trainer.train(resume_from_checkpoint=True)                                    # doctest: +SKIP
    """

    def __init__(self, *args: Any, loader_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.loader_options = dict(loader_options or {})
        others = sorted(self.loader_options.keys() - OPTIONS.keys())
        if others:
            raise TypeError(
                f"loader_options has {', '.join(others)}, which headrace's own options do not have. The others follow "
                f"from the training arguments; or override get_train_dataloader."
            )
        self._made: weakref.WeakKeyDictionary[DataLoader[Any], Evaluated | None] = weakref.WeakKeyDictionary()
        self._checkpoint: Path | None = None
        self._resumed: ResumedEpoch | None = None
        self._batches: EpochBatches | None = None
        self._epochs_ahead = 0  # of the loader, compared with the Trainer
        super().__init__(*args, **kwargs)
        check_arguments(self)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        args, collate_fn = self.args, self.data_collator
        if is_datasets_available() and isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate_fn = self._get_collator_with_removed_columns(collate_fn, description=description)
        if args.accelerator_config.split_batches:
            batch_size //= args.world_size
        made: Evaluated | None = None
        if is_training:
            dataset, order = train_order(args, dataset, batch_size, sampler_fn)
        else:
            order, made = evaluation_order(args, dataset, batch_size, sampler_fn)
        on_device = args.device.type != "cpu"
        options = {"seed": seed_of(args), "device": args.device if on_device else None, **self.loader_options}
        loader: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and on_device,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            **order,
            **options,
        )
        self._made[loader] = made
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; loaders are closed at its end.

        Raises:
            StateError: the checkpoint has no state of the loader, or one that does not fit.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._checkpoint = self._resumed = self._batches = None
            for loader in [*self._made, self.callback_handler.train_dataloader]:
                if isinstance(loader, DataLoader):
                    loader.close()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As `transformers.Trainer`'s; restores the loader, whose position decides how many steps are left."""
        values = super().set_initial_training_values(args, dataloader)
        self._resumed, self._epochs_ahead = None, 0
        if not isinstance(dataloader, DataLoader):
            return values
        if args.world_size > 1:
            check_divided(dataloader, args.world_size)
        if self._checkpoint is None or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *others, batches, last_step = values
        step = TrainerState.load_from_json(str(self._checkpoint / TRAINER_STATE_NAME)).global_step
        state = saved_state(self._checkpoint, args.process_index, args.world_size)
        if state is None:
            if step % steps_per_epoch == 0:  # between two epochs, there is nothing to continue
                return values
            raise StateError(
                f"{self._checkpoint} has no state of the loader: it was saved by another Trainer, or with "
                f"save_only_model=True. With TrainingArguments(ignore_data_skip=True) training continues with the "
                f"first batch of epoch {step // steps_per_epoch}, so that samples of it are repeated."
            )
        self._restore(dataloader, state)
        sized = has_length(dataloader)
        left = batches_left(dataloader, state) if sized else max(batches - state.batches, 1)
        resumed = ResumedEpoch(state.epoch + (left == 0), batches, left or batches)
        accumulation = args.gradient_accumulation_steps
        self._resumed = resumed
        if not sized or step == (resumed.epoch + 1) * steps_per_epoch - resumed.steps(accumulation):
            return values
        # Other ranks, batches or accumulation than before: steps are counted anew from here.
        if args.max_steps > 0:
            epochs = resumed.epochs_until(args.max_steps, step, accumulation)
        else:
            last_step = resumed.last_step(args.num_train_epochs, step, accumulation)
        warnings.warn(
            f"{self._checkpoint} was saved with other numbers of ranks, samples in a batch or batches in a step. Of "
            f"epoch {resumed.epoch}, {resumed.left} of {batches} batches are left for each rank. Training ends after "
            f"step {last_step}, by which the learning rate is scheduled.",
            UserWarning,
            stacklevel=2,
        )
        return epochs, steps_per_epoch, *others, batches, last_step

    def _restore(self, loader: DataLoader[Any], state: LoaderState) -> None:
        try:
            if (
                loader in self._made
                and loader._control.spec.kind is DatasetKind.ITERABLE
                and state.ranks != self.args.world_size
            ):
                raise StateError(
                    f"the state was saved with {state.ranks} ranks, and there are {self.args.world_size} now. Only "
                    f"streams of headrace can be divided anew."
                )
            loader.load_state_dict(state.to_dict())
        except StateError as error:
            error.add_note(
                f"{self._checkpoint} is resumed from. With TrainingArguments(ignore_data_skip=True) the epoch begins "
                f"anew, so that samples of it are repeated."
            )
            raise

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs_trained, to_skip = super()._init_training_state(*args, **kwargs)
        return (epochs_trained, to_skip) if self._resumed is None else (self._resumed.epoch, 0)

    def _run_epoch(self, **arguments: Any) -> None:
        loader = arguments["train_dataloader"]
        if not isinstance(loader, DataLoader):
            super()._run_epoch(**arguments)
            return
        resumed, self._resumed = self._resumed, None
        arguments["epoch"] += self._epochs_ahead
        arguments["steps_trained_in_current_epoch"] = 0  # nothing is skipped, since the loader was restored
        self._batches = EpochBatches(loader, arguments["epoch"], restored=resumed is not None)
        arguments["train_dataloader"] = self._batches
        progress = None
        if resumed is not None:
            arguments["steps_in_epoch"] = resumed.left
            arguments["num_update_steps_per_epoch"] = resumed.steps(self.args.gradient_accumulation_steps)
            progress = _Progress(resumed, self._batches)
            self.callback_handler.callbacks.insert(0, progress)  # others then see the right number of epochs
        try:
            super()._run_epoch(**arguments)
            self._batches.finish()
        finally:
            if progress is not None:
                self.callback_handler.callbacks.remove(progress)
            self._epochs_ahead += self._batches.skipped and not has_length(loader)
            self._batches.close()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._batches is not None and self._batches.batches is not None:
            save_state(self._batches.batches.state_dict(), output_dir, self.args.process_index, self.args.world_size)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer`'s, with each sample once, over all ranks."""
        if not isinstance(dataloader, DataLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        rank, ranks = self.args.process_index, self.args.world_size
        made = self._made.get(dataloader)
        if ranks > 1 and made is None:
            warnings.warn(
                f"{dataloader!r} was not made by this Trainer: if the samples cannot be divided equally, those that "
                f"were added are in the metrics too. Leave get_eval_dataloader and get_test_dataloader as they are.",
                UserWarning,
                stacklevel=2,
            )
        if ranks > 1 and dataloader._control.spec.options["on_error"] != "raise":
            raise ValueError("on_error= must be 'raise' in evaluation by several ranks: results are gathered by batch")
        if made is None:
            made = Evaluated((dataloader.batch_size or self.args.eval_batch_size) * ranks, None, divided=False)
        batches = GatheredBatches(dataloader, made.batch_size, made.samples, rank, ranks, divided=made.divided)
        try:
            return super().evaluation_loop(batches, *args, **kwargs)
        finally:
            if not self.args.dataloader_persistent_workers:
                dataloader.close()


class _Progress(TrainerCallback):  # type: ignore[misc]
    """Corrects the number of epochs that have passed, which the Trainer counts from where it resumed."""

    def __init__(self, resumed: ResumedEpoch, batches: EpochBatches) -> None:
        self._resumed = resumed
        self._batches = batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        of_rest = state.epoch - self._resumed.epoch
        state.epoch = self._resumed.progress(of_rest, next_epoch=self._batches.skipped)
