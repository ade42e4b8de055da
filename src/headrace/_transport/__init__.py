"""Transport between processes: pickling, frames, shared memory."""
