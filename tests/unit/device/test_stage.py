"""Copies between handoff and delivery, in real loaders with real slabs, to a device that copies when a test runs it."""

import threading

import pytest
import torch

import headrace as hr
from headrace._consumer import control
from headrace._transport.slabs import SLABS
from headrace.errors import CudaGraphError
from tests.unit.device.recording import ELEMENTS, RecordingStreams, Rows, use


def values(streams, batch):
    """What the consumer's stream would read, once it has come so far."""
    streams.sides[-1].run()
    streams.consumer.run()
    assert not streams.consumer.work
    return batch.unique().tolist()


def pairs(count):
    """The values of batches of two rows."""
    return [[number, number + 1] for number in range(0, count, 2)]


WAYS = [
    {},
    {"num_workers": 2, "placement": "thread"},
    {"num_workers": 1, "device_prefetch": 0},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_batches_arrive_in_order_and_complete(streams, options):
    with hr.DataLoader(Rows(60), batch_size=2, device="there", **options) as loader:
        for _ in range(2):
            got = [values(streams, batch) for batch in loader]
            assert got == pairs(60)
        assert len(streams.sides) == 1  # epochs copy on one stream
        first, second = iter(loader), iter(loader)
        next(first), next(second)
        assert len(streams.sides) == 2  # and iterations at the same time on one each
    # Leaving has waited for the copies.
    assert not any(side.work for side in streams.sides)


def channels_last(rows):
    return (
        torch.stack(rows)
        .view(2, 100, 20, 10)
        .contiguous(memory_format=torch.channels_last)
    )


def test_batches_in_slabs_are_copied_in_place_with_their_layout_until_the_slabs_are_unmapped(
    streams,
):
    registered = set()
    loader = hr.DataLoader(
        Rows(24), batch_size=2, num_workers=1, collate_fn=channels_last, device="there"
    )
    for number, batch in enumerate(loader):
        registered |= streams.registered.keys()
        assert values(streams, batch) == [2 * number, 2 * number + 1]
        assert batch.is_contiguous(memory_format=torch.channels_last)
    assert registered
    assert streams.pinned_count == 0
    loader.close()
    del loader, batch
    assert streams.registered == {}


def test_unregistered_slabs_are_staged_after_one_warning(monkeypatch):
    streams = RecordingStreams(locked=400_000)  # a batch, but no slab that holds two
    streams.register = lambda address, size: streams.pinned(streams.locked + 1)
    use(monkeypatch, streams)
    with (
        hr.DataLoader(Rows(24), batch_size=2, num_workers=1, device="there") as loader,
        pytest.warns(UserWarning, match="copied once more") as caught,
    ):
        got = [values(streams, batch) for batch in loader]
    assert got == pairs(24)
    assert len(caught) == 1
    assert streams.pinned_count == 12


def test_async_loops_get_the_same_batches(streams, consumer_loop):
    async def train():
        async with hr.DataLoader(
            Rows(24), batch_size=2, num_workers=1, device="there"
        ) as loader:
            return [values(streams, batch) async for batch in loader]

    assert consumer_loop(train) == pairs(24)


def test_kept_batches_are_never_overwritten(streams):
    # A device with much queued work: no copy ends before it is waited for.
    batches = 2 * SLABS
    with hr.DataLoader(
        Rows(2 * batches), batch_size=2, device="there", num_workers=1, placement="thread"
    ) as loader:
        got = list(loader)
        assert len(streams.registered) == SLABS
        assert (
            streams.pinned_count > 0
        )  # what came when all slabs were in use, copied by way of pinned buffers
        assert [batch.unique().tolist() for batch in got] == pairs(2 * batches)


def test_loaders_for_several_devices_copy_to_their_own(monkeypatch):
    devices = {"there:0": RecordingStreams(), "there:1": RecordingStreams()}
    use(monkeypatch, None)
    monkeypatch.setattr(control, "streams_of", devices.__getitem__)
    with (
        hr.DataLoader(Rows(8), device="there:0") as one,
        hr.DataLoader(Rows(8), device="there:1") as other,
    ):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert (
                values(devices["there:0"], left)
                == values(devices["there:1"], right)
                == [number]
            )
    assert [len(streams.copied) for streams in devices.values()] == [8, 8]


def test_no_batch_is_taken_or_lost_during_graph_capture(streams):
    with hr.DataLoader(Rows(8), batch_size=2, device="there") as loader:
        batches = iter(loader)
        got = [values(streams, next(batches))]
        streams.capturing = True
        for _ in range(3):
            with pytest.raises(CudaGraphError, match="before the capture"):
                next(batches)
        streams.capturing = False
        got += [values(streams, batch) for batch in batches]
    assert got == pairs(8)


def test_failed_device_is_an_error_with_the_batchs_number_and_the_loader_closes(streams):
    with hr.DataLoader(
        Rows(24), batch_size=2, device="there", num_workers=1, device_prefetch=0
    ) as loader:
        batches = iter(loader)
        next(batches)
        streams.sides[-1].dead = True
        with pytest.raises(RuntimeError, match="the device has failed") as caught:
            next(batches)
        assert caught.value.__notes__ == ["headrace: stage copy, batch 1"]
    with pytest.raises(hr.errors.LoaderClosedError):
        next(batches)


def test_another_thread_may_close_the_loader_while_a_copy_starts(streams):
    begun, closing = threading.Event(), threading.Event()
    place = streams.place

    def place_slowly(host, stream):
        begun.set()
        closing.wait()
        return place(host, stream)

    streams.place = place_slowly
    # too many to end before
    loader = hr.DataLoader(Rows(4000), batch_size=2, num_workers=1, device="there")

    def close(loader):
        begun.wait()
        closing.set()
        loader.close()

    closer = threading.Thread(target=close, args=[loader])
    closer.start()
    with pytest.raises(hr.errors.LoaderClosedError):
        list(loader)
    closer.join()
    assert not streams.sides[-1].work


class RowStream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for index in range(11):
            yield torch.full((ELEMENTS,), index)


@pytest.mark.parametrize(
    ("data", "options"),
    [(Rows(24), WAYS[0]), (RowStream(), WAYS[2])],
    ids=["map", "stream"],
)
def test_state_is_that_of_the_batch_returned_and_not_of_those_copied_ahead(
    streams, data, options
):
    """It is the state of a loader without a device, also after a copy that failed, whose error is of its batch."""
    streams.broken_at = 3
    with (
        hr.DataLoader(data, batch_size=2, seed=0, device="there", **options) as loader,
        hr.DataLoader(data, batch_size=2, seed=0) as reference,
    ):
        batches = iter(loader)
        for number, expected in enumerate(reference):
            if number == 3:
                with pytest.raises(RuntimeError, match="out of memory") as caught:
                    next(batches)
                assert caught.value.__notes__ == ["headrace: stage copy, batch 3"]
            else:
                assert values(streams, next(batches)) == expected.unique().tolist()
            assert loader.state_dict() == reference.state_dict()


def test_torch_dataset_in_the_callers_thread_is_not_prefetched(streams):
    read = []

    class Plain(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            read.append(index)
            return torch.tensor(index)

    batches = iter(hr.DataLoader(Plain(), device="there"))
    next(batches)
    assert read == [0]
