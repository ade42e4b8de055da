"""What tests of data loading need: a local object store, small datasets, and contracts that a dataset can be held to.

`ObjectServer` needs aiohttp (``pip install headrace[testing]``); the rest needs nothing more than headrace does.
"""

from headrace.testing.contract import DatasetContract, StreamContract
from headrace.testing.datasets import SlowDataset
from headrace.testing.faults import Fault
from headrace.testing.object_server import ObjectServer

__all__ = ["DatasetContract", "Fault", "ObjectServer", "SlowDataset", "StreamContract"]
