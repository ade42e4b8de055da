"""Rank of a process, and part of a stream for each rank."""
