"""Event loops in threads, waiting for descriptors, blocking calls, and resources of a loop."""
