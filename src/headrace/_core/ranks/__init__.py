"""The rank of a process, and its part of a stream."""
