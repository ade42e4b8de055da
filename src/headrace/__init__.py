"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]
"""

import ast
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
        # Read from the import statements of `_api`, which is not run: it would import all of them.
        found = importlib.util.find_spec(f"{__name__}._api")
        statements = ast.parse(found.loader.get_source(found.name)).body
        imports = [each for each in statements if isinstance(each, ast.ImportFrom)]
        modules = {alias.name: each.module for each in imports for alias in each.names}
        (public,) = (ast.literal_eval(each.value) for each in statements if isinstance(each, ast.Assign))
        return {name: modules[name] for name in public}

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
