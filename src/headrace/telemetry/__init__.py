"""Counts, reports and traces of loaders."""
