"""Integration with Hugging Face transformers."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint, has_length
from transformers.utils import is_datasets_available

from headrace._base.text import dataset_repr
from headrace._order.state import LoaderState
from headrace._ranks.rankinfo import RankInfo
from headrace._streams.kinds import DatasetKind, kind_of
from headrace.errors import StateError
from headrace.integrations._shared import computed_order, load_state, save_state
from headrace.integrations.accelerate import PreparedLoader, _divided
from headrace.loader import DataLoader
from headrace.samplers import ElasticSampler

try:
    from transformers.trainer_pt_utils import BatchRebalanceSampler
except ImportError as error:
    raise ImportError(
        f"headrace needs transformers 5.23 or later, not {transformers.__version__}"
    ) from error
if is_datasets_available():
    import datasets.distributed

__all__ = ["Trainer"]

_NAME = "headrace_loader"  # beginning of the names of files in a checkpoint


class _ContinuedEpoch(NamedTuple):
    """Numbers of a continued epoch."""

    epoch: int
    before: int  # number of earlier batches, in whole steps
    batches: int  # number of all batches
    steps: int  # number of all steps


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` with headrace loaders.

    Checkpoints include the state of the training loader (`headrace_loader_rank_0.pth`, and so on).
    ``resume_from_checkpoint`` continues after the last batch of the checkpoint, and does not read
    earlier batches again.

    The order is the order of a `headrace.ElasticSampler` with ``data_seed``, or else with ``seed``.
    The trainer respects ``train_sampling_strategy`` and your own samplers (`_get_train_sampler`).
    For another trainer, put this class first:
    ``class MyTrainer(Trainer, transformers.Seq2SeqTrainer)``. To make a loader of your own,
    override `get_train_dataloader`. Your loader must divide the samples among the ranks. The state
    of your loader is saved and restored too.

    Args:
        args: as for `transformers.Trainer`.
        loader_options: headrace's own options for each loader (``transform``, ``concurrency``,
            ``placement``, ...). For functions on a single dataset, use the dataset's `map`.
        kwargs: as for `transformers.Trainer`.

    Raises:
        ValueError: headrace loaders do not support an option of the training arguments; or several
            ranks would evaluate a stream.

    Example:
        >>> arguments = transformers.TrainingArguments(                        # doctest: +SKIP
        ...     "out", per_device_train_batch_size=32, dataloader_num_workers=4
        ... )
        >>> trainer = Trainer(                                                 # doctest: +SKIP
        ...     model,
        ...     arguments,
        ...     train_dataset=hr.ObjectDataset("s3://bucket/images/"),
        ...     loader_options={"transform": decode},
        ... )
        >>> trainer.train(resume_from_checkpoint=True)                         # doctest: +SKIP
    """

    def __init__(
        self, *args: Any, loader_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.loader_options = dict(loader_options or {})
        self._checkpoint: Path | None = None
        self._resumed: _ContinuedEpoch | None = None
        super().__init__(*args, **kwargs)
        if (size := max(self.get_tp_size(), self.get_cp_size(), self.get_sp_size())) > 1:
            raise ValueError(
                f"tensor, context or sequence parallelism of {size} ranks, "
                "which need the same batches"
            )

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
            collate_fn = self._get_collator_with_removed_columns(
                collate_fn, description=description
            )
        rank, ranks, drop_last = (
            args.process_index,
            args.world_size,
            args.dataloader_drop_last,
        )
        seed = args.seed if args.data_seed is None else args.data_seed
        order: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
        if kind_of(dataset).is_iterable:
            if ranks > 1 and not is_training:
                raise ValueError(
                    f"{ranks} ranks cannot evaluate {dataset_repr(dataset)}, a stream: evaluate a "
                    "map-style or indexed dataset, or evaluate in a job of one rank"
                )
            dataset = self._part_of_rank(dataset, batch_size)
        else:
            sampler: Any = None if sampler_fn is None else sampler_fn(dataset)
            computed = computed_order(sampler) if is_training else None
            if computed is not None and len(sampler) == len(dataset):
                of_ranks = {"rank": rank, "world_size": ranks, "drop_last": drop_last}
                sampler = ElasticSampler(
                    dataset, shuffle=computed.shuffle, seed=seed, **of_ranks
                )
            order["sampler"] = sampler
            # A BatchRebalanceSampler draws batches, and divides batches among ranks.
            if isinstance(sampler, BatchRebalanceSampler):
                sampler.splits_by_rank = True
                order = {"batch_sampler": sampler}
        loader: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            **order,
            **{
                "seed": seed,
                "device": args.device if args.device.type != "cpu" else None,
                **self.loader_options,
            },
        )
        return _divided(self.accelerator, loader)

    def _part_of_rank(self, dataset: Any, batch_size: int) -> Any:
        """Return this rank's part of a torch stream.

        Hugging Face's function divides Hugging Face datasets. Other streams are divided as in
        accelerate.
        """
        rank, ranks = self.args.process_index, self.args.world_size
        if kind_of(dataset) is not DatasetKind.ITERABLE or ranks == 1:
            return dataset
        if not hasattr(dataset, "_distributed"):
            return IterableDatasetShard(
                dataset, batch_size, self.args.dataloader_drop_last, ranks, rank
            )
        if dataset._distributed:
            return dataset
        return datasets.distributed.split_dataset_by_node(dataset, rank, ranks)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, and close the training loader at the end.

        Arguments and result are as for `transformers.Trainer.train`.

        Raises:
            StateError: the checkpoint has no state of the loader, or the state does not fit.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._checkpoint = (
            Path(resume_from_checkpoint)
            if isinstance(resume_from_checkpoint, str)
            else None
        )
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._checkpoint = self._resumed = None
            loader = self.callback_handler.train_dataloader
            if isinstance(loader, DataLoader):
                loader.close()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return numbers of epochs and steps, and restore the loader.

        Overrides the method of `transformers.Trainer`. The position of the loader decides the
        number of remaining steps.
        """
        values = super().set_initial_training_values(args, dataloader)
        self._resumed = None
        if not isinstance(dataloader, DataLoader):
            return values
        if args.world_size > 1 and not isinstance(dataloader, PreparedLoader):
            whole = isinstance(dataloader.sampler, SequentialSampler | RandomSampler)
            if whole and type(dataloader.batch_sampler) in (BatchSampler, type(None)):
                raise ValueError(  # for a stream, the loader warns at `iter()`
                    f"each rank would train on all of {dataset_repr(dataloader.dataset)}: "
                    "give the loader of get_train_dataloader "
                    "sampler=headrace.ElasticSampler(dataset, seed=...)"
                )
        if self._checkpoint is None or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *others, batches, last_step = values
        step = TrainerState.load_from_json(
            str(self._checkpoint / "trainer_state.json")
        ).global_step
        rank = RankInfo(args.process_index, args.world_size, "transformers")
        accumulation, sized = args.gradient_accumulation_steps, has_length(dataloader)
        try:
            saved = load_state(self._checkpoint, _NAME, rank)
            if saved is None:
                if step % steps_per_epoch == 0:  # no epoch to continue between two epochs
                    return values
                raise StateError(
                    "the checkpoint has no state of the loader: "
                    "another Trainer saved it, or without one"
                )
            state = LoaderState.from_dict(saved)
            if not sized and state.steps % accumulation:
                raise StateError(
                    f"{state.steps} batches of a stream of unknown length are "
                    f"no whole steps of gradient_accumulation_steps={accumulation}"
                )
            dataloader.load_state_dict(saved)
        except StateError as error:
            error.add_note(
                "With TrainingArguments(ignore_data_skip=True) the epoch begins anew, "
                "with samples repeated."
            )
            raise
        left = (
            dataloader._control.position.batches_left(dataloader, rank) if sized else None
        )
        epoch, left = state.epoch, batches - state.steps if left is None else left
        if sized and left <= 0:
            dataloader._control.position.skip_rest()
            epoch, left = epoch + 1, batches
        steps_before, steps_left = (
            (batches - left) // accumulation,
            -(-left // accumulation),
        )
        before = steps_before * accumulation
        self._resumed = _ContinuedEpoch(
            epoch, before, before + left, steps_before + steps_left
        )
        done = (epoch + 1) * steps_per_epoch - steps_left  # in steps of the present size
        if step == done or not sized:
            return values
        # The number of ranks, the batch size or the accumulation changed: count steps anew.
        if args.max_steps > 0:
            epochs = math.ceil((done + args.max_steps - step) / steps_per_epoch)
        else:
            last_step = step + max(
                math.ceil(args.num_train_epochs * steps_per_epoch) - done, 0
            )
        warnings.warn(
            "saved with other numbers of ranks, samples in a batch or batches in a step. "
            f"Of epoch {epoch}, {left} of {batches} batches are left for each rank. "
            f"Training ends after step {last_step}",
            UserWarning,
            stacklevel=2,
        )
        return epochs, steps_per_epoch, *others, batches, last_step

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        trained = super()._init_training_state(*args, **kwargs)
        resumed = self._resumed
        return trained if resumed is None else (resumed.epoch, resumed.before)

    def _run_epoch(self, **arguments: Any) -> None:
        resumed, self._resumed = self._resumed, None
        loader = arguments["train_dataloader"]
        if resumed is not None:
            arguments.update(
                steps_in_epoch=resumed.batches, num_update_steps_per_epoch=resumed.steps
            )
            # Streams of Hugging Face need the number, also before a restored epoch.
            loader.set_epoch(resumed.epoch)
            if resumed.before:  # accelerate.skip_first_batches drops the placeholders
                rest = _Rest(loader, resumed.before)
                arguments["train_dataloader"] = torch.utils.data.DataLoader(
                    rest,
                    batch_size=None,
                    collate_fn=lambda batch: batch,
                    generator=torch.Generator(),
                )
        super()._run_epoch(**arguments)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save the model, and for checkpoints the loader's state.

        Overrides the method of `transformers.Trainer`.
        """
        super().save_model(output_dir, _internal_call)
        loader = self.callback_handler.train_dataloader
        in_checkpoint = (
            _internal_call and self.is_in_train and not self.args.save_only_model
        )
        if in_checkpoint and output_dir is not None and isinstance(loader, DataLoader):
            save_state(loader.state_dict(), output_dir, _NAME, self.args.process_index)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate each sample once, over all ranks.

        Overrides the method of `transformers.Trainer`.
        """
        if not isinstance(dataloader, DataLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        if (
            self.args.world_size > 1
            and dataloader._control.spec.options["on_error"] != "raise"
        ):
            raise ValueError(
                "on_error= must be 'raise' in evaluation by several ranks: "
                "results are gathered by batch"
            )
        # Prepares a loader made by the user.
        loader = _divided(self.accelerator, dataloader)
        try:
            return super().evaluation_loop(loader, *args, **kwargs)
        finally:
            loader.close()


class _Rest(IterableDataset[Any]):
    """The rest of a loader's epoch, after placeholders.

    A None stands for each earlier batch. The trainer drops the placeholders.
    """

    def __init__(self, loader: DataLoader[Any], before: int) -> None:
        self._loader = loader
        self._before = before

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(itertools.repeat(None, self._before), self._loader)
