"""The cache on disk, shared by all processes of a machine."""
