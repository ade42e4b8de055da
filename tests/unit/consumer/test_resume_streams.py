"""A loader of a stream continues after the last delivered batch, wherever the stream is read."""

import json

import pytest
import torch

from headrace import AsyncIterableDataset, DataLoader, StateError
from tests.datasets import TorchStream
from tests.unit.consumer.test_resume import saved_after, values

N = 11


class Numbers(AsyncIterableDataset):
    """An async generator, without a state."""

    async def __aiter__(self):
        for number in range(N):
            yield number


def noisy(sample):
    return torch.stack([torch.tensor(float(sample)), torch.rand(())])


def test_restored_stream_of_torch_continues_after_the_last_delivered_batch():
    def make():
        return DataLoader(TorchStream(N), 2, seed=0, transform=noisy, num_workers=2)

    with make() as loader, make() as interrupted:
        whole = [[values(batch) for batch in loader] for _ in range(2)]
        for delivered in range(len(whole[0]) + 1):
            interrupted.set_epoch(0)
            given, state = saved_after(interrupted, delivered)
            assert given == whole[0][:delivered]
            loader.load_state_dict(state)
            assert json.dumps(loader.state_dict()) == json.dumps(state)
            assert [[values(batch) for batch in loader] for _ in range(2)] == [
                whole[0][delivered:],
                whole[1],
            ]


def test_stream_without_a_state_warns_that_it_is_read_again():
    _, state = saved_after(DataLoader(Numbers(), 3), 2)
    restored = DataLoader(Numbers(), 3)
    restored.load_state_dict(state)
    with pytest.warns(UserWarning, match="Numbers has no state_dict: to continue after 6 samples"):
        assert [values(batch) for batch in restored] == [[6, 7, 8], [9, 10]]


def test_another_number_of_workers_for_a_torch_stream_or_a_dataset_with_a_state_is_refused():
    class Counting(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return N

        def __getitem__(self, index):
            self.read += 1
            return index

        def state_dict(self):
            return {"read": self.read}

        def load_state_dict(self, state):
            self.read = state["read"]

    for kind in (lambda: TorchStream(N), Counting):
        _, state = saved_after(DataLoader(kind(), 2, num_workers=2), 2)
        with pytest.raises(StateError, match="num_workers was 2, and is 1"):
            DataLoader(kind(), 2, num_workers=1).load_state_dict(state)
