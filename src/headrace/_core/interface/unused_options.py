"""A warning for options of a loader that have no effect for its dataset."""

import warnings
from typing import cast

from headrace._core.call_site import users_stacklevel
from headrace._core.interface.kinds import DatasetKind, capabilities
from headrace.options import OPTIONS, AllOptions


def warn_of_unused(options: AllOptions, dataset: object, kind: DatasetKind, *, batched: bool) -> None:
    """Warn of options that are not at their defaults and have no effect for this dataset."""
    values = cast(dict[str, object], options)
    given = [name for name, option in OPTIONS.items() if values[name] not in (None, option.default)]
    unused = [name for name in given if not _has_effect(name, kind)]
    can = capabilities(dataset)
    if kind is DatasetKind.ASYNC_MAP and batched and can.agets and not can.ranges and options["hedge"]:
        unused.append("hedge")
        reason = "fetched from by agets, and only calls of aget are begun a second time: leave it out"
    elif kind.is_async:
        reason = "a stream, and decides itself how much is read at once: set its own arguments, or leave this out"
    else:
        if options["placement"] == "process":
            unused.append("placement")
        reason = (
            "a torch dataset, of which this process, or each of num_workers, reads one sample after the other: give it "
            "a method `async def aget(self, index)`, or leave this out"
        )
    if unused:
        named = ", ".join(f"{name}={values[name]!r}" for name in unused)
        message = f"{named}: without effect, since {type(dataset).__name__} is {reason}."
        warnings.warn(message, UserWarning, stacklevel=users_stacklevel())


def _has_effect(name: str, kind: DatasetKind) -> bool:
    of = OPTIONS[name].datasets
    return of == "all" or (kind.is_async if of == "async" else kind is DatasetKind.ASYNC_MAP)
