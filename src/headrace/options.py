"""The keyword arguments that headrace adds to torch's loader: each is defined once, in `LoaderOptions`.

A definition has the name, the type, the default, the check, the text for `help()`, and whether the engine needs it.
`DataLoader`'s signature, docstring, attributes and repr follow from it. The engine reads ``config.options[name]``, the
consumer's side ``loader._options[name]``.
"""

import functools
import inspect
import math
import textwrap
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

from headrace._core.error_policy import OnError, error_policy
from headrace._core.ranks.data_parallel import DataParallel, checked
from headrace._core.ray_placement import RayPlacement
from headrace._core.retry_policy import RetryPolicy, as_policy
from headrace._core.text import check_keywords

__all__ = [
    "MEMORY_BUDGET",
    "OPTIONS",
    "ExecutorKind",
    "FetchedByIndex",
    "Hedge",
    "Indexed",
    "LoaderOptions",
    "Option",
    "Placement",
    "Samples",
    "Unset",
    "checked_options",
    "documented",
    "engine_options",
    "number_of_engines",
    "shown_in_signature",
]

ExecutorKind = Literal["process", "thread"]
Hedge = Literal["auto"]
Placement = Literal["auto", "thread", "process"] | RayPlacement

# Bytes. 1,024 fetches of 1 MiB; a sixteenth of the memory of a small training machine.
MEMORY_BUDGET = 1 << 30


class Unset(int):
    """A default that torch filled in: it stays one where a trainer rebuilds a loader from the attributes of another."""


Check = Callable[[str, object], object]


class Option(NamedTuple):
    """The definition of an option.

    Attributes:
        default: its default.
        check: given the name and the value; returns the value to use, or raises TypeError or ValueError.
        doc: its description in `DataLoader`'s docstring.
        for_engine: whether the engine is sent it, which may be in another process.
    """

    default: object
    check: Check
    doc: str
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
    if isinstance(value, RayPlacement):
        return value
    return _one_of(*get_args(get_args(Placement)[0]))(name, value)


def _integer(words: str, least: int, most: float = math.inf, *, also: tuple[str | None, ...] = ()) -> Check:

    def check(name: str, value: object) -> object:
        if value in also:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be {words}, but got {value!r}")
        if not least <= value <= most:
            raise ValueError(f"{name} must be {words}, but got {value!r}")
        return value

    return check


def _callable_or_none(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but got {value!r}")
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
    """headrace's own keyword arguments of `DataLoader`."""

    transform: Annotated[
        Callable[[Any], object] | None,
        Option(None, _callable_or_none, "CPU work for each sample, done in the workers."),
    ]
    concurrency: Annotated[
        int | Literal["auto"],
        Option(
            "auto",
            _integer('an int of at least 1, or "auto"', 1, also=("auto",)),
            """samples being fetched at once, across batches. ``"auto"`` begins with 64 and finds what the source serves
            best, up to 1,024: more while the rate grows, fewer when it asks for fewer or times out. With `agets` it is
            calls that are counted, at first as many as 64 samples take, and at most the look-ahead. For datasets with
            `aget` or `agets`.""",
            for_engine=True,
        ),
    ]
    memory_budget: Annotated[
        int | None,
        Option(
            MEMORY_BUDGET,
            _integer("an int of at least 1 byte, or None", 1, also=(None,)),
            """bytes that may be fetched, or being fetched, and not yet taken by your loop; 1 GiB by default, None for
            no bound. Sizes are estimated from samples and batches that came, and the next batch is always fetched. For
            datasets with `aget` or `agets`.""",
            for_engine=True,
        ),
    ]
    placement: Annotated[
        Placement,
        Option(
            "auto",
            _placement,
            """where fetching runs. ``"thread"``: a daemon thread of this process; nothing needs pickling.
            ``"process"``: a process of its own; the trainer's Python and the loader do not slow each other.
            ``"auto"``: a process for an async dataset with workers, else a thread; `stats()` says why. A
            `RayPlacement`: engines on a Ray cluster.""",
        ),
    ]
    engines: Annotated[
        int,
        Option(
            1,
            _integer("an int of at least 1", 1),
            """number of processes that fetch, each with an event loop of its own, for more objects/s than one
            interpreter serves. They divide `concurrency`, `memory_budget` and `num_workers`; the batches are the same,
            and one that dies is replaced. Of a stream of shards each reads a part, by shards, and batches come from the
            parts in turn; any other stream is read by one of them. For async datasets.""",
        ),
    ]
    on_error: Annotated[
        OnError,
        Option(
            "raise",
            _on_error,
            """``"raise"``: an error of a sample is raised by `next()`, and iteration can go on. ``"skip"``: the batch
            comes without the sample, the first of an epoch is a warning, `stats()` counts all and lists the last. A
            batch that lost all its samples is replaced at the end of the epoch by one that was delivered; where nothing
            can be delivered, `TooManySkippedError` is raised. A `SkipErrors`: the same with limits. A function: called
            in the consumer's thread with each `Failure`; returns ``"skip"`` or ``"raise"``, or raises.""",
        ),
    ]
    retry: Annotated[
        RetryPolicy | int | None,
        Option(
            None,
            _retry,
            """how headrace's own datasets try failed requests again: a `RetryPolicy`, or the most attempts at one
            request. None leaves it to the dataset.""",
            for_engine=True,
        ),
    ]
    hedge: Annotated[
        Hedge | None,
        Option(
            None,
            _one_of("auto", None),
            """``"auto"``: a fetch that holds up the next batch and takes much longer than others did is begun a
            second time, the first answer counts, and at most 5 % more fetches are made so. For datasets with `aget`,
            where fetching twice does no harm; of datasets of ranges, for the joined requests.""",
            for_engine=True,
        ),
    ]
    executor: Annotated[
        ExecutorKind,
        Option(
            "process",
            _one_of(*get_args(ExecutorKind)),
            """kind of the workers of an async dataset: ``"process"``; or ``"thread"``, for transforms that release the
            interpreter: threads of the process that fetches (see `placement`). Threads share random generators, which
            are then not seeded.""",
            for_engine=True,
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            None,
            _integer("an int between 0 and 2**63 - 1, or None", 0, 2**63 - 1, also=(None,)),
            """makes the order and each batch's randomness reproducible, for any `num_workers`; None derives both from
            torch's generator, but the orders of streams from 0. A stream's own `seed` comes first. Generators that a
            transform holds are seeded too (docs/tuning.md, "Randomness").""",
            for_engine=True,
        ),
    ]
    device: Annotated[
        torch.device | str | int | None,
        Option(
            None,
            lambda name, value: value,
            """where batches are to be: a `torch.device`, a string or an int, as torch takes them. They are copied on a
            stream of the loader's own while the device computes, and are ready on the stream that is current in
            `next()`. ``"auto"``: the accelerator where there is one, else host memory. None or ``"cpu"``: host
            memory.""",
        ),
    ]
    device_prefetch: Annotated[
        int,
        Option(
            2,
            _integer("an int of zero or more", 0),
            """for how many batches, beside the one in use, copies may be under way; each takes the memory of a batch on
            the device, and as much look-ahead.""",
        ),
    ]
    data_parallel: Annotated[
        DataParallel,
        Option(
            None,
            checked,
            """the ranks that get different batches: a `torch.distributed.ProcessGroup`, a mesh dimension
            (``mesh["dp"]``), or a function that returns one of them, called at `iter()`. The loader, its dataset and
            its samplers take rank and world size from it (`headrace.get_rank_info`), so that ranks outside of it, those
            of tensor or pipeline parallelism, get the same batches. None: all ranks.""",
        ),
    ]
    coordinated: Annotated[
        bool,
        Option(
            False,
            _bool,
            """whether the epoch ends at the same step on all ranks (of `data_parallel`), when the first of them has no
            more batches; for streams of which ranks have unequal numbers of batches. Needs `torch.distributed`; the
            ranks communicate in `next()`. An error that ends the epoch of one rank is a `CoordinationError` on the
            others.""",
        ),
    ]


class FetchedByIndex(Protocol):
    """A dataset with an async `aget`."""

    async def aget(self, index: Never, /) -> object:
        """Fetch a sample."""


class Indexed(Protocol):
    """A dataset with `__getitem__`."""

    def __getitem__(self, index: Never, /) -> object: ...


Samples: TypeAlias = Dataset[Any] | FetchedByIndex | AsyncIterable[Any] | Iterable[Any] | Indexed


_HINTS = get_type_hints(LoaderOptions, include_extras=True)
OPTIONS: dict[str, Option] = {name: get_args(hint)[1] for name, hint in _HINTS.items()}


def checked_options(given: LoaderOptions) -> LoaderOptions:
    """All options: those that are given, checked, and the defaults of the others.

    Raises:
        TypeError: an option is of the wrong type, or unknown.
        ValueError: an option is out of its range.
    """
    values = cast(dict[str, object], given)
    if not values.keys() <= OPTIONS.keys():
        parameters = inspect.signature(torch.utils.data.DataLoader).parameters
        check_keywords("DataLoader.__init__", values, [*OPTIONS, *parameters])
    checked = {name: option.check(name, values.get(name, option.default)) for name, option in OPTIONS.items()}
    return cast(LoaderOptions, checked)


def engine_options(options: LoaderOptions) -> LoaderOptions:
    """The options that the engine is sent."""
    return cast(LoaderOptions, {name: value for name, value in options.items() if OPTIONS[name].for_engine})


F = TypeVar("F", bound=Callable[..., None])
C = TypeVar("C", bound=type)


def shown_in_signature(init: F) -> F:
    """Show each option in the signature of a constructor that takes them as ``**options``."""
    signature = inspect.signature(init)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=get_args(hint)[0])
        for name, option in OPTIONS.items()
        if name not in signature.parameters and (hint := _HINTS[name])
    ]
    init.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return init


def documented(cls: C) -> C:
    """Put the descriptions of the options in place of ``{options}`` in a class's docstring."""
    above, _, below = (cls.__doc__ or "").partition("{options}")
    indent = " " * (len(above) - len(above.rstrip(" ")))  # from Python 3.13 on, four less than in the source
    entry = functools.partial(textwrap.fill, width=120, initial_indent=indent, subsequent_indent=f"{indent}    ")
    entries = [entry(f"{name}: {' '.join(option.doc.split())}") for name, option in OPTIONS.items()]
    cls.__doc__ = above.rstrip(" ") + "\n".join(entries) + below
    return cls


def number_of_engines(options: LoaderOptions) -> int:
    """How many engines a loader asks for, here or on a cluster."""
    placement = options["placement"]
    return placement.engines if isinstance(placement, RayPlacement) else options["engines"]
