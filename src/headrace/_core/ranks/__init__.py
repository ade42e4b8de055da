"""Rank of a process and its part of a stream."""
