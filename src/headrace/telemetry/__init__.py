"""Reports and metrics of loaders; `headrace.telemetry.prometheus` exports metrics."""

from headrace.telemetry.exporters import prometheus as prometheus
