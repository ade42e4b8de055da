"""The harness sees every difference between two loaders that the parity tests rely on."""

import warnings

import numpy as np
import pytest
import torch

from tests.parity.harness import SETTINGS, Raised, Same, assert_same


@pytest.fixture
def same():
    return Same(SETTINGS[0])


DIFFERENT = [
    ([1], (1,)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), torch.ones(2, requires_grad=True)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (Raised(ValueError, "a"), Raised(ValueError, "b")),
]


def test_differences_are_found():
    for ours, torchs in DIFFERENT:
        with pytest.raises(AssertionError):
            assert_same(ours, torchs)
        assert_same(torchs, torchs)


def only_ours(action):
    return lambda DataLoader: action() if DataLoader.is_ours else None


@pytest.mark.parametrize(
    "action",
    [
        lambda: 1,
        lambda: np.random.random() and None,
        lambda: warnings.warn("so", stacklevel=1),
    ],
    ids=["result", "NumPy's generator", "warning"],
)
def test_extra_effects_with_headrace_are_found(same, action):
    with pytest.raises(AssertionError):
        same(only_ours(action))


def test_failures_and_warnings_are_results_only_where_they_are_expected(same):
    def program(DataLoader):
        raise ValueError("both fail alike")

    with pytest.raises(AssertionError, match="both fail alike"):
        same(program)
    same(program, fails=True)
    for expected in ({"fails": True}, {"warns": True}):
        with pytest.raises(AssertionError):
            same(lambda DataLoader: 1, **expected)
