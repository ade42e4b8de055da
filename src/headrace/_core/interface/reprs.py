"""Short reprs of datasets, samples and functions."""

from __future__ import annotations

import reprlib
from typing import Any

_short = reprlib.Repr()
_short.maxother = 200  # characters


def dataset_repr(dataset: Any) -> str:
    """The repr of a dataset, shortened: of a list of a million keys only the first few."""
    return _short.repr(dataset)


def function_name(function: Any) -> str:
    """The qualified name of a function; of another callable the name of its class."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def sample_repr(sample: Any) -> str:
    """The repr of a named tuple, with the number of bytes instead of its field `data`."""
    fields = (f"{name}=<{len(value):,} bytes>" if name == "data" else f"{name}={value!r}"
              for name, value in zip(sample._fields, sample, strict=True))  # fmt: skip
    return f"{type(sample).__name__}({', '.join(fields)})"
