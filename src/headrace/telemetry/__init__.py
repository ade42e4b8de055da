"""What the loader counts and measures: reports, and an exporter of metrics, `headrace.telemetry.prometheus`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.telemetry.exporters import prometheus as prometheus
else:

    def __getattr__(name: str) -> Any:
        if name != "prometheus":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from headrace.telemetry.exporters import prometheus

        return prometheus
