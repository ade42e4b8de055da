"""The consumer's side of an epoch: planning, prefetching, delivery."""
