"""Manifests and tables of keys: reading, writing, validation."""
