"""Ranks of processes, and parts of streams."""
