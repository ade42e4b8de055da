"""The variable that makes a function large."""

import functools

import numpy as np
import pytest
import torch

from headrace._core.transport.largest import largest_value

TABLE = np.zeros(10_000)


def look_up(index):
    return TABLE[index]


def nested(index):
    return [TABLE[i] for i in range(index)]


class Transform:
    def __init__(self, table):
        self.tables = {"deep": [table]}

    def method(self, index):
        return index


def closure(table):
    return lambda index: table[index]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (look_up, "'TABLE', a global of look_up (ndarray)"),
        (nested, "'TABLE', a global of nested (ndarray)"),
        (closure(torch.zeros(10_000)), "'table', a variable of closure.<locals>.<lambda> (Tensor)"),
        (closure(bytes(80_000)), "'table', a variable of closure.<locals>.<lambda> (bytes)"),
        (Transform(TABLE), "attribute 'tables' of Transform (ndarray)"),
        (Transform(TABLE).method, "attribute 'tables' of Transform (ndarray)"),
        (functools.partial(max, TABLE), "an argument of functools.partial("),
    ],
)
def test_variable_is_named(function, expected):
    name, size = largest_value(function)
    assert name.startswith(expected)
    assert size in (80_000, 40_000)


def test_small_function_has_no_largest_variable():
    assert largest_value(len) == ("", 0)


def test_tensor_in_shared_memory_is_not_counted():
    assert largest_value(closure(torch.zeros(10_000).share_memory_())) == ("", 0)
