"""Streams without a seed of their own have the order of the loader's seed."""

import pytest

import headrace as hr
from headrace.errors import StateError
from tests.unit.streams import reading


def buffer(folder, **seed):
    return reading.stream(*range(60)).shuffle(20, **seed)


def mixed(folder, **seed):
    return hr.mix([reading.stream(*range(60)), reading.stream(*range(60))], [1, 2], **seed)


def joined(folder, **seed):
    return hr.concat([buffer(folder, **seed), buffer(folder, **seed)])


def lines(folder, **seed):
    for shard in range(0 if any(folder.iterdir()) else 6):
        (folder / f"{shard}.jsonl").write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
    return hr.LinesDataset(folder, shuffle=True, buffer_size=5, counts=[10] * 6, **seed)


STREAMS = pytest.mark.parametrize("make", [buffer, mixed, joined, lines])


def read(stream, **options):
    with hr.DataLoader(stream, batch_size=4, collate_fn=list, **options) as loader:
        return [[sample for batch in loader for sample in batch] for _ in range(2)]


@STREAMS
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"placement": "process", "engines": 2}])
def test_stream_without_a_seed_takes_that_of_the_loader(tmp_path, make, options):
    own = read(make(tmp_path, seed=3), **options)
    assert read(make(tmp_path), seed=3, **options) == own
    assert read(make(tmp_path, seed=3), seed=4, **options) == own
    assert read(make(tmp_path), **options) == read(make(tmp_path, seed=0), **options) != own


@STREAMS
@pytest.mark.filterwarnings("ignore:.*has no state_dict")
def test_state_of_a_stream_is_of_the_seed_of_its_loader(tmp_path, make):
    def loader(seed):
        return hr.DataLoader(make(tmp_path), batch_size=4, collate_fn=list, seed=seed)

    begun = loader(3)
    batches = iter(begun)
    next(batches)
    restored = loader(3)
    restored.load_state_dict(begun.state_dict())
    assert list(restored) == list(batches)
    with pytest.raises(StateError, match="seed"):
        loader(4).load_state_dict(begun.state_dict())
