"""The consumer's side of an epoch: its beginning, prefetching, delivery."""
