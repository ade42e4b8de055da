"""Tools for tests of data loading: a local object store with faults, a slow dataset, and contracts for datasets.

`ObjectServer` needs aiohttp and the contracts need pytest: ``pip install headrace[testing]``.
"""

from headrace.testing.contract import DatasetContract, StreamContract
from headrace.testing.datasets import SlowDataset
from headrace.testing.faults import Fault
from headrace.testing.object_server import ObjectServer

__all__ = ["DatasetContract", "Fault", "ObjectServer", "SlowDataset", "StreamContract"]
