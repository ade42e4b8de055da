"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]
"""

import contextlib
import functools
import gc
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace._version import __version__ as __version__

if TYPE_CHECKING:
    from headrace import telemetry as telemetry
    from headrace._api import *  # noqa: F403
    from headrace._api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        # Importing torch takes seconds, and the command must be able to answer before. All of headrace takes longer
        # than torch's loader to its first batch: a name imports its own module, and no other.
        modules = _modules_of_names()
        if name == "__all__":
            value = [*modules]
        elif name in modules:
            with _no_collections():
                value = getattr(importlib.import_module(modules[name]), name)
        elif not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    @functools.cache
    def _modules_of_names() -> dict[str, str]:
        # `_api` is run with an import that imports nothing: its names are then the modules that they come from.
        class Origin:
            def __init__(self, module: str, *_: object) -> None:
                self.module = module

            def __getattr__(self, name: str) -> str:
                return self.module

        found = importlib.util.find_spec(f"{__name__}._api")
        names = {"__builtins__": {"__import__": Origin}}
        exec(found.loader.get_code(found.name), names)
        return {name: names[name] for name in names["__all__"]}

    @contextlib.contextmanager
    def _no_collections() -> Iterator[None]:
        # Imports make much that stays and hardly anything to collect. They cause about one search of the whole heap,
        # torch's included, in every second program: more than half of the time of the import (benchmarks/drop_in.py).
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()

    def __dir__() -> list[str]:
        # Not the internal modules, which importing them binds here too.
        return [*__getattr__("__all__"), "__doc__", "__file__", "__name__", "__path__", "__spec__"]
