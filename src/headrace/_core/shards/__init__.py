"""Streams of shards: discovery, order, reading, decompression."""
