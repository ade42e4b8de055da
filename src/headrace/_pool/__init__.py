"""Worker processes: start, supervision, replacement."""
