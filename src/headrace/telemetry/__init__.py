"""What the loader counts and measures: reports, and an exporter of metrics, `headrace.telemetry.prometheus`."""

from headrace.telemetry.exporters import prometheus as prometheus
