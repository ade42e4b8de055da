"""The consumer's side of an epoch: begin, prefetch and deliver."""
