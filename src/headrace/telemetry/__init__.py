"""What the loader counts and measures: reports, and exporters of metrics, `headrace.telemetry.prometheus` for one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.telemetry.exporters.opentelemetry import opentelemetry as opentelemetry
    from headrace.telemetry.exporters.prometheus import prometheus as prometheus
else:

    def __getattr__(name: str) -> Any:
        # Each exporter is a file with a function of its name.
        if name.startswith("_") or not importlib.util.find_spec(f"{__name__}.exporters.{name}"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.exporters.{name}"), name)
