"""Copies to a device: order, number, and the time at which the copied memory may be reused."""

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch

from headrace._device.copy import Copier, Registry

Point = namedtuple("Point", ["x", "label"])


@pytest.fixture
def copier(streams):
    return Copier(streams, Registry())


def arrived(copier, streams, batch):
    claimed = copier.claim(copier.begin(batch))
    streams.sides[0].run()
    streams.consumer.run()
    return claimed


def test_consumers_stream_waits_for_the_copy_and_the_consumer_does_not(copier, streams):
    claimed = copier.claim(copier.begin(torch.arange(4)))
    assert streams.log[0] == ("copy", "side")
    assert set(streams.log[1:-2]) == {("event", "side")}
    assert streams.log[-2:] == [("wait", "consumer"), ("used on", "consumer")]
    streams.consumer.run()
    assert streams.consumer.work
    streams.sides[0].run()
    streams.consumer.run()
    assert not streams.consumer.work
    assert claimed.tolist() == [0, 1, 2, 3]


def test_many_small_tensors_are_one_copy(copier, streams):
    batch = {number: torch.full((number, 3), number) for number in range(114)}
    claimed = arrived(copier, streams, batch)
    assert len(streams.copied) == 1
    assert all(torch.equal(claimed[number], batch[number]) for number in batch)


def test_label_that_is_kept_does_not_keep_the_memory_of_the_images(copier, streams):
    images, label = arrived(copier, streams, [torch.rand(64, 64), torch.arange(64)])
    assert label.untyped_storage().nbytes() == label.nbytes < images.nbytes
    assert label.tolist() == [*range(64)]


def test_tensors_of_a_batch_have_separate_version_counters(copier, streams):
    first, second = arrived(copier, streams, [torch.ones(3), torch.ones(3)])
    before = second._version
    first.add_(1)
    assert second._version == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3).expand(4, 3),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True),
    ],
    ids=["expanded", "conjugate", "with gradient"],
)
def test_layouts_are_those_of_torchs_own_copy(
    copier, streams, tensor
):  # other layouts: test_rehearsal.py
    got = arrived(copier, streams, tensor)
    like = torch.empty_like(tensor)
    assert torch.equal(got.detach(), tensor.detach())
    assert (got.stride(), got.requires_grad) == (like.stride(), tensor.requires_grad)


def test_containers_keep_their_classes_and_other_leaves_are_unchanged(copier, streams):
    x, other = torch.arange(3), object()
    batch = {
        "tuple": (x, "text"),
        "named": Point(x, [x]),
        "ordered": OrderedDict(x=x),
        "user's": UserDict(x=x),
        "else": [b"bytes", None, 3, range(3), other],
    }
    got = arrived(copier, streams, batch)
    assert {key: type(value) for key, value in got.items()} == {
        key: type(value) for key, value in batch.items()
    }
    assert got["else"] == batch["else"]
    assert got["named"].x is got["ordered"]["x"] is got["user's"]["x"] is got["tuple"][0]
    assert got["named"].x is not x
    assert batch["named"].x is x


class Movable:
    """A user's batch; `to` says on which stream it was called."""

    def __init__(self, streams):
        self.streams = streams
        self.moved_on = None

    def to(self, device, *, non_blocking):
        assert non_blocking
        self.moved_on = self.streams.current().name
        return self


class Recorded(Movable):
    used_on = None

    def record_stream(self, stream):
        self.used_on = stream.name


class Length:
    """Its `to` has to do with units, not with devices."""

    def to(self, unit):
        raise AssertionError(f"{unit} is no unit of length")


class Refuses:
    def to(self, device, *, non_blocking):
        raise RuntimeError("it cannot be moved")

    def record_stream(self, stream):
        raise NotImplementedError


def test_users_objects_are_moved_or_left_by_what_they_can(copier, streams):
    length = Length()
    batch = [Movable(streams), Recorded(streams), length, Length]
    moved, recorded, same, kind = arrived(copier, streams, batch)
    assert moved.moved_on == "consumer"  # without `record_stream` it is safe there only
    assert recorded.moved_on == "side"
    assert streams.users[-1][0] is recorded
    assert (same, kind) == (length, Length)
    with pytest.raises(RuntimeError, match="it cannot be moved"):
        copier.begin([torch.ones(3), Refuses()])
    assert arrived(copier, streams, torch.full((3,), 5)).tolist() == [5, 5, 5]


class Record(UserDict):
    """A mapping that moves by itself and names its memory, as a `TensorDict` does."""

    def to(self, device, **options):
        return Record(
            {
                key: value.to(device, copy=True, **options)
                for key, value in self.data.items()
            }
        )

    def record_stream(self, stream):
        raise NotImplementedError


def test_container_with_its_own_to_is_moved_on_the_side_stream(copier, streams):
    sent = Record(x=torch.arange(3))
    got = arrived(copier, streams, {"record": sent})["record"]
    assert type(got) is Record
    assert got is not sent
    assert streams.users[-1] == (got, streams.consumer)
    assert torch.equal(got["x"], sent["x"])
    assert streams.copied == []


def test_pinned_memory_is_kept_until_the_copy_out_of_it_has_ended(copier, streams):
    claimed = [
        copier.claim(copier.begin(torch.full((100,), number))) for number in range(40)
    ]
    copier.close()
    assert [tensor.unique().tolist() for tensor in claimed] == [
        [number] for number in range(40)
    ]
