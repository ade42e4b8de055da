"""A loader of an indexed dataset reads blocks, and divides the samples among the ranks, without a sampler."""

import itertools
import json

import numpy as np
import pytest
import torch

import headrace as hr
from headrace._streams.kinds import Blocks
from headrace.errors import StateError
from tests.unit.datasets.formats import FORMATS
from tests.unit.shards.resuming import in_memory

SAMPLES = 50_000


class Windows(hr.TokenDataset):
    blocks = Blocks(50, 192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    for number, part in enumerate(np.array_split(np.arange(SAMPLES), 3)):
        np.repeat(part, 2).astype("<u2").tofile(folder / f"{number}.bin")
    return folder


@pytest.fixture(scope="module")
def tokens(folder):
    return Windows(folder / "*.bin", seq_len=2)


@pytest.fixture
def read(as_rank):
    """Reads some batches on one of several ranks: the first token of each sample, and the state after these."""

    def read(data, rank, ranks, steps=None, state=None, **options):
        as_rank(rank, ranks)
        with hr.DataLoader(
            data, 100, seed=5, collate_fn=first_tokens, **options
        ) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = list(itertools.islice(loader, steps))
            return [token for batch in batches for token in batch], loader.state_dict()

    return read


def first_tokens(samples):
    return [int(sample[0]) for sample in samples]


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.filterwarnings("ignore:blocks_at_once=192 is no multiple of 7")
def test_ranks_get_equal_numbers_of_different_samples(tokens, read, ranks, shuffle):
    parts = [read(tokens, rank, ranks, shuffle=shuffle)[0] for rank in range(ranks)]
    assert {len(part) for part in parts} == {SAMPLES // ranks}
    every = [sample for part in parts for sample in part]
    assert len(set(every)) == len(every)


def test_one_rank_without_shuffle_reads_in_the_order_of_the_dataset(tokens, read):
    assert read(tokens, 0, 1)[0] == list(range(SAMPLES))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_rank_reads_blocks_of_its_own(tokens, read, shuffle):
    # Blocks of whole groups, in the order of the dataset.
    full = SAMPLES // (50 * 192) * 192
    blocks = [
        {sample // 50 for sample in read(tokens, rank, 4, shuffle=shuffle)[0]}
        for rank in range(4)
    ]
    shared = set.union(*(one & other for one, other in itertools.combinations(blocks, 2)))
    assert len(shared) <= 192 if shuffle else min(shared, default=full) >= full


@pytest.mark.parametrize(
    "wrap", [lambda data: data.map(torch.clone), lambda data: hr.concat([data])]
)
def test_functions_and_concatenations_keep_the_order(tokens, read, wrap):
    assert (
        read(wrap(tokens), 1, 2, 3, shuffle=True)[0]
        == read(tokens, 1, 2, 3, shuffle=True)[0]
    )


def test_the_order_of_the_dataset_is_another_on_one_rank_than_on_several(tokens, read):
    _, state = read(tokens, 0, 1, 3)
    with pytest.raises(StateError, match=r"order_of='samples'.*order_of='blocks'"):
        read(tokens, 0, 2, state=state)
    _, state = read(tokens, 0, 2, 3)
    assert len(read(tokens, 2, 4, state=state)[0]) == (SAMPLES - 600) // 4


def test_a_stream_has_the_order_of_the_loader(tokens, read):
    for rank in range(2):
        of_loader = read(tokens, rank, 2, shuffle=True)[0]
        assert read(tokens.stream(shuffle=True), rank, 2)[0] == of_loader
        part = tokens.stream(shuffle=True, seed=5, rank=rank, world_size=2)
        assert first_tokens(part) == of_loader
        assert len(part) == len(of_loader)


def test_samples_of_a_subset_are_not_read_in_blocks(tokens, read):
    with pytest.warns(UserWarning, match="each of 2 ranks reads all"):
        assert read(torch.utils.data.Subset(tokens, [5, 30_000, 7]), 0, 2)[0] == [
            5,
            30_000,
            7,
        ]


def test_sizes_of_blocks_follow_from_the_bytes_of_samples(folder):
    data = hr.TokenDataset(folder / "*.bin", seq_len=100)
    assert data.blocks[:2] == (1310, 192)
    whole = hr.MDSDataset(in_memory(FORMATS["mds zstd"].files))
    assert whole.blocks[:2] == (-(-len(whole) // len(whole.counts)), 192)
    assert whole.blocks.borders.tolist() == [0, *np.cumsum(whole.counts)[:-1].tolist()]
    assert set(len(data) + whole.blocks.borders) < set(
        hr.concat([data, whole]).blocks.borders.tolist()
    )
