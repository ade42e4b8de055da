"""headrace: an asyncio-native streaming data loader for PyTorch.

>>> import headrace as hr
>>> class Squares(hr.AsyncDataset):
...     def __len__(self): return 4
...     async def aget(self, index): return index * index
>>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
[[0, 1], [4, 9]]
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from headrace._version import __version__ as __version__

if TYPE_CHECKING:
    from headrace import telemetry as telemetry
    from headrace._api import *  # noqa: F403
    from headrace._api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        # Importing torch takes seconds, and the command must be able to answer before.
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("__") and name != "__all__":
            raise missing
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        api = importlib.import_module("headrace._api")
        globals().update({exported: getattr(api, exported) for exported in api.__all__}, __all__=api.__all__)
        if name not in globals():
            raise missing
        return globals()[name]

    def __dir__() -> list[str]:
        # Not the internal modules, which importing them binds here too.
        return [*__getattr__("__all__"), "__doc__", "__file__", "__name__", "__path__", "__spec__"]
