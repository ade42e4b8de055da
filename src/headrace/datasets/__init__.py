"""Datasets: what can be fetched, and how."""
