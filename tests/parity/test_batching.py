"""Batching: how samples become batches, how many there are, and what is left out."""

import torch
from torch.utils import data

from tests.parity.harness import epochs, parity

LENGTH = 13


class Map(data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([index, -index]), index


@parity("`batch_size` cuts samples into batches, the last of which may be smaller")
def test_batches_are_cut_where_torch_cuts_them(same):
    def program(DataLoader):
        return epochs(DataLoader(Map(), batch_size=4))

    same(program)
