"""Streams without a seed of their own have the order of the loader's seed."""

import pytest

import headrace as hr
from headrace.errors import StateError


def lines(folder, **seed):
    for shard in range(0 if any(folder.iterdir()) else 6):
        (folder / f"{shard}.jsonl").write_text(
            "".join(f"{10 * shard + line}\n" for line in range(10))
        )
    return hr.LinesDataset(folder, shuffle=True, buffer_size=5, **seed)


def read(stream, **options):
    with hr.DataLoader(stream, batch_size=4, collate_fn=list, **options) as loader:
        return [[sample for batch in loader for sample in batch] for _ in range(2)]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"placement": "process", "engines": 2}]
)
def test_stream_without_a_seed_takes_that_of_the_loader(tmp_path, options):
    own = read(lines(tmp_path, seed=3), **options)
    assert read(lines(tmp_path), seed=3, **options) == own
    assert read(lines(tmp_path, seed=3), seed=4, **options) == own
    assert (
        read(lines(tmp_path), **options)
        == read(lines(tmp_path, seed=0), **options)
        != own
    )


def test_state_of_a_stream_is_of_the_seed_of_its_loader(tmp_path):
    def loader(seed):
        return hr.DataLoader(lines(tmp_path), batch_size=4, collate_fn=list, seed=seed)

    begun = loader(3)
    next(iter(begun))
    with pytest.raises(StateError, match="seed"):
        loader(4).load_state_dict(begun.state_dict())
