"""Hugging Face's `transformers.Trainer` with headrace's loaders."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import transformers
import transformers.trainer
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint, has_length

from headrace._core.order.state import LoaderState
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.streams.kinds import DatasetKind, kind_of, splits_by_rank
from headrace.errors import StateError
from headrace.integrations._rank_files import load_state, save_state
from headrace.integrations.accelerate import divided
from headrace.loader import DataLoader
from headrace.samplers import ElasticSampler

__all__ = ["Trainer"]

_NAME = "headrace_loader"  # of the files in a checkpoint


def _skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """As accelerate's, which makes a plain torch loader; one that was restored continues by itself."""
    if isinstance(loader, DataLoader) and loader._control.pending is not None:
        return loader
    return accelerate.skip_first_batches(loader, num_batches)


# There is no method by which a Trainer could skip otherwise.
transformers.trainer.skip_first_batches = _skip_first_batches


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose loaders are headrace's.

    The loaders for training, evaluation and prediction are made from the training arguments and the datasets, and
    prepared by `headrace.integrations.accelerate`. A checkpoint has the loader's state (`headrace_loader_rank_0.pth`,
    and so on), and ``resume_from_checkpoint`` continues after the batch it was saved at, without reading those before.

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
        NotImplementedError: this version of transformers has no method or function which is overridden here.

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
        for name in ("_get_dataloader", "_init_training_state", "_save_rng_state"):
            if not hasattr(transformers.Trainer, name):
                raise NotImplementedError(
                    f"transformers {transformers.__version__} has no Trainer.{name}, which this class overrides; "
                    f"docs/trainers.md has the versions that were tested"
                )
        self.loader_options = dict(loader_options or {})
        self._checkpoint: Path | None = None
        self._resumed: tuple[int, int] | None = None  # epoch, and its batches that were trained on
        super().__init__(*args, **kwargs)

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
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "__len__"):  # of Hugging Face
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate_fn = self._get_collator_with_removed_columns(collate_fn, description=description)
        rank, ranks = args.process_index, args.world_size
        seed = args.seed if args.data_seed is None else args.data_seed
        order: dict[str, Any] = {"batch_size": batch_size, "drop_last": args.dataloader_drop_last}
        sampler: Any = None
        if not is_training and ranks > 1 and self.loader_options.get("on_error", "raise") != "raise":
            raise ValueError("evaluation by several ranks needs on_error='raise': results are gathered by batch")
        if kind_of(dataset).is_iterable:
            if is_training:
                dataset = self._part_of_rank(dataset, batch_size)
            elif ranks > 1 and not splits_by_rank(dataset):
                raise ValueError(
                    f"each of {ranks} ranks would evaluate all of a stream: give a dataset with a length, or split it"
                )
        else:
            sampler = None if sampler_fn is None else sampler_fn(dataset)
            shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
            whole = (shuffled or isinstance(sampler, SequentialSampler)) and len(sampler) == len(dataset)
            if whole and is_training:
                drop_last = args.dataloader_drop_last
                sampler = ElasticSampler(dataset, shuffled, seed, rank, ranks, drop_last=drop_last)
            order["sampler"] = sampler
        divides_itself = isinstance(sampler, transformers.trainer.BatchRebalanceSampler)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            collate_fn=collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            in_order=args.dataloader_in_order,
            **({"batch_sampler": sampler} if divides_itself else order),
            **{"seed": seed, **self.loader_options},
        )
        if not divides_itself:
            loader = divided(self.accelerator, loader)
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self.__dict__.setdefault("_eval_dataloaders", {})[dataloader_key] = loader
        return loader

    def _part_of_rank(self, dataset: Any, batch_size: int) -> Any:
        """The part of a torch stream: of Hugging Face's by its own function, of others as accelerate divides them."""
        rank, ranks = self.args.process_index, self.args.world_size
        if kind_of(dataset) is not DatasetKind.ITERABLE or ranks == 1:
            return dataset
        if not hasattr(dataset, "_distributed"):
            return IterableDatasetShard(dataset, batch_size, self.args.dataloader_drop_last, ranks, rank)
        if dataset._distributed is not None:
            return dataset
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank, ranks)

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
            self._checkpoint = self._resumed = None
            if isinstance(loader := self.callback_handler.train_dataloader, DataLoader):
                loader.close()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As `transformers.Trainer`'s; restores the loader, whose position decides how many steps are left."""
        values = super().set_initial_training_values(args, dataloader)
        self._resumed = None
        if not isinstance(dataloader, DataLoader) or self._checkpoint is None or args.ignore_data_skip:
            return values
        epochs, steps_per_epoch, *others, batches, last_step = values
        step = TrainerState.load_from_json(str(self._checkpoint / transformers.trainer.TRAINER_STATE_NAME)).global_step
        rank = RankInfo(args.process_index, args.world_size, "transformers")
        try:
            saved = load_state(self._checkpoint, _NAME, rank)
            if saved is None:
                if step % steps_per_epoch == 0:  # between two epochs, there is nothing to continue
                    return values
                raise StateError(f"{self._checkpoint} has no state of the loader")
            state = LoaderState.from_dict(saved)
            if dataloader._control.spec.kind is DatasetKind.ITERABLE and state.ranks != args.world_size:
                raise StateError(f"streams that are not headrace's need {state.ranks} ranks, as before")
            dataloader.load_state_dict(saved)
        except StateError as error:
            error.add_note("With TrainingArguments(ignore_data_skip=True) the epoch begins anew: its samples repeat.")
            raise
        if not has_length(dataloader):
            self._resumed = state.epoch, state.batches
            return values
        left = dataloader._control.batches_left(dataloader, rank)
        epoch, done = state.epoch, state.batches if left is None else batches - left
        if done >= batches:
            dataloader._control.skip_rest()
            epoch, done = epoch + 1, 0
        self._resumed = epoch, done
        accumulation = args.gradient_accumulation_steps
        before = epoch * steps_per_epoch + done // accumulation  # steps, in the present numbers
        if step == before:
            return values
        # Other ranks, batches or accumulation than before: steps are counted anew from here.
        if args.max_steps > 0:
            epochs = math.ceil((before + args.max_steps - step) / steps_per_epoch)
        else:
            last_step = step + max(math.ceil(args.num_train_epochs * steps_per_epoch) - before, 0)
        warnings.warn(
            f"{self._checkpoint} was saved with other numbers of ranks, samples in a batch or batches in a step. Of "
            f"epoch {epoch}, {batches - done} of {batches} batches are left for each rank. Training ends after step "
            f"{last_step}, by which the learning rate is scheduled.",
            UserWarning,
            stacklevel=2,
        )
        return epochs, steps_per_epoch, *others, batches, last_step

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        stock = super()._init_training_state(*args, **kwargs)
        return stock if self._resumed is None else self._resumed

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        loader = self.callback_handler.train_dataloader
        if isinstance(loader, DataLoader):
            save_state(loader.state_dict(), output_dir, _NAME, self.args.process_index)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer`'s; ends the loader's threads and workers, unless they are persistent."""
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            if isinstance(dataloader, DataLoader) and not self.args.dataloader_persistent_workers:
                dataloader.close()
