"""What the loader counts and measures: reports, and exporters of metrics, `headrace.telemetry.prometheus` for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.telemetry.exporters import opentelemetry as opentelemetry
    from headrace.telemetry.exporters import prometheus as prometheus
else:

    def __getattr__(name: str) -> Any:
        if name not in ("opentelemetry", "prometheus"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from headrace.telemetry import exporters

        return getattr(exporters, name)
