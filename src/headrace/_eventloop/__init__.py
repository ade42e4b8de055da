"""Event loops in threads, and resources for each loop.

The package also waits for file descriptors and finds blocking calls.
"""
