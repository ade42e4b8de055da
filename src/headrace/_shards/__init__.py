"""Shards: discovery, order, reading, decompression."""
