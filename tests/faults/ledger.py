"""A dataset of known bytes in a store that misbehaves: every sample is delivered whole, once, or reported."""

import collections
import re

import headrace as hr
from tests.faults.watching import drain

SAMPLES = 24
SIZE = 2_000  # bytes of a sample
QUICK = hr.RetryPolicy(initial_backoff=0.01)


def body_of(number):
    """The bytes of a sample, which follow from its key."""
    return number.to_bytes(2, "little") * (SIZE // 2)


def contents():
    """The objects of a server that has the samples under ``train/``."""
    return {f"train/{number:04}": body_of(number) for number in range(SAMPLES)}


def checked_number(sample):
    """A transform: the sample's number, after a check of its bytes."""
    assert bytes(sample.data) == body_of(int(sample.key)), f"{sample.key} has wrong bytes"
    return int(sample.key)


class Ledger:
    """Reads the samples and accounts for each of them.

    Args:
        url: the store's; the samples are under ``train/``.
        options: store options.
        placement: the loader's; "process" with one worker.
        keys: the samples' keys under ``train/``, for a store that cannot list; None to list them.
    """

    def __init__(self, url, options, placement="thread", keys=None):
        self.url = url
        self.options = options
        self.placement = placement
        self.keys = keys

    def store(self, prefix="train", **more):
        return hr.Store(
            f"{self.url}/{prefix}", **{"options": self.options, "retry": QUICK, **more}
        )

    def objects(self, **more):
        """The dataset of the samples; `more` are options of its store."""
        return hr.ObjectDataset(self.store(**more), keys=self.keys)

    def loader(self, dataset, **more):
        arguments = {
            "batch_size": 1,
            "transform": checked_number,
            "placement": self.placement,
            **more,
        }
        return hr.DataLoader(
            dataset, num_workers=int(self.placement == "process"), **arguments
        )

    def epoch(self, dataset, **more):
        """The delivered samples, counted, and the errors by index; together they must be all samples, once."""
        with self.loader(dataset, **more) as loader:
            delivered, errors = drain(loader)
        failures = {
            int(re.search(r", index (\d+)", error.__notes__[-1])[1]): error
            for error in errors
        }
        assert len(failures) == len(errors), "a sample was reported twice"
        planned = collections.Counter(range(len(dataset)))
        assert delivered + collections.Counter(failures.keys()) == planned, (
            "planned is not delivered + reported"
        )
        return delivered, failures

    def failure(self, dataset, index=7, **more):
        """The error of the only sample that is reported, which must be the one with this index."""
        _, failures = self.epoch(dataset, **more)
        assert failures.keys() == {index}, failures
        return failures[index]

    def assert_all_delivered(self, dataset=None, **more):
        _, failures = self.epoch(self.objects() if dataset is None else dataset, **more)
        assert not failures, failures
