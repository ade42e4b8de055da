"""What the loader counts, and how it tells."""
