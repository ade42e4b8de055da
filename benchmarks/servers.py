"""The object server of the examples, for benchmarks, which run as scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from object_server import Fault, ObjectServer

__all__ = ["Fault", "ObjectServer"]
