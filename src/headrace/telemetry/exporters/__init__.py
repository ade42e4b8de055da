"""Exporters of metrics: in each file a function of its name, which `headrace.telemetry` has too."""
