"""Types of results, for annotations and `isinstance`.

Loaders and datasets create the objects. Programs rarely do.
"""

from headrace._consumer.delivery import EpochDelivery
from headrace._random.randomized import Randomized
from headrace._ranks.rankinfo import RankInfo
from headrace._records.batches import BatchPlan, RequestCounts
from headrace._records.failure import Failure, Stage
from headrace._streams.kinds import Blocks
from headrace.datasets.files import FileSample
from headrace.datasets.objects import ObjectSample
from headrace.datasets.video import VideoClip
from headrace.telemetry.counters import LoaderStats
from headrace.telemetry.report import Report

__all__ = [
    "BatchPlan",
    "Blocks",
    "EpochDelivery",
    "Failure",
    "FileSample",
    "LoaderStats",
    "ObjectSample",
    "Randomized",
    "RankInfo",
    "Report",
    "RequestCounts",
    "Stage",
    "VideoClip",
]
