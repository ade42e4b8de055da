"""Keyword arguments that headrace adds to torch's loader.

`LoaderOptions` defines each option once: name, type, default, check, and whether the engine needs
the option. The signature and the attributes of `DataLoader` follow from the definitions.
"""

import inspect
import math
from collections.abc import AsyncIterable, Callable, Iterable
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Never,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import torch
from torch.utils.data import Dataset

from headrace._base.remote_placement import RemotePlacement
from headrace._base.text import check_function, check_keywords, whole_number
from headrace._ranks.data_parallel import DataParallel, checked
from headrace._records.error_policy import OnError, error_policy
from headrace._store.retry_policy import RetryPolicy, as_policy

Hedge = Literal["auto"]
Placement = Literal["auto", "thread", "process"] | RemotePlacement

# In bytes: 1,024 fetches of 1 MiB, or a sixteenth of the memory of a small training machine.
MEMORY_BUDGET = 1 << 30


Check = Callable[[str, object], object]


class Option(NamedTuple):
    """The definition of an option.

    Attributes:
        default: value if the loader is not given the option.
        check: function of the option's name and value. Returns the value to use, or raises
            TypeError or ValueError.
        for_engine: whether the engine receives the option. The engine may be in another process.
    """

    default: object
    check: Check
    for_engine: bool = False


def _one_of(*values: str | None) -> Check:
    quoted = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    words = f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def check(name: str, value: object) -> object:
        if value not in values:
            raise ValueError(f"{name} must be {words}, but got {value!r}")
        return value

    return check


def _placement(name: str, value: object) -> object:
    if isinstance(value, RemotePlacement):
        return value
    return _one_of(*get_args(get_args(Placement)[0]))(name, value)


def _integer(
    least: int, most: float = math.inf, *, also: tuple[str | None, ...] = ()
) -> Check:
    return lambda name, value: (
        value if value in also else whole_number(name, value, least, most)
    )


def _callable_or_none(name: str, value: object) -> object:
    if value is not None:
        check_function(name, value)
    return value


def _bool(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but got {value!r}")
    return value


def _retry(name: str, value: RetryPolicy | int | None) -> RetryPolicy | None:
    return None if value is None else as_policy(value)


def _on_error(name: str, value: OnError) -> object:
    error_policy(value)
    return value


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of `DataLoader` beyond torch's."""

    # Fetching.
    concurrency: Annotated[
        int | Literal["auto"],
        Option("auto", _integer(1, also=("auto",)), for_engine=True),
    ]
    memory_budget: Annotated[
        int | None, Option(MEMORY_BUDGET, _integer(1, also=(None,)), for_engine=True)
    ]
    retry: Annotated[RetryPolicy | int | None, Option(None, _retry, for_engine=True)]
    hedge: Annotated[Hedge | None, Option(None, _one_of("auto", None), for_engine=True)]
    # Placement.
    placement: Annotated[Placement, Option("auto", _placement)]
    engines: Annotated[int, Option(1, _integer(1))]
    # Results.
    transform: Annotated[Callable[[Any], object] | None, Option(None, _callable_or_none)]
    on_error: Annotated[OnError, Option("raise", _on_error)]
    seed: Annotated[
        int | None, Option(None, _integer(0, 2**63 - 1, also=(None,)), for_engine=True)
    ]
    # Device.
    device: Annotated[
        torch.device | str | int | None, Option(None, lambda name, value: value)
    ]
    device_prefetch: Annotated[int, Option(2, _integer(0))]
    # Ranks.
    data_parallel: Annotated[DataParallel, Option(None, checked)]
    coordinated: Annotated[bool, Option(False, _bool)]


class FetchedByIndex(Protocol):
    """A dataset with an async `aget`."""

    async def aget(self, index: Never, /) -> object:
        """Fetch a sample."""


class Indexed(Protocol):
    """A dataset with `__getitem__`."""

    def __getitem__(self, index: Never, /) -> object: ...


Samples: TypeAlias = (
    Dataset[Any] | FetchedByIndex | AsyncIterable[Any] | Iterable[Any] | Indexed
)


_HINTS = get_type_hints(LoaderOptions, include_extras=True)
OPTIONS: dict[str, Option] = {name: get_args(hint)[1] for name, hint in _HINTS.items()}


def checked_options(given: LoaderOptions) -> LoaderOptions:
    """Check the given options and add defaults for all others.

    Args:
        given: options by name.

    Returns:
        All options, each as returned by the option's check.

    Raises:
        TypeError: an option has the wrong type, or is unknown.
        ValueError: an option is out of range.
    """
    values = cast(dict[str, object], given)
    if not values.keys() <= OPTIONS.keys():
        parameters = inspect.signature(torch.utils.data.DataLoader).parameters
        check_keywords("DataLoader.__init__", values, [*OPTIONS, *parameters])
    checked = {
        name: option.check(name, values.get(name, option.default))
        for name, option in OPTIONS.items()
    }
    return cast(LoaderOptions, checked)


def engine_options(options: LoaderOptions) -> LoaderOptions:
    """Return the options for the engine."""
    return cast(
        LoaderOptions,
        {name: value for name, value in options.items() if OPTIONS[name].for_engine},
    )


F = TypeVar("F", bound=Callable[..., None])


def shown_in_signature(init: F) -> F:
    """Show all options in the signature of a constructor with ``**options``."""
    signature = inspect.signature(init)
    named = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=get_args(hint)[0],
        )
        for name, option in OPTIONS.items()
        if name not in signature.parameters and (hint := _HINTS[name])
    ]
    shown = signature.replace(parameters=[*named, *options])
    init.__signature__ = shown  # type: ignore[attr-defined]
    return init


def number_of_engines(options: LoaderOptions) -> int:
    """Return the number of engines, on this machine or on others."""
    remote = remote_placement(options)
    return options["engines"] if remote is None else remote.engines


def remote_placement(options: LoaderOptions) -> RemotePlacement | None:
    """Return the placement on other machines, or None."""
    placement = options["placement"]
    return placement if isinstance(placement, RemotePlacement) else None
