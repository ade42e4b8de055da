"""A loader warns once of an async stream that several ranks read whole, unless a part of it declares a split."""

import warnings

import pytest

import headrace as hr


class Numbers(hr.AsyncIterableDataset):
    def __init__(self, inner=None):
        self.inner = inner

    async def __aiter__(self):
        yield 1


class Declared(Numbers):
    splits_by_rank = True


def test_loader_warns_once_of_a_stream_that_is_not_split(as_rank):
    as_rank(1, 2)
    with hr.DataLoader(Numbers().shuffle(2)) as loader:
        with pytest.warns(UserWarning, match=r"2 ranks.*\.split\(\).*get_rank_info.*splits_by_rank") as caught:
            list(loader)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(loader)


@pytest.mark.parametrize(
    ("make", "world_size"),
    [(Numbers, 1), (lambda: Numbers().split().map(abs), 2), (Declared, 2), (lambda: Numbers(Declared()), 2)],
)
def test_loader_does_not_warn_of_one_rank_or_a_split(as_rank, make, world_size):
    as_rank(0, world_size)
    with hr.DataLoader(make()) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
